"""The flood's codec: what goes in comes out, in few bytes; what a peer made up raises ProtocolError alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerloom.proto import flood_pb2
from peerloom.protocol import codec_flood, limits
from peerloom.protocol.codec_flood import FloodFrame, FloodReader, FloodWriter
from peerloom.protocol.errors import LimitExceeded, MalformedMessage, ProtocolError
from peerloom.protocol.flood_links import Outgoing
from peerloom.protocol.flood_messages import (
    Batch,
    FrameBody,
    HashQuery,
    HashReply,
    Head,
    Mark,
    Proof,
    Segment,
    Segments,
    Snapshot,
    Versions,
    Want,
    Wants,
)
from peerloom.protocol.messages import StreamEnd
from peerloom.protocol.peer_id import public_key_of
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.types import PeerId
from tests.unit.protocol.flood_fabric import peer

ORIGINS = st.integers(0, 5).map(peer)
PLACES = st.integers(0, limits.MAX_FLOOD_STEP)
CHAINS = st.binary(min_size=16, max_size=16)
SIGNATURES = st.binary(min_size=64, max_size=64)
SCALARS = st.integers(-(2**31) + 1, 2**31 - 1)


def _head(origin: PeerId, one: int, other: int, chain: bytes) -> Head:
    return Head(origin, max(one, other), chain, min(one, other))


SOME_SCALARS = st.lists(SCALARS, max_size=9).map(tuple)
BATCHES = st.builds(Batch, ORIGINS, PLACES, PLACES, SOME_SCALARS.filter(len))
SEGMENTS = st.builds(Segment, BATCHES, SIGNATURES, CHAINS | st.just(b""))
HEADS = st.builds(_head, ORIGINS, PLACES, PLACES, CHAINS)
BRANCHES = st.builds(Segment, st.builds(Batch, st.just(peer(1)), PLACES, PLACES, SOME_SCALARS), SIGNATURES, CHAINS)
BODIES: st.SearchStrategy[FrameBody] = st.one_of(
    st.builds(Segments, st.lists(SEGMENTS, min_size=1, max_size=5).map(tuple)),
    st.builds(Versions, st.lists(HEADS, max_size=5).map(tuple), st.lists(ORIGINS, max_size=3).map(tuple)),
    st.builds(Wants, st.lists(st.builds(Want, ORIGINS, PLACES), min_size=1, max_size=5).map(tuple)),
    st.builds(Proof, BRANCHES, BRANCHES),
    st.builds(HashQuery, st.integers(0, 2**32 - 1), st.lists(HEADS, max_size=5).map(tuple)),
    st.builds(HashReply, st.integers(0, 2**32 - 1), st.just(b"") | st.binary(min_size=32, max_size=32)),
)


@given(st.lists(BODIES, max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_stream_reads_what_was_written(bodies: list[FrameBody]) -> None:
    writer, reader = FloodWriter(), FloodReader()
    for body in bodies:
        frame = codec_flood.decode_frame(codec_flood.encode_frame(writer.write(body)))
        assert isinstance(frame, FloodFrame)
        assert reader.read(frame) == body


@given(st.binary(max_size=200), st.lists(BODIES, max_size=2), st.data())
@settings(max_examples=300, deadline=None)
def test_garbage_raises_protocol_errors_alone(noise: bytes, bodies: list[FrameBody], data: st.DataObject) -> None:
    frames = [FloodWriter().write(body).data for body in bodies]
    reader = FloodReader()
    for good in [noise, *frames]:
        cut = bytearray(good)
        for _ in range(data.draw(st.integers(0, 3))):
            if cut:
                cut[data.draw(st.integers(0, len(cut) - 1))] = data.draw(st.integers(0, 255))
        for read in (
            lambda raw: reader.read(FloodFrame(raw)),
            codec_flood.decode_frame,
            codec_flood.decode_segment,
            codec_flood.decode_proof,
            codec_flood.decode_snapshot,
        ):
            try:
                read(bytes(cut))
            except ProtocolError:
                pass


def test_the_end_of_a_stream_is_told_apart() -> None:
    end = StreamEnd("LinkError", "busy")
    assert codec_flood.decode_frame(codec_flood.encode_frame(end)) == end


def test_what_logs_keep_stands_alone() -> None:
    segment = Segment(Batch(peer(3), 7, 9, (1, -2)), bytes(64), bytes(16))
    assert codec_flood.decode_segment(codec_flood.encode_segment(segment)) == segment
    proof = Proof(segment, replace(segment, batch=replace(segment.batch, scalars=())))
    assert codec_flood.decode_proof(codec_flood.encode_proof(proof)) == proof
    snapshot = Snapshot((Mark(peer(1), 5, 6, bytes(16), bytes(64)),), (proof,))
    assert codec_flood.decode_snapshot(codec_flood.encode_snapshot(snapshot, bytes(32))) == (snapshot, bytes(32))


LONG = [1] * 1024


def _envelope(**fields: object) -> FloodFrame:
    return FloodFrame(flood_pb2.FloodEnvelope(**fields).SerializeToString())  # type: ignore[arg-type]


def _batch(**changes: object) -> flood_pb2.FloodBatch:
    fields = {"scalars": [1], "signature": bytes(64), "key": public_key_of(peer(0)), **changes}
    return flood_pb2.FloodBatch(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frame", "error", "sentence"),
    [
        (_envelope(), MalformedMessage, "0 messages"),
        (_envelope(batches=[_batch(key=b"")]), MalformedMessage, "not introduced"),
        (_envelope(batches=[_batch(origin=1)]), MalformedMessage, "0 is next"),
        (_envelope(batches=[_batch(scalars=[])]), MalformedMessage, "0 messages"),
        (_envelope(batches=[_batch(scalars=[1] * 1025)]), MalformedMessage, "1025 messages"),
        (_envelope(batches=[_batch(signature=b"x")]), MalformedMessage, "signature"),
        (_envelope(batches=[_batch(prev=b"x")]), MalformedMessage, "chain"),
        (_envelope(batches=[_batch(key=b"x")]), MalformedMessage, "origin key"),
        (_envelope(batches=[_batch(sequence=-1)]), MalformedMessage, "sequence"),
        (_envelope(batches=[_batch(step=2**40)]), MalformedMessage, "step"),
        (_envelope(batches=[_batch(scalars=LONG), *[_batch(key=b"", scalars=LONG)] * 4]), LimitExceeded, "5120"),
        (_envelope(hash_reply=flood_pb2.FloodHashReply(digest=b"x")), MalformedMessage, "state hash"),
        (FloodFrame(b"\xff"), MalformedMessage, "no flood frame"),
    ],
)
def test_a_frame_out_of_bounds_names_what_is_wrong(
    frame: FloodFrame, error: type[ProtocolError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        FloodReader().read(frame)


def test_an_oversized_frame_is_refused_unread() -> None:
    with pytest.raises(LimitExceeded):
        codec_flood.decode_frame(bytes(limits.MAX_FRAME_BYTES + 1))


def test_the_heads_of_all_origins_fit_into_a_frame() -> None:
    origins = [peer(index) for index in range(limits.MAX_FLOOD_ORIGINS)]
    heads = tuple(Head(origin, limits.MAX_FLOOD_STEP, bytes(16), limits.MAX_FLOOD_STEP) for origin in origins)
    writer = FloodWriter()
    assert FloodReader().read(writer.write(Versions(heads))) == Versions(heads)
    with pytest.raises(LimitExceeded):
        writer.write(Versions((Head(peer(-1), 1, bytes(16)),)))


def test_a_message_takes_less_than_five_bytes_at_the_papers_setting() -> None:
    """Full-size scalars, 16 origins in turn, a flush of five each, signatures left out."""
    writer, rng, limit = FloodWriter(), random.Random(1), SeedflowSpec().scalar_limit()
    for flush in range(100):
        for origin in range(16):
            scalars = tuple(rng.randint(-limit, limit) for _ in range(5))
            segment = Segment(Batch(peer(origin), 5 * flush, 5 * flush, scalars), bytes(64))
            writer.write(Segments((segment,)))
    introductions = 16 * (2 + limits.DIGEST_BYTES)
    assert (writer.payload - introductions) / (100 * 16 * 5) < 4.5


def test_what_waits_for_a_slow_link_is_merged_and_bounded() -> None:
    waiting = Outgoing(most=4000)
    left_out = 0
    for flush in range(500):
        for origin in range(2):
            batch = Batch(peer(origin), 5 * flush, 5 * flush, (flush,) * 5)
            left_out += waiting.put([Segment(batch, bytes([flush % 256]) * 64)])
    assert (len(waiting), left_out) == (4000, 1000)
    taken = waiting.take(1024, 4096)
    assert [(segment.batch.sequence, segment.batch.end) for segment in taken if segment.batch.origin == peer(0)] == [
        (0, 1020),
        (1020, 2000),
    ]
    assert taken[0].signature == bytes([203]) * 64
    assert len(waiting) == 0 and waiting.take(1024, 4096) == ()
