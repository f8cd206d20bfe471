"""The overlay: connected from one view, about as many links as asked for, and little moved by one that comes."""

from __future__ import annotations

import pytest

from peerloom.protocol.flood_overlay import partners
from peerloom.protocol.types import PeerId
from tests.unit.protocol.flood_fabric import peer


def edges(count: int, neighbours: int, seed: int = 1) -> set[frozenset[PeerId]]:
    peers = [peer(index) for index in range(count)]
    return {frozenset((own, other)) for own in peers for other in partners(own, peers, seed, neighbours)}


def reached(found: set[frozenset[PeerId]]) -> int:
    start = min(min(edge) for edge in found)
    seen, waiting = {start}, [start]
    while waiting:
        own = waiting.pop()
        for edge in found:
            if own in edge:
                new = edge - {own} - seen
                seen |= new
                waiting += new
    return len(seen)


@pytest.mark.parametrize("count", [2, 3, 5, 16, 40])
@pytest.mark.parametrize("neighbours", [2, 3, 4, 8])
def test_all_are_connected_with_about_as_many_links_as_asked_for(count: int, neighbours: int) -> None:
    found = edges(count, neighbours)
    assert reached(found) == count
    mean = 2 * len(found) / count
    assert mean <= neighbours + 1
    if count > 2 * neighbours:
        assert mean > 0.7 * neighbours


def test_two_neighbours_make_a_ring() -> None:
    found = edges(16, 2)
    assert len(found) == 16
    assert all(sum(peer(index) in edge for edge in found) == 2 for index in range(16))


def test_one_that_comes_moves_few_links_and_a_node_alone_has_none() -> None:
    assert len(edges(40, 6) - edges(41, 6)) <= 12
    assert partners(peer(0), [peer(0)], 1, 4) == ()
    assert edges(16, 4, seed=1) != edges(16, 4, seed=2)
