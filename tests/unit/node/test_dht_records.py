"""The validator: our records pass, whatever was moved, altered, prolonged or made up does not."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.node import dht_records as records
from peerloom.node.dht_records import RecordValidator, key_bytes, peers_key, spec_key
from peerloom.node.identity import Identity
from peerloom.node.specs import sign_spec
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerId, RunId
from tests.unit.node.discovery_swarm import RUN, ManualClock, record_of

CLOCK = ManualClock()
NOW = CLOCK.wall()
ME, OTHER = Identity.generate(), Identity.generate()
VALIDATOR = RecordValidator(CLOCK.wall)


@dataclass(frozen=True)
class Stored:
    """hivemind.dht.DHTRecord's shape."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def stored(value: bytes, key: bytes = peers_key(RUN), subkey: str = ME.peer_id, expires_at: float = NOW + 30) -> Stored:
    return Stored(key_bytes(key), msgpack.packb(subkey), msgpack.packb(value), expires_at)


PEER = records.encode_peer(ME, RUN, record_of(ME.peer_id, CLOCK), NOW + 30)
GONE = records.encode_gone(ME, RUN, NOW, NOW + 30)
SIGNED = sign_spec(RunSpec(), ME)
SPEC = records.encode_spec(SIGNED)
DAY = NOW + records.SPEC_LIFE_S


def test_keys_are_filed_as_hivemind_files_them() -> None:
    from hivemind.dht.routing import DHTID

    assert DHTID.generate(peers_key(RUN)).to_bytes() == key_bytes(peers_key(RUN))


@pytest.mark.parametrize(
    "record",
    [
        stored(PEER),
        stored(GONE),
        stored(SPEC, records.RUNS_KEY, RUN, DAY),
        stored(SPEC, spec_key(RUN), ME.peer_id, DAY),
    ],
)
def test_ours_pass(record: Stored) -> None:
    assert VALIDATOR.validate(record)
    assert VALIDATOR.sign_value(record) == VALIDATOR.strip_value(record) == record.value


def resigned(body: dict[str, object], expires_at: float = NOW + 30) -> bytes:
    """A body of our choice with a good signature."""
    text = json.dumps(body).encode()
    return ME.sign(records._peer_message(RUN, ME.peer_id, expires_at, text)) + text


def body_with(**changes: object) -> dict[str, object]:
    body: dict[str, object] = json.loads(PEER[64:])
    record = body["record"]
    assert isinstance(record, dict)
    return body | {"record": record | changes}


def test_the_helper_makes_records_that_pass_and_later_fields_are_passed_over() -> None:
    assert VALIDATOR.validate(stored(resigned(body_with())))
    assert VALIDATOR.validate(stored(resigned(body_with(of_a_later_version=1))))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(stored(PEER, b"unknown"), id="unknown key"),
        pytest.param(stored(PEER, peers_key(RunId("0" * 16))), id="another run's key"),
        pytest.param(stored(PEER, subkey=OTHER.peer_id), id="another peer's subkey"),
        pytest.param(stored(PEER, expires_at=NOW + 31), id="prolonged"),
        pytest.param(stored(PEER, expires_at=float("nan")), id="nan"),
        pytest.param(stored(PEER[:-1] + b" "), id="altered body"),
        pytest.param(stored(bytes(64) + PEER[64:]), id="no signature"),
        pytest.param(stored(PEER[:64]), id="no body"),
        pytest.param(stored(b""), id="empty"),
        pytest.param(stored(PEER + b" " * 20_000), id="oversize"),
        pytest.param(replace(stored(PEER), value=PEER), id="not msgpack"),
        pytest.param(replace(stored(PEER), value=b"\xc1"), id="reserved msgpack byte"),
        pytest.param(replace(stored(PEER), value=b"\xdd\xff\xff\xff\xff"), id="msgpack bomb"),
        pytest.param(replace(stored(PEER), value=msgpack.packb({"a": 1})), id="a map"),
        pytest.param(replace(stored(PEER), subkey=b""), id="a whole dictionary's subkey"),
        pytest.param(replace(stored(PEER), subkey=msgpack.packb(None)), id="no subkey"),
        pytest.param(replace(stored(PEER), subkey=b"\xda\x00\x34" + ME.peer_id.encode()), id="subkey in another form"),
        pytest.param(stored(SPEC, expires_at=DAY), id="a spec among peers"),
        pytest.param(stored(SPEC, records.RUNS_KEY, "0" * 16, DAY), id="a spec under another run"),
        pytest.param(stored(SPEC, spec_key(RUN), OTHER.peer_id, DAY), id="a spec under another owner"),
        pytest.param(stored(SPEC, records.RUNS_KEY, RUN, DAY + 60), id="a spec for more than a day"),
        pytest.param(stored(SPEC[:-2] + b" }", records.RUNS_KEY, RUN, DAY), id="a damaged spec"),
        pytest.param(stored(resigned(body_with(), NOW + 100), expires_at=NOW + 100), id="too long a life"),
        pytest.param(
            stored(resigned(body_with(issued_at=NOW + 900), NOW + 930), expires_at=NOW + 930), id="from the future"
        ),
        pytest.param(stored(resigned(body_with(peer_id=OTHER.peer_id))), id="in another's name"),
        pytest.param(stored(resigned(body_with(round=-1))), id="negative round"),
        pytest.param(stored(resigned(body_with(round=1 << 63))), id="huge round"),
        pytest.param(stored(resigned(body_with(round=(1 << 53) + 1))), id="round past 2**53"),
        pytest.param(stored(resigned(body_with(step=(1 << 53) + 1))), id="step past 2**53"),
        pytest.param(stored(resigned(body_with(round="1"))), id="text for a number"),
        pytest.param(stored(resigned(body_with(loss=float("nan")))), id="nan loss"),
        pytest.param(stored(resigned(body_with(name="\x1b[31m"))), id="escape sequence"),
        pytest.param(stored(resigned(body_with(addresses=["a:1"] * 17))), id="many addresses"),
        pytest.param(stored(resigned(body_with(addresses=["file:///etc"]))), id="an address that is none"),
        pytest.param(stored(resigned(body_with(role="king"))), id="unknown role"),
        pytest.param(stored(resigned(body_with(cert_der="A" * 4000))), id="large certificate"),
        pytest.param(stored(resigned(body_with(protocol_min=2, protocol_max=1))), id="versions in the wrong order"),
        pytest.param(stored(resigned(body_with() | {"kind": "other"})), id="unknown kind"),
    ],
)
def test_others_do_not(record: Stored) -> None:
    assert not VALIDATOR.validate(record)


