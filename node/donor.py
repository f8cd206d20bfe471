"""Serves State.Fetch: snapshots of theta, cut into pieces with a digest each, kept while somebody reads them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from mmap import mmap
from typing import TypeAlias

from blake3 import blake3

from peerloom.node.seams import Clock
from peerloom.protocol.errors import LinkError, RunMismatch
from peerloom.protocol.limits import CHUNK_BYTES, LEAST_RATE, MAX_PIECES
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage, StatePiece

MAX_FETCHES = 4  # at once: each reads at the speed of its own link
KEEP_S = 60.0  # a snapshot outlives its last reader by this, so that a broken fetch can go on
READ_S = 120.0  # a reader that is slower than LEAST_RATE by more than this loses its place


Data: TypeAlias = bytes | mmap  # a slice of either is bytes
Take: TypeAlias = Callable[[], Awaitable[tuple[StateManifest, Data]]]


@dataclass(slots=True)
class Snapshot:
    """theta at one round, and when it was last read."""

    manifest: StateManifest
    data: Data
    read_at: float

    def piece(self, index: int) -> bytes:
        """Piece `index` of the manifest."""
        start = index * self.manifest.piece_bytes
        return self.data[start : start + self.manifest.piece_bytes]


@dataclass(slots=True, eq=False)
class Reader:
    """One fetch, and what it holds; None before it has a snapshot, and once its time is over."""

    snapshot: Snapshot | None = None
    ends_at: float = math.inf


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
    """Holds at most one state a round and two in all; `take` copies theta between rounds.

    A reader that stands still is suspended in its generator, where nothing reaches it: its place and its snapshot are
    taken from it when the next one comes.
    """

    def __init__(self, clock: Clock, layout: str, take: Take) -> None:
        self._clock = clock
        self._layout = layout
        self._take = take
        self._snapshots: dict[str, Snapshot] = {}  # one state may be there in pieces of several sizes
        self._readers: list[Reader] = []
        self._taking = asyncio.Lock()

    async def serve(self, request: FetchRequest, current_round: int) -> AsyncGenerator[StateMessage, None]:
        """A manifest, then its pieces from `start_piece` on; raises RunMismatch or LinkError.

        LinkError is for too many fetches, or a reader that is too slow.
        """
        if request.layout != self._layout:
            raise RunMismatch("this donor's model has another layout than the one asked for")
        self._leave_the_slow()
        if len(self._readers) >= MAX_FETCHES:
            raise LinkError(f"this donor already serves {MAX_FETCHES} fetches")
        reader = Reader()
        self._readers.append(reader)
        try:
            reader.snapshot = self._snapshots.get(request.snapshot) or await self._cut(current_round, request)
            reader.ends_at = self._clock.monotonic() + READ_S
            manifest = reader.snapshot.manifest
            yield manifest
            for index in range(request.start_piece, len(manifest.piece_digests)):
                yield self._piece(reader, index)
        finally:
            if reader in self._readers:
                self._readers.remove(reader)

    def _piece(self, reader: Reader, index: int) -> StatePiece:
        self._leave_the_slow()
        snapshot = reader.snapshot
        if snapshot is None:
            raise LinkError(f"this fetch was slower than {LEAST_RATE // 1024} KiB/s over the whole")
        snapshot.read_at = self._clock.monotonic()
        data = snapshot.piece(index)
        reader.ends_at += len(data) / LEAST_RATE
        return StatePiece(index, data)

    def _leave_the_slow(self) -> None:
        now = self._clock.monotonic()
        for reader in [reader for reader in self._readers if now > reader.ends_at]:
            reader.snapshot = None  # its generator still holds the reader
            self._readers.remove(reader)

    async def _cut(self, current_round: int, request: FetchRequest) -> Snapshot:
        """A fresh snapshot in pieces of the size asked for, in place of the same one in others that nobody reads."""
        async with self._taking:
            snapshot = await self._fresh(current_round)
            size = piece_size(request.max_piece_bytes, len(snapshot.data))
            alike = [kept for kept in self._snapshots.values() if kept.data is snapshot.data]
            for kept in alike:
                if kept.manifest.piece_bytes == size:
                    return kept
            again = await asyncio.to_thread(recut, snapshot, size)
            for kept in alike:
                if all(reader.snapshot is not kept for reader in self._readers):
                    self._snapshots.pop(kept.manifest.snapshot, None)
            self._snapshots[again.manifest.snapshot] = again
            return again

    async def _fresh(self, current_round: int) -> Snapshot:
        """The round's own; the newest of two others where both are being read."""
        self._drop_old()
        for snapshot in self._snapshots.values():
            if snapshot.manifest.round == current_round:
                return snapshot
        while len({id(kept.data) for kept in self._snapshots.values()}) >= 2:
            free = [kept for kept in self._snapshots.values() if not self._is_lent(kept)]
            if not free:
                return max(self._snapshots.values(), key=lambda kept: kept.manifest.round)
            del self._snapshots[min(free, key=lambda kept: kept.read_at).manifest.snapshot]
        manifest, data = await self._take()
        self._snapshots[manifest.snapshot] = snapshot = Snapshot(manifest, data, self._clock.monotonic())
        return snapshot

    def _is_lent(self, snapshot: Snapshot) -> bool:
        """Whether somebody reads this state, in whatever pieces."""
        return any(reader.snapshot and reader.snapshot.data is snapshot.data for reader in self._readers)

    def _drop_old(self) -> None:
        """But those that are lent: who reads slowly holds them, and they count."""
        now = self._clock.monotonic()
        for name, kept in list(self._snapshots.items()):
            if now - kept.read_at > KEEP_S and not self._is_lent(kept):
                del self._snapshots[name]
