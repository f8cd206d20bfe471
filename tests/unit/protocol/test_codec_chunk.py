"""The hand-written chunk envelope against protobuf's own, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.proto import gossip_pb2
from peerloom.protocol import codec, codec_chunk, limits
from peerloom.protocol.errors import LimitExceeded, MalformedMessage
from peerloom.protocol.messages import Chunk

offsets = st.integers(0, limits.MAX_PAYLOAD_BYTES) | st.sampled_from([0, 1, 127, 128, 16_383, 16_384])


def by_protobuf(offset: int, data: bytes) -> bytes:
    envelope = gossip_pb2.ExchangeEnvelope(chunk=gossip_pb2.Chunk(offset=offset, data=data))
    return bytes(envelope.SerializeToString())


@given(offsets, st.binary(max_size=300))
def test_it_is_written_as_protobuf_does(offset: int, data: bytes) -> None:
    assert codec.encode_exchange(Chunk(offset, memoryview(data))) == by_protobuf(offset, data)


@given(offsets, st.binary(min_size=1, max_size=300))
def test_it_is_read_as_protobuf_does(offset: int, data: bytes) -> None:
    assert codec.decode_exchange(by_protobuf(offset, data)) == Chunk(offset, data)


def test_the_largest_is_not_copied_when_read() -> None:
    whole = by_protobuf(limits.CHUNK_BYTES, bytes(range(256)) * (limits.CHUNK_BYTES // 256))
    chunk = codec.decode_exchange(whole)
    assert isinstance(chunk, Chunk) and isinstance(chunk.data, memoryview)
    assert chunk.data.obj is whole and chunk.data.readonly


@given(st.binary(max_size=40))
def test_whatever_is_read_by_hand_is_what_protobuf_reads(tail: bytes) -> None:
    data = b"\x2a" + tail
    try:
        read = codec_chunk.read_chunk(data)
    except (MalformedMessage, LimitExceeded):
        return
    if read is not None:
        envelope = gossip_pb2.ExchangeEnvelope.FromString(data)
        assert (envelope.chunk.offset, envelope.chunk.data) == (read.offset, bytes(read.data))


@pytest.mark.parametrize(
    "data",
    [
        b"\x2a\x05\x12\x03abc\x2a\x05\x12\x03xyz",  # two chunks: the last one counts
        b"\x2a\x07\x12\x03abc\x08\x05",  # the offset behind the data
        b"\x2a\x09\x08\x05\x08\x06\x12\x03abc",  # two offsets
    ],
)
def test_another_layout_is_left_to_protobuf(data: bytes) -> None:
    assert codec_chunk.read_chunk(data) is None
    envelope = gossip_pb2.ExchangeEnvelope.FromString(data)
    assert codec.decode_exchange(data) == Chunk(envelope.chunk.offset, envelope.chunk.data)


def test_an_offset_of_our_own_below_zero_is_a_bug() -> None:
    with pytest.raises(ValueError, match="-1"):
        codec.encode_exchange(Chunk(-1, b"x"))
