"""The envelope of a chunk, read and written by hand: protobuf's classes would copy its data three times more."""

from __future__ import annotations

from peerloom.protocol import checks, limits
from peerloom.protocol.messages import Chunk

# what precedes the fields of a chunk in its envelope: (field number << 3) | wire type
_CHUNK, _OFFSET, _DATA = (bytes([number << 3 | kind]) for number, kind in ((5, 2), (1, 0), (2, 2)))
_VARINT_BYTES = 9  # that hold 63 bits


def written_chunk(chunk: Chunk) -> bytes:
    """The envelope as protobuf writes it, byte for byte, with one copy of the data where its classes make four."""
    size = len(chunk.data)
    limits.check_size("chunk", size, limits.CHUNK_BYTES)
    head = _OFFSET + _varint(chunk.offset) if chunk.offset else b""
    if size:
        head += _DATA + _varint(size)
    return b"".join((_CHUNK, _varint(len(head) + size), head, chunk.data))


def read_chunk(data: bytes) -> Chunk | None:
    """The chunk of an envelope laid out as `written_chunk` does, uncopied; None for another, which protobuf reads."""
    if data[:1] != _CHUNK:
        return None
    size, at = _read_varint(data, 1)
    if size != len(data) - at:
        return None
    offset = 0
    if data[at : at + 1] == _OFFSET:
        offset, at = _read_varint(data, at + 1)
    if data[at : at + 1] != _DATA:
        return None
    size, at = _read_varint(data, at + 1)
    return checked_chunk(offset, memoryview(data)[at:]) if size == len(data) - at else None


def checked_chunk(offset: int, data: bytes | memoryview) -> Chunk:
    """A chunk of a peer's, within its limits."""
    offset = checks.whole("chunk offset", offset, limits.MAX_PAYLOAD_BYTES)
    return Chunk(offset, checks.bounded("chunk", data, limits.CHUNK_BYTES))


def _varint(value: int) -> bytes:
    """Protobuf's encoding of a number of at most 63 bits: seven a byte, the lowest first."""
    if not 0 <= value <= limits.MAX_COUNT:
        raise ValueError(f"{value} is not from 0 to {limits.MAX_COUNT}")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends; (-1, at) for one cut short or of more than 63 bits."""
    value = 0
    for index, byte in enumerate(data[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    return -1, at
