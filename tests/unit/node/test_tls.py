"""The node's certificate: what it says, how long, and where it is kept."""

from __future__ import annotations

import stat
from hashlib import sha256
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from peerloom.node import tls
from peerloom.protocol import limits
from peerloom.protocol.errors import MalformedMessage, StorageError

NOW = 1_700_000_000.0
DAY = 86_400.0


def of_another_version(der: bytes) -> bytes:
    """The certificate with the one byte changed that says its version."""
    at = der.index(bytes.fromhex("a003020102")) + 4
    return der[:at] + b"\7" + der[at + 1 :]


def test_a_certificate_is_p256_and_bears_the_pinned_name_around_any_plausible_clock() -> None:
    made = tls.make_certificate(NOW)
    certificate = x509.load_der_x509_certificate(made.der)
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [tls.TARGET_NAME]
    assert certificate.not_valid_before_utc.timestamp() <= NOW - 30 * DAY
    assert certificate.not_valid_after_utc.timestamp() >= NOW + 5 * 365 * DAY
    assert len(made.der) <= limits.MAX_CERT_BYTES
    assert tls.fingerprint(made.der) == sha256(made.der).digest()
    assert tls.pinned_pem(made.der).replace(b"\n", b"") == made.certificate_pem.replace(b"\n", b"")
    assert "PRIVATE" not in repr(made)


def test_what_is_no_certificate_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="does not parse"):
        tls.pinned_pem(b"\x30\x03abc")


def test_a_certificate_of_a_version_that_there_is_not_is_malformed() -> None:
    with pytest.raises(MalformedMessage, match="does not parse"):
        tls.pinned_pem(of_another_version(tls.make_certificate(NOW).der))


def test_a_restart_keeps_the_certificate_private(tmp_path: Path) -> None:
    first = tls.load_or_make(tmp_path / "node", NOW)
    assert tls.load_or_make(tmp_path / "node", NOW + 100 * DAY) == first
    path = tmp_path / "node" / tls.FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [tls.FILE_NAME]


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign key", "text"])
def test_a_broken_file_is_replaced(tmp_path: Path, damage: str) -> None:
    first = tls.load_or_make(tmp_path, NOW)
    path = tmp_path / tls.FILE_NAME
    foreign = tls.make_certificate(NOW).key_pem + first.certificate_pem
    path.write_bytes({"empty": b"", "cut": path.read_bytes()[:-50], "foreign key": foreign, "text": b"hello"}[damage])
    second = tls.load_or_make(tmp_path, NOW)
    assert second != first
    assert tls.load_or_make(tmp_path, NOW) == second


def test_an_ageing_certificate_is_replaced(tmp_path: Path) -> None:
    first = tls.load_or_make(tmp_path, NOW)
    assert tls.load_or_make(tmp_path, NOW + 9.5 * 365 * DAY) != first


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="file"):
        tls.load_or_make(tmp_path / "file", NOW)
