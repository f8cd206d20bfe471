"""A late joiner's way in: a peer's sums and version vector, and other peers' word for the hash of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from blake3 import blake3

from peerloom.node.least_rate import left_s
from peerloom.node.seams import Transport
from peerloom.protocol import codec_flood
from peerloom.protocol.errors import DigestMismatch, LimitExceeded, LinkError, MalformedMessage
from peerloom.protocol.flood_messages import HashQuery, HashReply, Head, Snapshot
from peerloom.protocol.limits import LEAST_CHUNK_BYTES, piece_length, pieces_of
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage, StatePiece
from peerloom.protocol.services import FLOOD
from peerloom.protocol.types import PeerRecord

STALL_S = 120.0  # a donor answers between two flushes, which may be far apart with a large model
MAX_HEADER = 64 << 20  # bytes of a snapshot with all origins and all proofs that could be
_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Fetched:
    """A donor's state; `size` is what crossed the network for it."""

    snapshot: Snapshot
    state: bytes
    size: int


def pack(snapshot: Snapshot, state: bytes) -> bytes:
    """What State.Fetch of kind "flood" carries."""
    header = codec_flood.encode_snapshot(snapshot, blake3(state).digest())
    return len(header).to_bytes(_LENGTH, "little") + header + state


def unpack(data: bytes) -> tuple[Snapshot, bytes]:
    """The snapshot and the worker's state; raises MalformedMessage, LimitExceeded or DigestMismatch."""
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if end > len(data):
        raise MalformedMessage(f"a flood state of {len(data)} bytes whose header would end at {end}")
    snapshot, digest = codec_flood.decode_snapshot(data[_LENGTH:end])
    state = data[end:]
    if blake3(state).digest() != digest:
        raise DigestMismatch("the sums are not those that the snapshot names")
    return snapshot, state


async def fetch_state(transport: Transport, donor: PeerRecord, layout: str, state_bytes_max: int) -> Fetched:
    """A donor's state as it is; raises LinkError or ProtocolError."""
    request = FetchRequest(layout, kind="flood")
    data = await fetch_whole(transport, donor, request, state_bytes_max + MAX_HEADER + _LENGTH)
    snapshot, state = unpack(data)
    if len(state) > state_bytes_max:
        raise LimitExceeded(f"a state of {len(state)} bytes; this run's has {state_bytes_max} at most")
    return Fetched(snapshot, state, len(data))


async def fetch_whole(transport: Transport, donor: PeerRecord, request: FetchRequest, most: int) -> bytes:
    """A state of at most so many bytes, each piece as the manifest announced it; raises LinkError or ProtocolError."""
    async with aclosing(transport.fetch(donor, request)) as stream:
        manifest = await _manifest(stream, request, most)
        data = bytearray()
        began = asyncio.get_running_loop().time()
        for index, digest in enumerate(manifest.piece_digests):
            piece = await _next(stream, left_s(began, len(data), STALL_S))
            if not isinstance(piece, StatePiece) or piece.index != index:
                raise MalformedMessage(f"piece {index} of the state does not come in its turn")
            if len(piece.data) != piece_length(index, manifest.total_bytes, manifest.piece_bytes):
                raise MalformedMessage(f"piece {index} has {len(piece.data)} bytes")
            if blake3(piece.data).digest() != digest:
                raise DigestMismatch(f"piece {index} is not the one that was announced")
            data += piece.data
    return bytes(data)


async def ask_manifest(transport: Transport, donor: PeerRecord, request: FetchRequest, most: int) -> StateManifest:
    """What a donor would send; raises LinkError or ProtocolError."""
    async with aclosing(transport.fetch(donor, request)) as stream:
        return await _manifest(stream, request, most)


async def ask_hash(transport: Transport, peer: PeerRecord, heads: Sequence[Head]) -> bytes:
    """A peer's word for the hash of the state that counts exactly these messages, b"" if it cannot tell.

    Raises LinkError or ProtocolError.
    """
    stream = await transport.open(peer, FLOOD)
    writer, reader = codec_flood.FloodWriter(), codec_flood.FloodReader()
    try:
        async with asyncio.timeout(STALL_S):
            await stream.send(writer.write(HashQuery(1, tuple(heads))))
            while (frame := await stream.receive()) is not None:
                body = reader.read(frame)
                if isinstance(body, HashReply) and body.number == 1:
                    return body.digest
    except TimeoutError:
        raise LinkError(f"no state hash within {STALL_S:.0f} s") from None
    finally:
        await stream.close()
    raise LinkError("the stream ended before the state hash came")


async def _manifest(stream: AsyncGenerator[StateMessage, None], request: FetchRequest, most: int) -> StateManifest:
    manifest = await _next(stream)
    if not isinstance(manifest, StateManifest):
        raise MalformedMessage("a state that begins without a manifest")
    _check(manifest, request.layout, most)
    return manifest


async def _next(stream: AsyncGenerator[StateMessage, None], within_s: float = STALL_S) -> StateMessage:
    try:
        async with asyncio.timeout(within_s):
            message = await anext(stream, None)
    except TimeoutError:
        raise LinkError(f"the donor sent nothing for {within_s:.0f} s") from None
    if message is None:
        raise LinkError("the state ended early")
    return message


def _check(manifest: StateManifest, layout: str, most: int) -> None:
    if manifest.layout != layout:
        raise MalformedMessage("the state is of another layout than the one asked for")
    if manifest.total_bytes > most:
        raise LimitExceeded(f"a state of {manifest.total_bytes} bytes; this run's has {most} at most")
    pieces = len(manifest.piece_digests)
    if pieces > 1 and manifest.piece_bytes < LEAST_CHUNK_BYTES:
        raise MalformedMessage(f"a state in pieces of {manifest.piece_bytes} bytes")
    if pieces != pieces_of(manifest.total_bytes, manifest.piece_bytes):
        raise MalformedMessage(f"{pieces} pieces of {manifest.piece_bytes} bytes for {manifest.total_bytes}")
