"""Payloads on their way: pace, digest, order, length, finiteness."""

from __future__ import annotations

import numpy as np
import pytest
from xxhash import xxh3_128

from peerloom.node.payload import FIRST_CHUNK_BYTES, IncomingPayload, Pace, outgoing
from peerloom.protocol.errors import BadPayload, DigestMismatch, MalformedMessage
from peerloom.protocol.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES
from peerloom.protocol.messages import Chunk, PayloadEnd
from peerloom.protocol.types import Encoding

SIZE = 3 * CHUNK_BYTES + 40


def payload() -> memoryview:
    values = np.random.default_rng(1).standard_normal(SIZE // 4).astype("<f4")
    return memoryview(values.tobytes())


def test_chunks_grow_while_the_link_is_quick_and_shrink_when_it_is_slow() -> None:
    pace = Pace()
    sizes = []
    for message in outgoing(payload(), pace):
        if isinstance(message, Chunk):
            sizes.append(len(message.data))
            pace.sent(0.01 if len(sizes) < 6 else 1.0)
    assert sizes[:5] == [FIRST_CHUNK_BYTES * 2**k for k in range(5)]
    assert sizes[4] == CHUNK_BYTES and CHUNK_BYTES // 2 in sizes
    assert sum(sizes) == SIZE


def test_a_cap_bounds_the_chunks_whatever_the_link() -> None:
    pace, sizes = Pace(10_000), []
    for message in outgoing(payload()[:100_000], pace):
        if isinstance(message, Chunk):
            sizes.append(len(message.data))
            pace.sent(0.01 if len(sizes) < 5 else 1.0)
    assert sizes == [10_000] * 10


def test_a_payload_arrives_whole() -> None:
    into = bytearray(SIZE)
    incoming = IncomingPayload(memoryview(into), "fp32")
    for message in outgoing(payload(), Pace()):
        if isinstance(message, Chunk):
            incoming.add(message)
        else:
            incoming.end(message)
    assert incoming.complete and into == payload()
    for again in (message, PayloadEnd(bytes(16))):  # the machine takes one end and no more
        with pytest.raises(MalformedMessage, match="had ended"):
            incoming.end(again)  # type: ignore[arg-type]


def test_gaps_crumbs_excess_and_shortness_are_refused() -> None:
    size = LEAST_CHUNK_BYTES + 16
    incoming = IncomingPayload(memoryview(bytearray(size)), "fp32")
    gap, crumb = Chunk(4, bytes(size)), Chunk(0, bytes(16))
    for chunk in (gap, crumb, Chunk(0, b""), Chunk(0, bytes(size + 4)), Chunk(0, bytes(3))):
        with pytest.raises(MalformedMessage):
            incoming.add(chunk)
    incoming.add(Chunk(0, bytes(LEAST_CHUNK_BYTES)))
    with pytest.raises(MalformedMessage, match=f"{LEAST_CHUNK_BYTES} of {size}"):
        incoming.end(PayloadEnd(xxh3_128(bytes(12)).digest()))
    incoming.add(Chunk(LEAST_CHUNK_BYTES, bytes(16)))
    with pytest.raises(DigestMismatch):
        incoming.end(PayloadEnd(bytes(16)))
    assert not incoming.complete


@pytest.mark.parametrize(("encoding", "bad"), [("fp32", np.float32(np.nan)), ("fp32", np.float32(-np.inf))])
def test_non_finite_numbers_are_refused(encoding: Encoding, bad: np.float32) -> None:
    incoming = IncomingPayload(memoryview(bytearray(8)), encoding)
    with pytest.raises(BadPayload):
        incoming.add(Chunk(0, np.array([1.0, bad], dtype="<f4").tobytes()))


@pytest.mark.parametrize(
    ("bits", "finite"), [(0x7F80, False), (0xFFC0, False), (0x4780, True), (0x4781, False), (0x8000, True)]
)
def test_bf16_is_judged_by_its_bits(bits: int, finite: bool) -> None:
    incoming = IncomingPayload(memoryview(bytearray(2)), "bf16")
    chunk = Chunk(0, np.array([bits], dtype="<u2").tobytes())
    if finite:
        incoming.add(chunk)
    else:
        with pytest.raises(BadPayload):
            incoming.add(chunk)
