"""Sequences whose mixing matrices multiply to the exact average."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peerloom.optim.finite_time import (
    base_graph,
    base_period,
    exponential_matching,
    hypercube_matching,
    one_peer_exponential,
    period,
    sequence_graph,
)
from peerloom.optim.topology import Graph, two_peer

F64 = torch.float64


def product(graphs: list[Graph]) -> Tensor:
    """The mixing matrices of the graphs, the first applied first."""
    identity = torch.eye(graphs[0].n, dtype=F64)
    total = identity
    for graph in graphs:
        total = (identity - graph.laplacian()) @ total
    return total


def error(matrix: Tensor) -> float:
    """The largest distance of an entry from 1 / n."""
    return (matrix - 1 / len(matrix)).abs().max().item()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_period_of_the_base_graph_averages_exactly_for_any_number_of_nodes(k: int) -> None:
    for n in range(1, 34):
        graphs = [base_graph(n, k, t) for t in range(base_period(n, k))]
        assert error(product(graphs)) < 1e-12, n
        assert max(max(graph.degrees()) for graph in graphs) <= k
        assert all(0 < edge.weight < 2 for graph in graphs for edge in graph.edges)
        assert n < 4 or len(graphs) == 1 or error(product(graphs[:-1])) > 1e-3  # no round is idle
        assert base_graph(n, k, len(graphs) + 1) == graphs[1 % len(graphs)]


def test_lengths_of_the_base_graph() -> None:
    """log2 n where it is whole; at most 2 floor(log_(k+1) n) + 2 for any n."""
    assert [base_period(2**m, 1) for m in range(1, 6)] == [1, 2, 3, 4, 5]
    assert [base_period(3**m, 2) for m in range(1, 4)] == [1, 2, 3]
    assert (base_period(5, 1), base_period(6, 1), base_period(6, 2), base_period(33, 1)) == (5, 4, 2, 11)
    for k in (1, 2, 3):
        for n in range(2, 130):
            digits = max(m for m in range(9) if (k + 1) ** m <= n)
            assert base_period(n, k) <= 2 * digits + 2


def test_the_rounds_of_five_nodes_stay_as_they_are() -> None:
    """Two rounds among four, then the fifth gives and takes with one of them, then two rounds again."""
    edges = [[(e.i, e.j, round(e.weight, 6)) for e in base_graph(5, 1, t).edges] for t in range(5)]
    assert edges == [
        [(0, 1, 1.0), (2, 3, 1.0)],
        [(0, 2, 1.0), (1, 3, 1.0)],
        [(0, 4, 1.6)],
        [(0, 1, 1.0), (2, 3, 1.0)],
        [(0, 2, 1.0), (1, 3, 1.0)],
    ]


@pytest.mark.parametrize("n", [1, 2, 4, 16, 32])
def test_hypercube_and_exponential_average_in_log2_n_rounds(n: int) -> None:
    rounds = max(1, n.bit_length() - 1)
    for start in (0, rounds, 5 * rounds):
        assert error(product([sequence_graph("hypercube", n, start + t) for t in range(rounds)])) < 1e-15
    for start in (0, 2 * rounds):  # the other turns begin one node further
        assert error(product([sequence_graph("exponential", n, start + t) for t in range(rounds)])) < 1e-15
    assert (period("hypercube", n), period("base", n)) == (rounds, rounds)


def test_the_directed_exponential_graph_averages_for_powers_of_two_only() -> None:
    for n, exact in ((8, True), (6, False)):
        total = torch.eye(n, dtype=F64)
        for t in range(3):
            matrix = torch.eye(n, dtype=F64) / 2
            for sender, receiver in one_peer_exponential(n, t):
                matrix[receiver, sender] += 0.5
            total = matrix @ total
        assert (error(total) < 1e-15) == exact
    assert one_peer_exponential(1, 3) == [] and one_peer_exponential(3, 1) == [(0, 2), (1, 0), (2, 1)]


@pytest.mark.parametrize("n", [2, 3, 7, 12, 31])
def test_the_undirected_exponential_graph_is_matchings_that_agree_in_the_end(n: int) -> None:
    graphs = [sequence_graph("exponential", n, t) for t in range(period("exponential", n))]
    assert all(max(graph.degrees()) == 1 for graph in graphs)
    assert all(exponential_matching(n, t) == [edge[:2] for edge in graph.edges] for t, graph in enumerate(graphs))
    assert error(torch.linalg.matrix_power(product(graphs), 40)) < 1e-6


def test_two_peers_are_two_matchings_of_half_weight() -> None:
    for n in (2, 7, 16):
        for t in range(20):
            graph = two_peer(n, 3, t)
            mixing = torch.eye(n, dtype=F64) - graph.laplacian()
            assert bool((mixing >= -1e-15).all()) and max(graph.degrees()) <= 2
            assert sum(edge.weight for edge in graph.edges) == n // 2
    assert {edge.weight for t in range(20) for edge in two_peer(4, 3, t).edges} == {0.5, 1.0}
    assert two_peer(8, 3, 1) == two_peer(8, 3, 1) != two_peer(8, 3, 2)


def test_refusals() -> None:
    cases = [
        (lambda: hypercube_matching(6, 0), "power of 2 of nodes, got 6"),
        (lambda: base_graph(4, 0, 0), "k of at least 1, got 0"),
        (lambda: base_graph(0, 1, 0), "at least one node, got n=0"),
        (lambda: sequence_graph("tree", 4, 0), "unknown sequence 'tree'"),
        (lambda: period("tree", 4), "unknown sequence 'tree'"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