def test_a_record_past_its_end_still_validates() -> None:
    later = RecordValidator(lambda: NOW + 1000)
    assert later.validate(stored(PEER))


@given(st.binary(max_size=300), st.binary(max_size=40), st.floats())
def test_any_bytes_are_refused_without_an_error(value: bytes, subkey: bytes, expires_at: float) -> None:
    for whole in (value, msgpack.packb(value), msgpack.packb(bytes(64) + value)):
        assert not VALIDATOR.validate(Stored(key_bytes(peers_key(RUN)), subkey, whole, expires_at))


def test_decoding_gives_back_what_was_encoded() -> None:
    entry = records.decode_peer(RUN, ME.peer_id, PEER, NOW + 30)
    assert entry.record == record_of(ME.peer_id, CLOCK)
    gone = records.decode_peer(RUN, ME.peer_id, GONE, NOW + 30)
    assert (gone.peer_id, gone.record) == (ME.peer_id, None)
    assert records.decode_spec(SPEC) == (RUN, SIGNED)


def test_an_unsigned_spec_is_refused() -> None:
    forged = replace(SIGNED, owner=PeerId(OTHER.peer_id))
    with pytest.raises(MalformedMessage, match="wrong signature"):
        records.decode_spec(records.encode_spec(forged))


@pytest.mark.parametrize(
    ("now", "last", "expected"),
    [
        (100.0, 0.0, 130.0),
        (100.0, 130.0, 130.001),
        (95.0, 130.0, 130.001),
        (100.0, 139.0, 139.001),
        (100.0, 141.0, 130.0),
    ],
)
def test_expiry_outranks_the_former_unless_the_clock_was_set_back(now: float, last: float, expected: float) -> None:
    assert records.next_expiry(now, last) == pytest.approx(expected)


def test_a_signature_is_checked_once_and_remembered_without_what_it_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def verified(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
        asked.append(message)
        return True

    monkeypatch.setattr(records, "verify", verified)
    records._checked.clear()
    for message in (b"ab", b"ab", b"a"):
        assert records._verified(ME.peer_id, message, b"c" if message == b"ab" else b"cb")
    assert asked == [b"ab", b"a"]  # the same bytes, cut elsewhere, are another question
    for index in range(records.MAX_CHECKED):
        records._verified(ME.peer_id, bytes(10_000), b"%d" % index)
    assert len(records._checked) == records.MAX_CHECKED
    assert all(len(digest) == 32 for digest in records._checked)
    records._checked.clear()
