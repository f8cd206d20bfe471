"""Who fetches and does not read: it holds its own places alone, and no more copies than a donor means to keep."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from peerloom.node import donor as donor_module
from peerloom.node.donor import KEEP_S, MAX_FETCHES, READ_S, Donor, Snapshot, manifest_of, recut
from peerloom.node.node import MAX_FETCHES_A_PEER, Node
from peerloom.protocol.errors import LinkError
from peerloom.protocol.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES, LEAST_RATE
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage, StatePiece
from peerloom.protocol.types import PeerId

REQUEST = FetchRequest("L")


async def test_a_peer_has_so_many_fetches_at_once_and_others_have_theirs() -> None:
    class Trainer:
        async def fetch(self, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
            yield StatePiece(0, b"")
            yield StatePiece(1, b"")

    nothing: Any = SimpleNamespace(view=SimpleNamespace())
    node = Node(nothing, nothing, None)
    node._trainer = Trainer()  # type: ignore[assignment]
    held = [node.fetch(PeerId("greedy"), REQUEST) for _ in range(MAX_FETCHES_A_PEER)]
    for each in held:
        await anext(each)
    with pytest.raises(LinkError, match="of this peer are under way"):
        await anext(node.fetch(PeerId("greedy"), REQUEST))
    other = node.fetch(PeerId("other"), REQUEST)
    assert await anext(other) == StatePiece(0, b"")
    for each in (*held, other):
        await each.aclose()
    assert not node._fetching
    assert await anext(node.fetch(PeerId("greedy"), REQUEST)) == StatePiece(0, b"")


class Bench:
    """A donor of states of `size` bytes, a clock, and how many states were copied."""

    def __init__(self, size: int = 4 * LEAST_CHUNK_BYTES) -> None:
        self.now, self.taken, self._size = 0.0, 0, size
        self.donor = Donor(self, "L", self._take)  # type: ignore[arg-type]

    def monotonic(self) -> float:
        return self.now

    async def _take(self) -> tuple[StateManifest, bytes]:
        self.taken += 1
        data = bytes([self.taken]) * self._size
        return manifest_of(data, round=self.taken, step=0, layout="L", held_out_loss=None), data

    async def read(self, round: int, piece_bytes: int = 0) -> AsyncGenerator[StateMessage, None]:
        """A fetch that has its manifest, and reads no more by itself."""
        reader = self.donor.serve(FetchRequest("L", max_piece_bytes=piece_bytes), round)
        await anext(reader)
        return reader


async def test_snapshots_that_are_being_read_count_however_slowly_they_are_read() -> None:
    bench, readers = Bench(), []
    for round in range(1, 5):
        readers.append(await bench.read(round))
        bench.now += 0.26 * READ_S
    assert bench.now - 0.26 * READ_S > KEEP_S and bench.taken == 2
    for reader in readers:
        await reader.aclose()
    bench.now += 2 * KEEP_S
    await bench.read(9)
    assert bench.taken == 3 and len(bench.donor._snapshots) == 1


async def test_a_state_is_one_in_pieces_of_whatever_size() -> None:
    bench = Bench()
    whole, cut = await bench.read(1), await bench.read(1, LEAST_CHUNK_BYTES)
    assert bench.taken == 1
    assert {kept.manifest.piece_bytes for kept in bench.donor._snapshots.values()} == {LEAST_CHUNK_BYTES, CHUNK_BYTES}
    await cut.aclose()
    other = await bench.read(1, 2 * LEAST_CHUNK_BYTES)  # takes the place of the one that nobody reads
    assert {kept.manifest.piece_bytes for kept in bench.donor._snapshots.values()} == {
        2 * LEAST_CHUNK_BYTES,
        CHUNK_BYTES,
    }
    await other.aclose()
    bench.now += 1.1 * KEEP_S
    readers = [whole, await bench.read(2), await bench.read(3)]
    assert bench.taken == 2  # `whole` still holds the first
    for reader in readers:
        await reader.aclose()


async def test_pieces_of_another_size_are_hashed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def watched(snapshot: Snapshot, piece_bytes: int) -> Snapshot:
        threads.append(threading.get_ident())
        return recut(snapshot, piece_bytes)

    monkeypatch.setattr(donor_module, "recut", watched)
    bench = Bench()
    await bench.read(1, LEAST_CHUNK_BYTES)
    assert len(threads) == 1 and threads[0] != threading.get_ident()


async def test_who_does_not_read_loses_its_place_and_its_state() -> None:
    bench = Bench()
    stuck = [await bench.read(1 + i // 2) for i in range(MAX_FETCHES)]
    with pytest.raises(LinkError, match=f"already serves {MAX_FETCHES}"):
        await bench.read(3)
    bench.now += READ_S + 1
    await bench.read(3)
    assert bench.taken == 3 and len(bench.donor._snapshots) == 1
    for reader in stuck:
        with pytest.raises(LinkError, match="slower than 32 KiB/s"):
            await anext(reader)
    assert len(bench.donor._readers) == 1  # the one of round 3; who lost its place gives back none of another


async def test_who_reads_at_the_least_rate_has_as_long_as_it_takes() -> None:
    bench = Bench(8 * CHUNK_BYTES)
    reader = await bench.read(1)
    for index in range(8):
        bench.now += 0.99 * CHUNK_BYTES / LEAST_RATE
        piece = await anext(reader)
        assert isinstance(piece, StatePiece) and piece.index == index
    assert bench.now > 2 * READ_S
    assert await anext(reader, None) is None
    assert not bench.donor._readers
