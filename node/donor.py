"""Serves State.Fetch: snapshots of theta, cut into pieces with a digest each, kept while somebody reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from mmap import mmap
from typing import TypeAlias

from blake3 import blake3

from peerloom.node.seams import Clock
from peerloom.protocol.errors import LinkError, RunMismatch
from peerloom.protocol.limits import CHUNK_BYTES, MAX_PIECES
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage, StatePiece

MAX_FETCHES = 4  # at once: each reads at the speed of its own link
KEEP_S = 60.0  # a snapshot outlives its last reader by this, so that a broken fetch can go on


Data: TypeAlias = bytes | mmap  # a slice of either is bytes
Take: TypeAlias = Callable[[], Awaitable[tuple[StateManifest, Data]]]


@dataclass(slots=True)
class Snapshot:
    """theta at one round, when it was last read, and by how many it is being read."""

    manifest: StateManifest
    data: Data
    read_at: float
    lent: int = 0

    def piece(self, index: int) -> bytes:
        """Piece `index` of the manifest."""
        start = index * self.manifest.piece_bytes
        return self.data[start : start + self.manifest.piece_bytes]


def manifest_of(
    data: Data, *, round: int, step: int, layout: str, held_out_loss: float | None, piece_bytes: int = CHUNK_BYTES
) -> StateManifest:
    """Describes a snapshot; its name is the digest of the piece digests with the round."""
    digests = _digests(data, piece_bytes)
    name = blake3(round.to_bytes(8, "big") + b"".join(digests)).hexdigest()[:32]
    return StateManifest(name, round, step, layout, len(data), piece_bytes, digests, held_out_loss)


def recut(snapshot: Snapshot, piece_bytes: int) -> Snapshot:
    """The same state in pieces of another size; shares its memory."""
    old = snapshot.manifest
    manifest = manifest_of(
        snapshot.data,
        round=old.round,
        step=old.step,
        layout=old.layout,
        held_out_loss=old.held_out_loss,
        piece_bytes=piece_bytes,
    )
    return Snapshot(manifest, snapshot.data, snapshot.read_at)


def piece_size(wished: int, total_bytes: int) -> int:
    """Bytes a piece: as wished (0: any, a multiple of 4), unless MAX_PIECES of them would not hold the state."""
    least = -(-total_bytes // MAX_PIECES // 4) * 4
    return min(CHUNK_BYTES, max(wished or CHUNK_BYTES, least))


def _digests(data: Data, piece_bytes: int) -> tuple[bytes, ...]:
    return tuple(blake3(data[i : i + piece_bytes]).digest() for i in range(0, len(data), piece_bytes))


class Donor:
    """Holds at most one snapshot a round and two in all; `take` copies theta between rounds."""

    def __init__(self, clock: Clock, layout: str, take: Take) -> None:
        self._clock = clock
        self._layout = layout
        self._take = take
        self._snapshots: dict[str, Snapshot] = {}
        self._newest_round = -1
        self._fetches = 0
        self._taking = asyncio.Lock()

    async def serve(self, request: FetchRequest, current_round: int) -> AsyncGenerator[StateMessage, None]:
        """A manifest, then its pieces from `start_piece` on; raises RunMismatch or LinkError (too many fetches)."""
        if request.layout != self._layout:
            raise RunMismatch("this donor's model has another layout than the one asked for")
        if self._fetches >= MAX_FETCHES:
            raise LinkError(f"this donor already serves {MAX_FETCHES} fetches")
        self._fetches += 1
        try:
            snapshot = self._snapshots.get(request.snapshot) or await self._cut(current_round, request)
            snapshot.lent += 1
            try:
                yield snapshot.manifest
                for index in range(request.start_piece, len(snapshot.manifest.piece_digests)):
                    snapshot.read_at = self._clock.monotonic()
                    yield StatePiece(index, snapshot.piece(index))
            finally:
                snapshot.lent -= 1
        finally:
            self._fetches -= 1

    async def _cut(self, current_round: int, request: FetchRequest) -> Snapshot:
        """A fresh snapshot in pieces of the size asked for, kept in place of the same one in others."""
        snapshot = await self._fresh(current_round)
        size = piece_size(request.max_piece_bytes, len(snapshot.data))
        if snapshot.manifest.piece_bytes == size:
            return snapshot
        again = recut(snapshot, size)
        self._snapshots.pop(snapshot.manifest.snapshot, None)
        self._snapshots[again.manifest.snapshot] = again
        return again

    async def _fresh(self, current_round: int) -> Snapshot:
        async with self._taking:
            self._drop_old()
            for snapshot in self._snapshots.values():
                if snapshot.manifest.round == current_round:
                    return snapshot
            if len(self._snapshots) >= 2 and self._fetches > 1:
                return max(self._snapshots.values(), key=lambda kept: kept.manifest.round)
            manifest, data = await self._take()
            while len(self._snapshots) >= 2:
                del self._snapshots[min(self._snapshots, key=lambda name: self._snapshots[name].read_at)]
            self._snapshots[manifest.snapshot] = Snapshot(manifest, data, self._clock.monotonic())
            return self._snapshots[manifest.snapshot]

    def _drop_old(self) -> None:
        """But those that are lent: who reads slowly holds them, and they count."""
        now = self._clock.monotonic()
        old = [name for name, kept in self._snapshots.items() if now - kept.read_at > KEEP_S and not kept.lent]
        for name in old:
            del self._snapshots[name]
