"""One encoded proposal in, one out: offsets, lengths, digest and finiteness checked as the bytes pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from blake3 import blake3

from peerloom.protocol.errors import BadPayload, DigestMismatch, MalformedMessage
from peerloom.protocol.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES
from peerloom.protocol.messages import Chunk, PayloadEnd
from peerloom.protocol.types import Encoding

ITEM_BYTES: dict[Encoding, int] = {"fp32": 4, "bf16": 2}
QUICK_S, SLOW_S = 0.05, 0.5
BF16_EXPONENT = np.uint16(0x7F80)


class Pace:
    """How large the next chunk may be: small at first and over a slow link, so that both ends see bytes move."""

    def __init__(self) -> None:
        self.chunk_bytes = LEAST_CHUNK_BYTES

    def sent(self, seconds: float) -> None:
        """The last chunk took this long to be taken by the connection."""
        if seconds < QUICK_S:
            self.chunk_bytes = min(2 * self.chunk_bytes, CHUNK_BYTES)
        elif seconds > SLOW_S:
            self.chunk_bytes = max(self.chunk_bytes // 2, LEAST_CHUNK_BYTES)


def outgoing(payload: memoryview, pace: Pace) -> Iterator[Chunk | PayloadEnd]:
    """Cuts a payload into chunks of the pace's size, with its BLAKE3 digest at the end.

    Each chunk is a view, hashed as it is handed out: encode it at once, before the worker can go on and change it.
    """
    digest, offset = blake3(), 0
    while offset < len(payload):
        data = payload[offset : offset + pace.chunk_bytes]
        digest.update(data)
        yield Chunk(offset, data)
        offset += len(data)
    yield PayloadEnd(digest.digest())


def all_finite(data: bytes | memoryview, encoding: Encoding) -> bool:
    """Whether a whole number of encoded values holds no NaN and no infinity; MalformedMessage for a broken number."""
    if len(data) % ITEM_BYTES[encoding]:
        raise MalformedMessage(f"{len(data)} bytes hold no whole number of {encoding} values")
    if encoding == "fp32":
        return bool(np.isfinite(np.frombuffer(data, dtype="<f4")).all())
    exponents = np.frombuffer(data, dtype="<u2") & BF16_EXPONENT
    return not bool((exponents == BF16_EXPONENT).any())


class IncomingPayload:
    """Fills `into` from a peer's chunks; every method raises a ProtocolError for what the peer got wrong."""

    def __init__(self, into: memoryview, encoding: Encoding) -> None:
        self._into = into
        self._encoding = encoding
        self._received = 0
        self._digest = blake3()
        self.complete = False

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk; raises MalformedMessage or BadPayload."""
        size = len(chunk.data)
        if self.complete or chunk.offset != self._received:
            raise MalformedMessage(f"chunk at byte {chunk.offset}, expected {self._received}")
        last = chunk.offset + size == len(self._into)
        misfit = not (0 if last else LEAST_CHUNK_BYTES - 1) < size <= CHUNK_BYTES
        misfit = misfit or chunk.offset + size > len(self._into)
        if misfit or size % ITEM_BYTES[self._encoding]:
            raise MalformedMessage(f"chunk of {size} bytes at {chunk.offset} of {len(self._into)}")
        if not all_finite(chunk.data, self._encoding):
            raise BadPayload(f"non-finite parameters in the megabyte at byte {chunk.offset}")
        self._into[chunk.offset : chunk.offset + size] = chunk.data
        self._digest.update(chunk.data)
        self._received += size

    def end(self, message: PayloadEnd) -> None:
        """Closes the payload; raises MalformedMessage when it is short, DigestMismatch when it differs."""
        if self._received != len(self._into):
            raise MalformedMessage(f"payload ended after {self._received} of {len(self._into)} bytes")
        if self._digest.digest() != message.digest:
            raise DigestMismatch("the payload's BLAKE3 digest is not the one announced")
        self.complete = True
