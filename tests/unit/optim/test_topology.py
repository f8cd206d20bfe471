"""Graphs, their spectra under the stated convention, matchings, and step sizes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from peerloom.optim.topology import (
    Edge,
    Graph,
    best_heavy_ball,
    best_plain,
    random_matching,
    stable,
)

PINNED_REGULAR = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 5)]
PINNED_MATCHING = [(0, 7), (1, 3), (2, 6), (4, 5)]
PINNED_ODD = [(0, 3), (2, 4)]


def test_edges_are_listed_once_and_in_order() -> None:
    assert Graph.ring(4).edges == (Edge(0, 1, 1), Edge(0, 3, 1), Edge(1, 2, 1), Edge(2, 3, 1))
    assert [edge[:2] for edge in Graph.torus(2, 3).edges] == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (3, 5), (4, 5),
    ]  # fmt: skip
    assert len(Graph.complete(7).edges) == 21
    assert (Graph.ring(1).edges, Graph.ring(2).edges) == ((), (Edge(0, 1, 1),))
    assert Graph.torus(1, 5) == Graph.ring(5) and Graph.torus(4, 4).degrees() == [4] * 16
    assert Graph.from_pairs(3, [(2, 0), (0, 2)], weight=0.5).edges == (Edge(0, 2, 0.5),)
    assert Graph(3, (Edge(1, 2, 2.0), Edge(0, 2, 1.0))).neighbors(2) == [(0, 1.0), (1, 2.0)]


def test_the_laplacian_carries_the_half_of_the_paper() -> None:
    graph = Graph(3, (Edge(0, 1, 1.0), Edge(1, 2, 3.0)))
    assert graph.unit_laplacian().tolist() == [[1, -1, 0], [-1, 4, -3], [0, -3, 3]]
    assert torch.equal(2 * graph.laplacian(), graph.unit_laplacian()) and graph.laplacian().dtype == torch.float64
    pair = torch.eye(2, dtype=torch.float64) - Graph.ring(2).laplacian()
    assert pair.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("n", [3, 8, 9])
def test_spectra_are_the_known_ones(n: int) -> None:
    ring, complete = Graph.ring(n), Graph.complete(n)
    assert ring.lambda_2 == pytest.approx(1 - math.cos(2 * math.pi / n))
    assert ring.lambda_max == pytest.approx(1 - math.cos(2 * math.pi * (n // 2) / n))
    assert complete.lambda_2 == pytest.approx(n / 2) and complete.lambda_max == pytest.approx(n / 2)
    assert Graph.torus(4, 4).lambda_max / Graph.torus(4, 4).lambda_2 == pytest.approx(4.0)
    assert Graph.from_pairs(4, [(0, 1), (2, 3)]).lambda_2 == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("n", "d"), [(2, 1), (8, 3), (10, 4), (9, 6), (16, 5), (12, 11), (64, 8), (7, 4)])
def test_random_regular_graphs_are_regular_connected_and_repeatable(n: int, d: int) -> None:
    graph = Graph.random_regular(n, d, seed=3)
    assert graph.degrees() == [d] * n
    assert graph.lambda_2 > 1e-9
    assert graph == Graph.random_regular(n, d, seed=3)


def test_random_regular_graphs_differ_by_seed_and_stay_as_they_are() -> None:
    assert len({Graph.random_regular(12, 3, seed).edges for seed in range(20)}) == 20
    edges = [edge[:2] for edge in Graph.random_regular(6, 2, seed=1).edges]
    assert edges == PINNED_REGULAR


@pytest.mark.parametrize("graph", [Graph.ring(2), Graph.ring(7), Graph.from_pairs(5, [(0, k) for k in range(1, 5)])])
def test_metropolis_weights_give_a_doubly_stochastic_matrix(graph: Graph) -> None:
    mixing = torch.eye(graph.n, dtype=torch.float64) - graph.metropolis().laplacian()
    degree = graph.degrees()
    for i, j, _ in graph.edges:
        assert mixing[i, j].item() == pytest.approx(1 / (1 + max(degree[i], degree[j])))
    assert torch.allclose(mixing.sum(0), torch.ones(graph.n, dtype=torch.float64))
    assert bool((mixing >= 0).all()) and stable(1.0, 0.0, graph.metropolis().lambda_max)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 16, 33])
def test_a_matching_pairs_everybody_once_and_an_odd_one_idles(n: int) -> None:
    for round in range(20):
        pairs = random_matching(n, seed=7, round=round)
        members = [i for pair in pairs for i in pair]
        assert len(set(members)) == len(members) == n - n % 2
        assert pairs == sorted(pairs) and all(i < j for i, j in pairs)


def test_matchings_stay_as_they_are() -> None:
    """The wire contract: protocol/pairing.py computes the same from the documented rule."""
    assert random_matching(8, seed=1, round=0) == PINNED_MATCHING
    assert random_matching(5, seed=-3, round=2**40) == PINNED_ODD


def test_matchings_are_uniform_over_rounds_and_over_seeds() -> None:
    draws = 3000
    for counts in (
        Counter(tuple(random_matching(4, seed=5, round=t)) for t in range(draws)),
        Counter(tuple(random_matching(4, seed=s, round=0)) for s in range(draws)),
    ):
        assert len(counts) == 3
        chi_squared = sum((count - draws / 3) ** 2 / (draws / 3) for count in counts.values())
        assert chi_squared < 13.8  # two degrees of freedom: exceeded once in a thousand


def test_each_of_an_odd_number_idles_equally_often() -> None:
    idle = Counter(({0, 1, 2, 3, 4} - {i for p in random_matching(5, 5, t) for i in p}).pop() for t in range(3000))
    assert sum((idle[i] - 600) ** 2 / 600 for i in range(5)) < 18.5  # four degrees of freedom, one in a thousand


def test_best_step_sizes_are_the_digest_s() -> None:
    ring = Graph.ring(8)
    plain = best_plain(2 * ring.lambda_max, 2 * ring.lambda_2)
    heavy = best_heavy_ball(2 * ring.lambda_max, 2 * ring.lambda_2)
    assert (round(plain.alpha, 3), plain.gamma) == (0.436, 0)
    assert (round(heavy.alpha, 3), round(heavy.gamma, 3)) == (0.523, 0.199)
    assert heavy.rate == pytest.approx(math.sqrt(heavy.gamma))
    assert best_heavy_ball(16.0, 16.0) == (0.0625, 0.0, 0.0)
    halved = best_heavy_ball(ring.lambda_max, ring.lambda_2)
    assert halved.alpha == pytest.approx(2 * heavy.alpha) and halved.gamma == pytest.approx(heavy.gamma)


@pytest.mark.parametrize("gamma", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("momentum", ["pre", "post"])
def test_the_stability_bound_is_where_the_mode_s_spectral_radius_passes_one(momentum: str, gamma: float) -> None:
    for alpha_l in torch.linspace(0.013, 4.2, 120).tolist():
        c = 1 - alpha_l
        trace, determinant = (c + gamma, gamma) if momentum == "pre" else (c * (1 + gamma), c * gamma)
        radius = torch.linalg.eigvals(torch.tensor([[trace, -determinant], [1.0, 0.0]])).abs().max().item()
        assert stable(alpha_l / 2, gamma, 2.0, momentum) == (radius < 1), (alpha_l, radius)  # type: ignore[arg-type]
    assert not stable(0.0, gamma, 1.0) and not stable(-0.1, gamma, 1.0) and not stable(0.5, 1.0, 1.0)


def test_refusals() -> None:
    cases = [
        (lambda: Graph(0, ()), "at least one node"),
        (lambda: Graph(2, (Edge(1, 0, 1.0),)), r"edge \(1, 0\) needs 0 <= i < j < n=2"),
        (lambda: Graph(2, (Edge(0, 2, 1.0),)), r"edge \(0, 2\) needs"),
        (lambda: Graph(2, (Edge(0, 1, 0.0),)), "weight 0.0; it must be positive"),
        (lambda: Graph(2, (Edge(0, 1, math.inf),)), "positive and finite"),
        (lambda: Graph(2, (Edge(0, 1, 1.0), Edge(0, 1, 2.0))), "an edge is given twice"),
        (lambda: Graph.from_pairs(3, [(1, 1)]), r"edge \(1, 1\) needs"),
        (lambda: Graph.torus(0, 3), "sides of at least 1"),
        (lambda: Graph.random_regular(5, 3, 0), "n \\* d even, got n=5, d=3"),
        (lambda: Graph.random_regular(4, 4, 0), "1 <= d < n"),
        (lambda: Graph.complete(1).lambda_2, "not defined for a graph of one node"),
        (lambda: random_matching(-1, 0, 0), "n >= 0, got -1"),
        (lambda: best_plain(1.0, 0.0), "0 < smallest <= largest"),
        (lambda: best_heavy_ball(1.0, 2.0), "smallest 2.0 and largest 1.0"),
        (lambda: stable(1.0, 0.0, 1.0, "nesterov"), "momentum must be"),  # type: ignore[arg-type]
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
