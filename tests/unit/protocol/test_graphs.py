"""Matchings in pure Python: those of the optimizer side, each edge in one leg, and sequences that average exactly."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.optim import finite_time, groups, topology
from peerloom.optim.topology import Graph, two_peer
from peerloom.optim.tuning import near_square_torus
from peerloom.protocol import graphs, plan
from peerloom.protocol.graphs import Edge, Leg
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.stability import FIXED, sequence_leg

SIZES = range(1, 26)
DRAWN = "54ed43dc79376e6892ae5184bf0442888e8ed83e7bf48bf163ca60d2f14b172f"


def edges(graph: Graph) -> list[Edge]:
    return [Edge(*edge) for edge in graph.edges]


def union(legs: tuple[Leg, ...]) -> list[Edge]:
    """All edges; one that is in several legs has their whole weight."""
    weights: dict[tuple[int, int], float] = {}
    for i, j, weight in (edge for leg in legs for edge in leg):
        weights[i, j] = weights.get((i, j), 0.0) + weight
    return sorted(Edge(i, j, weight) for (i, j), weight in weights.items())


@pytest.mark.parametrize("n", SIZES)
def test_fixed_graphs_are_the_optimizers(n: int) -> None:
    for metropolis in (False, True):
        for ours, theirs in (
            (graphs.ring(n), Graph.ring(n)),
            (graphs.torus(n), near_square_torus(n)),
            (graphs.complete(n), Graph.complete(n)),
        ):
            assert graphs.weighted(n, ours, metropolis) == edges(theirs.metropolis() if metropolis else theirs)


@pytest.mark.parametrize("degree", [2, 3, 4, 7])
@pytest.mark.parametrize("n", range(3, 16))
def test_regular_graphs_are_the_optimizers_and_fit_any_size(n: int, degree: int) -> None:
    d = graphs.fitting_degree(n, degree)
    assert graphs.random_regular(n, degree, 5) == [edge[:2] for edge in Graph.random_regular(n, d, 5).edges]
    assert abs(d - min(degree, n - 1)) <= 1


@pytest.mark.parametrize("n", SIZES)
def test_sequences_are_the_optimizers(n: int) -> None:
    for round in range(12):
        assert graphs.exponential(n, round) == finite_time.exponential_matching(n, round)
        assert list(graphs.base_leg(n, round)) == edges(finite_time.base_graph(n, 1, round))
        if n & (n - 1) == 0:
            assert graphs.hypercube(n, round) == finite_time.hypercube_matching(n, round)
    assert graphs.base_period(n) == finite_time.base_period(n, 1)


@given(n=st.integers(1, 24), m=st.integers(0, 3), seed=st.integers(0, 2**40), round=st.integers(0, 500))
def test_groups_are_the_optimizers(n: int, m: int, seed: int, round: int) -> None:
    assert graphs.random_groups(n, 1 << m, seed, round) == groups.random_groups(n, 1 << m, seed, round)
    if n & (n - 1) == 0 and 1 << m <= n:
        ours = graphs.hypercube_groups(n, 1 << m, round) if n > 1 else [(0,)]
        assert ours == groups.hypercube_groups(n, 1 << m, round)


@given(
    pairing=st.sampled_from(["scheduled", "two_peer", *FIXED, "hypercube", "exponential", "base"]),
    n=st.integers(0, 20),
    fragments=st.integers(1, 4),
    group=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 2**32),
    round=st.integers(0, 200),
    fragment=st.integers(0, 3),
)
def test_every_leg_is_a_matching(
    pairing: str, n: int, fragments: int, group: int, seed: int, round: int, fragment: int
) -> None:
    size = group if pairing in ("scheduled", "hypercube") else 2
    spec = GaslocSpec(pairing=pairing, group_size=size, fragments=fragments)  # type: ignore[arg-type]
    for leg in plan.legs(spec, seed, round, fragment, n):
        ends = [end for edge in leg for end in edge[:2]]
        assert len(set(ends)) == len(ends)
        assert all(0 <= i < j < n and weight > 0 for i, j, weight in leg)


@pytest.mark.parametrize("pairing", FIXED)
@pytest.mark.parametrize("n", SIZES)
def test_the_legs_of_a_fixed_graph_are_its_edges_and_few(pairing: str, n: int) -> None:
    spec = GaslocSpec(pairing=pairing)  # type: ignore[arg-type]
    legs = plan.legs(spec, 5, 3, 0, n)
    graph = {"ring": Graph.ring, "complete": Graph.complete, "torus": near_square_torus}.get(
        pairing, lambda n: Graph.from_pairs(n, graphs.random_regular(n, spec.degree, 5))
    )(n)
    assert union(legs) == edges(graph.metropolis())
    assert len(legs) <= max(graph.degrees()) + 1
    if n % 2 == 0 and pairing != "regular":
        assert len(legs) == max(graph.degrees())


def test_two_peers_are_two_matchings_of_half_weight() -> None:
    for round in range(20):
        legs = plan.legs(GaslocSpec(pairing="two_peer"), 9, round, 0, 7)
        assert union(legs) == edges(two_peer(7, 9, round))


@pytest.mark.parametrize("n", range(2, 20))
def test_a_period_of_the_base_graph_averages_exactly_in_any_phase_it_starts_with(n: int) -> None:
    values = [float(i * i) for i in range(n)]
    for round in range(graphs.base_period(n)):
        values = mixed(values, sequence_leg("base", n, round))
    assert values == pytest.approx([sum(i * i for i in range(n)) / n] * n)


def mixed(values: list[float], leg: Leg) -> list[float]:
    after = list(values)
    for i, j, weight in leg:
        after[i] -= weight / 2 * (values[i] - values[j])
        after[j] -= weight / 2 * (values[j] - values[i])
    return after


@pytest.mark.parametrize("pairing", ["scheduled", "hypercube"])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("n", [2, 3, 6, 7, 8, 11, 16])
def test_the_legs_of_groups_give_each_its_mean_at_little_cost(pairing: str, size: int, n: int) -> None:
    spec = GaslocSpec(pairing=pairing, group_size=size, fragments=2)  # type: ignore[arg-type]
    for round in range(4):
        legs = plan.legs(spec, 3, round, 1, n)
        before = [[float(i * i + 7 * piece) for piece in range(2 * size)] for i in range(n)]
        values, sent = [list(row) for row in before], [0] * n
        for index, leg in enumerate(legs):
            held = [list(row) for row in values]
            for me, other in [(i, j) for i, j, _ in leg] + [(j, i) for i, j, _ in leg]:
                swap, theirs = (plan.swap(spec, 3, round, 1, index, n, node) for node in (me, other))
                assert swap.receive == theirs.send
                assert (swap.halved >= 0) == (theirs.halved >= 0)
                sent[me] += swap.send[1] - swap.send[0]
                for piece in range(*swap.receive):
                    came = held[other][piece]
                    values[me][piece] = came if swap.halved >= 0 else (held[me][piece] + came) / 2
        for group in plan.groups(spec, 3, round, 1, n):
            for i in group:
                assert values[i][:size] == before[i][:size]  # the other fragment
                mean = [sum(before[k][piece] for k in group) / len(group) for piece in range(size, 2 * size)]
                assert values[i][size:] == pytest.approx(mean)
                assert sent[i] == 2 * (size - size // len(group))  # 2 (1 - 1/g) copies
    assert {len(group) for group in plan.groups(spec, 3, 0, 0, 16)} == {size}


def test_groups_are_those_of_the_optimizers_schedule() -> None:
    spec = GaslocSpec(pairing="hypercube", group_size=8)
    for place in range(8):
        theirs = groups.schedule(8, place, 8)
        ours = [plan.swap(spec, 0, 0, 0, leg, 8, place) for leg in range(6)]
        assert [(s.send, s.receive) for s in ours] == [
            ((s.send_start, s.send_stop), (s.receive_start, s.receive_stop)) for s in theirs
        ]
        assert [swap.halved for swap in ours] == [-1, -1, -1, 2, 1, 0]


def test_a_hypercube_of_another_size_takes_the_base_graph() -> None:
    assert sequence_leg("hypercube", 6, 1) == graphs.base_leg(6, 1)


def test_fragments_go_through_a_whole_sequence_and_draw_apart() -> None:
    spec = GaslocSpec(pairing="hypercube", group_size=4, fragments=4)
    for fragment in range(4):
        assert len({plan.legs(spec, 1, round, fragment, 16) for round in range(4)}) == 2
    spec = GaslocSpec(pairing="scheduled", fragments=4)
    assert len({plan.legs(spec, 1, 0, fragment, 16) for fragment in range(4)}) == 4
    alone = GaslocSpec(pairing="scheduled")
    assert [edge[:2] for edge in plan.legs(alone, 1, 7, 0, 9)[0]] == graphs.scheduled_matching(1, 7, 9)


def test_a_sparse_graph_of_a_large_swarm_is_drawn_without_all_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(n: int) -> None:
        raise AssertionError(f"{n * (n - 1) // 2} pairs")

    monkeypatch.setattr(graphs, "complete", too_many)
    monkeypatch.setattr(topology, "_all_pairs", too_many)
    assert graphs.random_regular(500, 4, 5) == [edge[:2] for edge in Graph.random_regular(500, 4, 5).edges]


def test_random_regular_graphs_are_what_they_have_been() -> None:
    """They are part of the protocol: nodes of one version and the next must draw the same."""
    drawn = [graphs.random_regular(n, d, seed) for n in range(2, 24) for d in range(1, n) for seed in (0, 7)]
    assert sha256(repr(drawn).encode()).hexdigest() == DRAWN
