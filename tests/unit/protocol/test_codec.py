"""The codec: what goes in comes out, and whatever a peer sends raises ProtocolError at worst."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerloom.proto import common_pb2, gossip_pb2, peer_pb2, state_pb2
from peerloom.protocol import checks, codec, limits
from peerloom.protocol.errors import LimitExceeded, MalformedMessage, ProtocolError
from peerloom.protocol.handshake import Hello, HelloReply, Prove, RunClaim
from peerloom.protocol.messages import (
    Accept,
    Ack,
    Chunk,
    Commit,
    Decline,
    DeclineReason,
    FetchRequest,
    Hold,
    Offer,
    PayloadEnd,
    StateManifest,
    StatePiece,
    StreamEnd,
    Withdraw,
)
from peerloom.protocol.types import NodeState, NodeStatus, PeerId, PeerRecord

PEER = PeerId("12D3KooWGCEfU5vFEsEWqoSDDZA5HNMDBEZuXaA4Q1F4nFcUdHvM")

counts = st.integers(0, limits.MAX_COUNT)
positions = st.integers(0, limits.MAX_POSITION)
finite = st.floats(allow_nan=False, allow_infinity=False)
times = st.floats(0.0, limits.MAX_WALL_S)
letters = st.characters(codec="utf-8").filter(str.isprintable)


def texts(limit: int) -> st.SearchStrategy[str]:
    return st.text(letters, max_size=min(limit, 40))


def hexes(limit: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", max_size=limit)


def exact_hex(length: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=length, max_size=length)


def octets(length: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=length, max_size=length)


peer_ids = st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabc", min_size=1, max_size=60).map(PeerId)
payload_bytes = st.integers(0, limits.MAX_PAYLOAD_BYTES)
addresses = st.sampled_from(["127.0.0.1:1", "[::1]:65535", "[2001:db8::2]:4000", "node-7.example.org:31330"])
encodings = st.sampled_from(["fp32", "bf16"])

exchange_messages = st.one_of(
    st.builds(
        Offer,
        exact_hex(32),
        positions,
        hexes(64),
        encodings,
        payload_bytes,
        st.integers(0, limits.CHUNK_BYTES),
        st.integers(0, limits.MAX_FRAGMENTS),
        st.integers(0, limits.MAX_LEGS),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    st.just(Hold()),
    st.builds(Accept, positions),
    st.builds(Decline, st.sampled_from(get_args(DeclineReason)), texts(512)),
    st.builds(Chunk, payload_bytes, st.binary(min_size=1, max_size=64)),
    st.builds(PayloadEnd, octets(16)),
    st.just(Commit()),
    st.just(Ack()),
    st.builds(Withdraw, texts(512)),
    st.builds(StreamEnd, texts(64), texts(1024)),
)


@st.composite
def manifests(draw: st.DrawFn) -> StateManifest:
    digests = draw(st.lists(octets(32), max_size=4))
    piece = draw(st.integers(1, limits.CHUNK_BYTES))
    last = draw(st.integers(1, piece))
    total = (len(digests) - 1) * piece + last if digests else 0
    fields = draw(st.tuples(texts(128), positions, positions, hexes(64)))
    return StateManifest(*fields, total, piece, tuple(digests), draw(st.none() | finite))


state_messages = st.one_of(
    manifests(), st.builds(StatePiece, st.integers(0, limits.MAX_PIECES - 1), st.binary(min_size=1, max_size=64))
)
records = st.builds(
    PeerRecord,
    peer_id=peer_ids,
    name=texts(64),
    role=st.sampled_from(["trainer", "bootstrap"]),
    addresses=st.lists(addresses, max_size=4).map(tuple),
    cert_der=st.binary(min_size=1, max_size=64),
    version=texts(64),
    protocol_min=st.integers(0, 5),
    protocol_max=st.integers(5, limits.MAX_PROTOCOL),
    instance=texts(64),
    started_at=times,
    issued_at=times,
    state=st.sampled_from(get_args(NodeState)),
    reason=texts(512),
    init_digest=hexes(64),
    layout_digest=hexes(64),
    round=positions,
    step=positions,
    tokens=counts,
    tokens_per_s=finite,
    loss=st.none() | finite,
    up_bytes=counts,
    down_bytes=counts,
    up_bytes_per_s=finite,
    down_bytes_per_s=finite,
    last_partner=st.just("") | peer_ids,
    last_met_at=times,
)
statuses = st.builds(
    NodeStatus,
    record=records,
    partners=st.dictionaries(peer_ids, counts, max_size=4),
    counters=st.dictionaries(texts(128).filter(bool), finite, max_size=4),
)
claims = st.builds(
    RunClaim,
    peer_id=peer_ids,
    run_id=exact_hex(16),
    spec_hash=hexes(64),
    version=texts(64),
    protocol_min=st.integers(0, 5),
    protocol_max=st.integers(5, limits.MAX_PROTOCOL),
)
hellos = st.builds(Hello, claim=claims, wall_s=times, challenge=octets(32))
nonces = st.binary(min_size=1, max_size=128)
replies = st.builds(HelloReply, claim=claims, wall_s=times, nonce=nonces, signature=octets(64))
proves = st.builds(Prove, peer_id=peer_ids, nonce=nonces, signature=octets(64))
requests = st.builds(FetchRequest, hexes(64), texts(128), st.integers(0, limits.MAX_PIECES))

KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "exchange": (exchange_messages, codec.encode_exchange, codec.decode_exchange),
    "state": (state_messages, codec.encode_state, codec.decode_state),
    "fetch request": (requests, codec.encode_fetch_request, codec.decode_fetch_request),
    "record": (records, codec.encode_record, codec.decode_record),
    "status": (statuses, codec.encode_status, codec.decode_status),
    "hello": (hellos, codec.encode_hello, codec.decode_hello),
    "hello reply": (replies, codec.encode_hello_reply, codec.decode_hello_reply),
    "prove": (proves, codec.encode_prove, codec.decode_prove),
    "token": (octets(32), codec.encode_token, codec.decode_token),
}
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@quick
@given(data=st.data())
def test_what_goes_in_comes_out(kind: str, data: st.DataObject) -> None:
    strategy, encode, decode = KINDS[kind]
    value = data.draw(strategy)
    assert decode(encode(value)) == value


@every_kind
@quick
@given(raw=st.binary(max_size=300))
def test_random_bytes_raise_protocol_errors_alone(kind: str, raw: bytes) -> None:
    try:
        KINDS[kind][2](raw)
    except ProtocolError:
        pass


@every_kind
@quick
@given(data=st.data())
def test_mutated_messages_raise_protocol_errors_alone(kind: str, data: st.DataObject) -> None:
    strategy, encode, decode = KINDS[kind]
    raw = bytearray(encode(data.draw(strategy)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        decode(bytes(raw))
    except ProtocolError:
        pass


RECORD = PeerRecord(
    peer_id=PEER,
    name="n",
    role="trainer",
    addresses=("127.0.0.1:1",),
    cert_der=b"c",
    version="1",
    instance="00",
    started_at=1.0,
    issued_at=2.0,
)


def record_bytes(**changes: Any) -> bytes:
    """A record as a peer might put it on the wire, unchecked."""
    message = common_pb2.PeerRecord.FromString(codec.encode_record(RECORD))
    for name, value in changes.items():
        if name in ("addresses", "sketch"):
            getattr(message, name)[:] = value
        else:
            setattr(message, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("peer_id", "", MalformedMessage),
        ("peer_id", "12D3 Koo", MalformedMessage),
        ("peer_id", "1" * 65, MalformedMessage),
        ("name", "n" * 65, LimitExceeded),
        ("name", "\x1b[2J", MalformedMessage),
        ("reason", "two\nlines", MalformedMessage),
        ("reason", "r" * 513, LimitExceeded),
        ("role", "king", MalformedMessage),
        ("state", "", MalformedMessage),
        ("addresses", ["127.0.0.1:1"] * 17, LimitExceeded),
        ("cert_der", b"", MalformedMessage),
        ("cert_der", b"c" * 2049, LimitExceeded),
        ("last_partner", "12D3 Koo", MalformedMessage),
        ("last_met_at", math.nan, MalformedMessage),
        ("up_bytes_per_s", math.inf, MalformedMessage),
        ("down_bytes_per_s", math.nan, MalformedMessage),
        ("sketch", [0.0] * 65, LimitExceeded),
        ("sketch", [math.nan], MalformedMessage),
        ("sketch", [-math.inf], MalformedMessage),
        ("sketch", [1e31], MalformedMessage),
        ("protocol_min", 2, MalformedMessage),
        ("protocol_max", 65_536, MalformedMessage),
        ("started_at", math.nan, MalformedMessage),
        ("issued_at", -1.0, MalformedMessage),
        ("issued_at", 1e12, MalformedMessage),
        ("init_digest", "AB", MalformedMessage),
        ("layout_digest", "a" * 65, MalformedMessage),
        ("round", -1, MalformedMessage),
        ("tokens", -5, MalformedMessage),
        ("tokens_per_s", math.inf, MalformedMessage),
        ("loss", math.nan, MalformedMessage),
    ],
)
def test_a_records_bad_field_is_named(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        codec.decode_record(record_bytes(**{field: value}))


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1 ",
        ":5",
        "::1:5",
        "[::1:5",
        "unix:/tmp/socket:5",
        "http://host:5",
        "host/path:5",
        "a,b:5",
        "host:٣",
        "x" * 261 + ":5",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(MalformedMessage):
        checks.address(address)


def envelope(**fields: Any) -> bytes:
    return gossip_pb2.ExchangeEnvelope(**fields).SerializeToString()


def offer(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"exchange_id": "0f" * 16, "round": 1, "layout": "ab", "encoding": "fp32"}
    return envelope(offer=gossip_pb2.Offer(**(fields | changes)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        envelope(chunk=gossip_pb2.Chunk(offset=0)),
        envelope(chunk=gossip_pb2.Chunk(offset=-1, data=b"x")),
        envelope(chunk=gossip_pb2.Chunk(data=bytes(limits.CHUNK_BYTES + 1))),
        envelope(payload_end=gossip_pb2.PayloadEnd(digest=b"short")),
        envelope(decline=gossip_pb2.Decline(reason="mood")),
        envelope(accept=gossip_pb2.Accept(round=-1)),
        offer(exchange_id="0f"),
        offer(encoding="int3"),
        offer(total_bytes=limits.MAX_PAYLOAD_BYTES + 1),
        offer(round=-1),
        offer(fragment=-1),
        offer(fragment=limits.MAX_FRAGMENTS + 1),
        offer(leg=limits.MAX_LEGS + 1),
        offer(weight=float("nan")),
        bytes(limits.MAX_MESSAGE_BYTES + 1),
    ],
    ids=range(16),
)
def test_bad_exchange_messages(raw: bytes) -> None:
    with pytest.raises((MalformedMessage, LimitExceeded)):
        codec.decode_exchange(raw)


def manifest(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"total_bytes": 5, "piece_bytes": 4, "piece_digests": b"d" * 64}
    return state_pb2.StateEnvelope(manifest=state_pb2.StateManifest(**(fields | changes))).SerializeToString()


def test_a_manifest_must_add_up() -> None:
    assert codec.decode_state(manifest()) == StateManifest("", 0, 0, "", 5, 4, (b"d" * 32,) * 2, None)
    for bad in (
        {"piece_bytes": 0},
        {"piece_bytes": limits.CHUNK_BYTES + 1},
        {"total_bytes": 9},
        {"total_bytes": 4},
        {"piece_digests": b"d" * 63},
        {"held_out_loss": math.inf},
    ):
        with pytest.raises(MalformedMessage):
            codec.decode_state(manifest(**bad))
    many = manifest(piece_digests=bytes(32 * (limits.MAX_PIECES + 1)))
    with pytest.raises(LimitExceeded, match="32769 pieces"):
        codec.decode_state(many)


def test_the_largest_messages_fit() -> None:
    data = bytes(limits.CHUNK_BYTES)
    assert codec.decode_exchange(codec.encode_exchange(Chunk(limits.MAX_PAYLOAD_BYTES, memoryview(data)))) == Chunk(
        limits.MAX_PAYLOAD_BYTES, data
    )
    total = limits.MAX_PIECES * limits.CHUNK_BYTES
    largest = StateManifest(
        "s", 1, 1, "a" * 64, total, limits.CHUNK_BYTES, tuple(bytes(32) for _ in range(limits.MAX_PIECES)), 1.0
    )
    assert codec.decode_state(codec.encode_state(largest)) == largest


def test_our_own_oversize_values_are_not_sent() -> None:
    with pytest.raises(LimitExceeded):
        codec.encode_exchange(Chunk(0, bytes(limits.CHUNK_BYTES + 1)))
    with pytest.raises(LimitExceeded):
        codec.encode_state(StatePiece(0, bytes(limits.CHUNK_BYTES + 1)))


def test_our_own_texts_and_losses_are_made_fit_to_send() -> None:
    sick = dataclasses.replace(RECORD, reason="first\nsecond " + "x" * 600, loss=math.nan)
    read = codec.decode_record(codec.encode_record(sick))
    assert read.reason.startswith("first second xxx")
    assert len(read.reason) == limits.MAX_TEXT_CHARS
    assert read.loss is None
    status = NodeStatus(record=RECORD, counters={"good": 1.0, "bad": math.inf})
    assert codec.decode_status(codec.encode_status(status)).counters == {"good": 1.0}


def test_a_hello_is_small() -> None:
    raw = peer_pb2.HelloRequest(version="x" * limits.MAX_HELLO_BYTES).SerializeToString()
    with pytest.raises(LimitExceeded, match="HelloRequest"):
        codec.decode_hello(raw)


def test_a_sketch_crosses_and_a_broken_one_of_ours_stays_here() -> None:
    sketch = tuple(float(k) / 7 for k in range(32))
    assert codec.decode_record(codec.encode_record(replace(RECORD, sketch=sketch))).sketch == sketch
    assert codec.decode_record(codec.encode_record(replace(RECORD, sketch=(1.0, math.nan)))).sketch == ()


@pytest.mark.parametrize("field", ["round", "step"])
def test_a_round_or_step_past_2_to_the_53_is_refused(field: str) -> None:
    figures = {"round": 1, "step": 1, field: limits.MAX_POSITION + 1}
    manifest = StateManifest("s", figures["round"], figures["step"], "ab", 0, 4, (), None)
    with pytest.raises(MalformedMessage, match=f"{field} is"):
        codec.decode_state(codec.encode_state(manifest))
