"""The node's TLS certificate: P-256, self-signed, pinned by peers through the signed peer record.

Nothing is trusted for its names or dates: a client trusts exactly the one certificate that the record carries. So all
certificates bear one fixed name, and their dates leave room for any clock that is merely wrong.
"""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from peerloom.protocol.errors import MalformedMessage, StorageError

TARGET_NAME = "node.peerloom.invalid"  # RFC 2606: never a real host
BACKDATED = datetime.timedelta(days=365)  # a board without a clock battery starts months in the past
LIFETIME = datetime.timedelta(days=3650)
RENEW_BEFORE = datetime.timedelta(days=365)
FILE_NAME = "tls.pem"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its private key, both PEM, and what peers pin (DER)."""

    certificate_pem: bytes
    key_pem: bytes = field(repr=False)
    der: bytes


def fingerprint(cert_der: bytes) -> bytes:
    """SHA-256 of the certificate, 32 bytes."""
    return sha256(cert_der).digest()


def pinned_pem(cert_der: bytes) -> bytes:
    """The certificate as the one root a client trusts; raises MalformedMessage when a record's bytes are none."""
    try:
        x509.load_der_x509_certificate(cert_der)
    except (ValueError, x509.InvalidVersion):  # which is no ValueError
        raise MalformedMessage("the record's certificate does not parse") from None
    return ssl.DER_cert_to_PEM_cert(cert_der).encode()


def make_certificate(now: float) -> Certificate:
    """A fresh key and certificate; `now` is Unix seconds."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, TARGET_NAME)])
    today = datetime.datetime.fromtimestamp(now, datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - BACKDATED)
        .not_valid_after(today + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TARGET_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _bundle(certificate, key)


def _bundle(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Certificate:
    unencrypted = serialization.NoEncryption()
    return Certificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted),
        certificate.public_bytes(serialization.Encoding.DER),
    )


def load_or_make(folder: Path, now: float) -> Certificate:
    """The certificate kept in `folder`, so that a restart keeps its pin; made anew when missing, broken or ageing.

    Raises StorageError when the folder cannot be read or written.
    """
    path = folder / FILE_NAME
    try:
        kept = _parse(path.read_bytes(), now) if path.exists() else None
        if kept is not None:
            return kept
        made = make_certificate(now)
        _write(path, made.key_pem + made.certificate_pem)
    except OSError as error:
        raise StorageError(
            f"the TLS certificate {path} cannot be kept ({error.strerror}); make the folder readable and writable"
        ) from error
    return made


def _parse(pem: bytes, now: float) -> Certificate | None:
    """None for what is no usable pair: nothing is lost by making another."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
        certificate = x509.load_pem_x509_certificate(pem[pem.index(b"-----BEGIN CERTIFICATE-----") :])
    except (ValueError, TypeError):
        return None
    today = datetime.datetime.fromtimestamp(now, datetime.UTC)
    in_time = certificate.not_valid_before_utc <= today <= certificate.not_valid_after_utc - RENEW_BEFORE
    if not (in_time and isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == certificate.public_key()):
        return None
    return _bundle(certificate, key)


def _write(path: Path, data: bytes) -> None:
    """Atomic, and readable by this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
