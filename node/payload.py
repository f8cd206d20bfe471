"""One encoded proposal in, one out: offsets, lengths, digest and numbers checked as the bytes pass."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final

import numpy as np

from peerloom.node.digest import link_digest
from peerloom.protocol.errors import BadPayload, DigestMismatch, MalformedMessage
from peerloom.protocol.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES
from peerloom.protocol.messages import Chunk, PayloadEnd
from peerloom.protocol.types import Encoding

INT8_BLOCK: Final = 128  # numbers that share a scale, as in optim.int8, which would bring torch into the daemon
MAX_MAGNITUDE: Final = 65_536.0  # of a parameter: where fp16 ends; no model that anyone could use goes beyond
_FP32_MOST: Final = int(np.float32(MAX_MAGNITUDE).view(np.uint32))
_SCALE_MOST: Final = int(np.float32(MAX_MAGNITUDE / 127).view(np.uint32))
_BF16_MOST: Final = _FP32_MOST >> 16
FIRST_CHUNK_BYTES: Final = 64 << 10
QUICK_S, SLOW_S = 0.05, 0.5  # of a chunk


class Pace:
    """How large the next chunk may be: small at first and over a slow link, so that both ends see bytes move.

    `most` bounds it where one of them has a cap.
    """

    def __init__(self, most: int = CHUNK_BYTES) -> None:
        self._most = most
        self._least = self.chunk_bytes = min(FIRST_CHUNK_BYTES, most)

    def sent(self, seconds: float) -> None:
        """The last chunk took this long to be taken by the connection."""
        if seconds < QUICK_S:
            self.chunk_bytes = min(2 * self.chunk_bytes, self._most)
        elif seconds > SLOW_S:
            self.chunk_bytes = max(self.chunk_bytes // 2 // 4 * 4, self._least)


def outgoing(payload: memoryview, pace: Pace) -> Generator[Chunk | PayloadEnd, None, None]:
    """Cuts a payload into chunks of the pace's size, with its digest at the end.

    Each chunk is a view: `payload` must not change before the last one is sent.
    """
    digest, offset = link_digest(), 0
    while offset < len(payload):
        data = payload[offset : offset + pace.chunk_bytes]
        digest.update(data)
        yield Chunk(offset, data)
        offset += len(data)
    yield PayloadEnd(digest.digest())


def check_numbers(data: bytes | memoryview, encoding: Encoding) -> None:
    """Raises BadPayload when a number is NaN, infinite or over MAX_MAGNITUDE, MalformedMessage when one is broken off.

    For "int8", `data` are scales. One comparison finds all three: floats without their sign are ordered like the
    integers of the same bits.
    """
    item = 2 if encoding == "bf16" else 4
    if len(data) % item:
        raise MalformedMessage(f"{len(data)} bytes end within a number of {item} bytes")
    if encoding == "bf16":
        largest, most, infinity = _largest_magnitude(data, "2", 0x7FFF), _BF16_MOST, 0x7F80
    elif encoding == "fp32":
        largest, most, infinity = _largest_magnitude(data, "4", 0x7FFFFFFF), _FP32_MOST, 0x7F800000
    else:  # with its sign: a scale has none
        largest, most, infinity = _largest(np.frombuffer(data, "<u4")), _SCALE_MOST, 0x7F800000
    if largest <= most:
        return
    if largest >= infinity:
        raise BadPayload("non-finite parameters" if encoding != "int8" else "scales that are not finite and positive")
    raise BadPayload(f"parameters beyond {MAX_MAGNITUDE:.0f}")


def _largest_magnitude(data: bytes | memoryview, size: str, magnitude: int) -> int:
    """The largest bits without their sign: as signed integers the positive numbers lead, as unsigned the negative.

    Two passes without a copy are more than twice as fast as one over the masked bits.
    """
    positive, any_sign = _largest(np.frombuffer(data, f"<i{size}")), _largest(np.frombuffer(data, f"<u{size}"))
    return max(positive, any_sign & magnitude) if any_sign > magnitude else any_sign


def _largest(bits: Any) -> int:
    return int(bits.max(initial=0))


def scale_bytes(payload_bytes: int, encoding: Encoding) -> int:
    """How many bytes at the start of a payload are int8's scales."""
    return 4 * -(-payload_bytes // (INT8_BLOCK + 4)) if encoding == "int8" else 0


def scale_spans(pieces: tuple[int, ...], encoding: Encoding) -> Iterator[tuple[int, int]]:
    """Where int8's scales lie in a payload of these pieces."""
    start = 0
    for size in pieces:
        yield start, start + scale_bytes(size, encoding)
        start += size


class IncomingPayload:
    """Fills `into` from a peer's chunks; every method raises a ProtocolError for what the peer got wrong.

    `pieces` are the lengths of the parts that are encoded each by itself; (): one.
    """

    def __init__(self, into: memoryview, encoding: Encoding, pieces: tuple[int, ...] = ()) -> None:
        self._into = into
        self._encoding = encoding
        self._scales = list(scale_spans(pieces or (len(into),), encoding))
        self._received = 0
        self._digest = link_digest()
        self.complete = False

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk; raises MalformedMessage or BadPayload."""
        size = len(chunk.data)
        if self.complete or chunk.offset != self._received:
            raise MalformedMessage(f"chunk at byte {chunk.offset}, expected {self._received}")
        last = chunk.offset + size == len(self._into)
        misfit = not (0 if last else LEAST_CHUNK_BYTES - 1) < size <= CHUNK_BYTES
        misfit = misfit or chunk.offset + size > len(self._into)
        if misfit:
            raise MalformedMessage(f"chunk of {size} bytes at {chunk.offset} of {len(self._into)}")
        self._check(chunk)
        self._into[chunk.offset : chunk.offset + size] = chunk.data
        self._digest.update(chunk.data)
        self._received += size

    def _check(self, chunk: Chunk) -> None:
        data, at = memoryview(chunk.data), chunk.offset
        parts = [data]
        if self._encoding == "int8":
            parts = [data[max(0, start - at) : max(0, stop - at)] for start, stop in self._scales]
        try:
            for part in parts:
                check_numbers(part, self._encoding)
        except BadPayload as error:
            raise BadPayload(f"{error} in the {len(chunk.data)} bytes at byte {chunk.offset}") from None

    def end(self, message: PayloadEnd) -> None:
        """Closes the payload; raises MalformedMessage when it is short or over, DigestMismatch when it differs."""
        if self.complete:
            raise MalformedMessage("the payload had ended")
        if self._received != len(self._into):
            raise MalformedMessage(f"payload ended after {self._received} of {len(self._into)} bytes")
        if self._digest.digest() != message.digest:
            raise DigestMismatch("the payload's digest is not the one announced")
        self.complete = True
