"""Who fetches and does not read: it holds its own places alone, and no more copies than a donor means to keep."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from peerloom.node.donor import KEEP_S, Donor, manifest_of
from peerloom.node.node import MAX_FETCHES_A_PEER, Node
from peerloom.protocol.errors import LinkError
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


async def test_snapshots_that_are_being_read_count_however_slowly_they_are_read() -> None:
    now, taken = 0.0, 0

    async def take() -> tuple[StateManifest, bytes]:
        nonlocal taken
        taken += 1
        data = bytes([taken]) * 16
        return manifest_of(data, round=taken, step=0, layout="L", held_out_loss=None), data

    donor = Donor(SimpleNamespace(monotonic=lambda: now), "L", take)  # type: ignore[arg-type]
    readers = []
    for round in range(1, 5):
        reader = donor.serve(REQUEST, round)
        await anext(reader)  # and reads no more
        readers.append(reader)
        now += 2 * KEEP_S
    assert taken == 2
    for reader in readers:
        await reader.aclose()
    await anext(donor.serve(REQUEST, 9))
    assert taken == 3 and len(donor._snapshots) == 1
