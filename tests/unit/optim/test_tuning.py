"""Rates against simulation, refusals with their bound, and defaults that are stable."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from peerloom.optim.finite_time import period, sequence_graph
from peerloom.optim.gasloc import Momentum, simulate_gossip
from peerloom.optim.groups import mixing_matrix, random_groups
from peerloom.optim.topology import Graph, best_heavy_ball, stable
from peerloom.optim.tuning import (
    FIXED,
    Kind,
    alpha_bound,
    check_tuning,
    default_tuning,
    fixed_rate,
    near_square_torus,
    random_rate,
    rate,
    second_moments,
    sequence_rate,
)

from .conftest import Draw

F64 = torch.float64
BOTH = pytest.mark.parametrize("momentum", ["pre", "post"])
KINDS = ("ring", "torus", "complete", "1peer", "2peer", "groups", "hypercube", "exponential", "base")


def disagreement(laplacians: list[Tensor], alpha: float, gamma: float, momentum: Momentum, start: Tensor) -> Tensor:
    """Its norm after each round, without drift."""
    quiet = torch.zeros(len(laplacians), *start.shape, dtype=F64)
    history = simulate_gossip(start, laplacians, quiet, eta=1.0, alpha=alpha, gamma=gamma, momentum=momentum)
    return (history - history.mean(1, keepdim=True)).flatten(1).norm(dim=1)


@BOTH
@pytest.mark.parametrize(("alpha", "gamma"), [(1.0, 0.0), (1.0, 0.5), (0.5, 0.3), (1.0, 0.9)])
@pytest.mark.parametrize("peers", [1, 2])
def test_the_three_by_three_recursion_is_the_full_covariance(
    peers: int, momentum: Momentum, alpha: float, gamma: float
) -> None:
    """Against the covariance of 6 nodes, averaged over all 15 matchings, or pairs of them, every round."""
    n = 6
    single = [Graph.from_pairs(n, pairs).laplacian() for pairs in _perfect_matchings(list(range(n)))]
    laplacians = single if peers == 1 else [(a + b) / 2 for a in single for b in single]
    identity, zero = torch.eye(n, dtype=F64), torch.zeros(n, n, dtype=F64)
    steps = []
    for w in (identity - alpha * laplacian for laplacian in laplacians):
        upper = [w + gamma * identity if momentum == "pre" else (1 + gamma) * w, -gamma * identity]
        steps.append(torch.cat([torch.cat(upper, 1), torch.cat([identity if momentum == "pre" else w, zero], 1)]))
    x = torch.arange(n, dtype=F64)[:, None] - 2.5
    covariance = torch.cat([x, x]) @ torch.cat([x, x]).T
    moments = torch.full((3,), float(x.square().sum()), dtype=F64)
    matrix = second_moments(n, alpha, gamma, momentum, peers=peers)
    assert random_rate(n, alpha, gamma, momentum, peers=peers) ** 2 == pytest.approx(
        float(torch.linalg.eigvals(matrix).abs().max())
    )
    for _ in range(5):
        covariance = torch.stack([step @ covariance @ step.T for step in steps]).mean(0)
        moments = matrix @ moments
        blocks = (covariance[:n, :n], covariance[:n, n:], covariance[n:, n:])
        assert [float(block.trace()) for block in blocks] == pytest.approx(moments.tolist(), rel=1e-9)


def _perfect_matchings(nodes: list[int]) -> list[list[tuple[int, int]]]:
    if not nodes:
        return [[]]
    first, *others = nodes
    return [
        [(first, other), *rest] for other in others for rest in _perfect_matchings([i for i in others if i != other])
    ]


def test_rates_match_the_rounds_measured_on_sixteen_workers() -> None:
    """Rounds to 1e-3 by the root mean square against means over 10 sequences: the digest's table."""
    table = {("pre", 0.0): 17.8, ("pre", 0.3): 26.6, ("pre", 0.5): 51, ("post", 0.3): 23, ("post", 0.5): 34}
    for (momentum, gamma), rounds in table.items():
        predicted = math.log(1e-3) / math.log(random_rate(16, 1.0, gamma, momentum))  # type: ignore[arg-type]
        assert predicted == pytest.approx(rounds, rel=0.1)
    assert random_rate(16, 1.0, 0.9, "pre") > 1 and random_rate(16, 1.0, 0.9, "post") > 1


@BOTH
def test_groups_of_the_whole_swarm_are_the_exact_average(momentum: Momentum) -> None:
    gamma = 0.5
    whole = random_rate(8, 1.0, gamma, momentum, group=8)
    assert whole == pytest.approx(fixed_rate(torch.ones(7), 1.0, gamma, momentum), abs=1e-7)
    assert random_rate(8, 1.0, gamma, momentum, group=4) < random_rate(8, 1.0, gamma, momentum, group=2)
    c = 1 - (mixing_matrix(7, random_groups(7, 4, 0, 0)).trace() - 1).item() / 6  # 4 + 2 + 1 left over
    assert random_rate(7, 1.0, 0.0, momentum, group=4) == pytest.approx(math.sqrt(1 - c))


@BOTH
@pytest.mark.parametrize(("kind", "n"), [("base", 5), ("base", 7), ("exponential", 6), ("hypercube", 8)])
def test_the_rate_of_a_sequence_is_that_of_its_simulation(kind: Kind, n: int, momentum: Momentum, draw: Draw) -> None:
    graphs = [sequence_graph(kind, n, t) for t in range(period(kind, n))]
    for gamma in (0.3, 0.8):
        periods = 400 // len(graphs)
        norms = disagreement([g.laplacian() for g in graphs] * periods, 1.0, gamma, momentum, draw(n, 20))
        half = len(norms) // 2 // len(graphs) * len(graphs)
        last = (periods - 1) * len(graphs)
        if norms[last] > 1e-12:
            measured = (norms[last] / norms[half]).item() ** (1 / (last - half))
            assert measured == pytest.approx(sequence_rate(graphs, 1.0, gamma, momentum), rel=0.02)
    assert sequence_rate(graphs, 1.0, 0.0, "post") < (1e-2 if kind != "exponential" else 0.9)


@BOTH
def test_fixed_rates_agree_with_the_bound(momentum: Momentum) -> None:
    for graph in (Graph.ring(8), Graph.torus(3, 4)):
        for gamma in (0.0, 0.4, 0.8):
            bound = alpha_bound(gamma, graph.lambda_max, momentum)
            eigenvalues = torch.linalg.eigvalsh(graph.laplacian())[1:]
            for alpha in (0.5 * bound, 0.999 * bound, 1.001 * bound):
                assert (fixed_rate(eigenvalues, alpha, gamma, momentum) < 1) == (alpha < bound)
                assert stable(alpha, gamma, graph.lambda_max, momentum) == (alpha < bound)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_stable_for_every_size(kind: Kind, momentum: Momentum) -> None:
    for n in (1, 2, 3, 5, 8, 13, 16, 33):
        if kind == "hypercube" and n & (n - 1):
            continue
        alpha, gamma = default_tuning(kind, n, momentum)
        assert alpha > 0 and 0 <= gamma < 1
        assert rate(kind, n, alpha, gamma, momentum) < 0.98
        check_tuning(kind, n, alpha, gamma, momentum)
        assert kind in FIXED or alpha == 1


def test_defaults_are_as_said() -> None:
    assert default_tuning("1peer", 16) == default_tuning("groups", 16) == (1.0, 0.3)
    assert default_tuning("1peer", 16, "pre") == (1.0, 0.2)  # as a spec's own default
    alpha, gamma = default_tuning("complete", 16)
    assert alpha == pytest.approx(2 / 16) and gamma == 0.3
    ring = Graph.ring(16)
    alpha, gamma = default_tuning("ring", 16, "pre")
    best = best_heavy_ball(ring.lambda_max, ring.lambda_2)
    assert rate("ring", 16, alpha, gamma, "pre") == pytest.approx(best.rate, abs=0.04)
    regular = Graph.random_regular(12, 3, seed=1)
    assert rate("regular", 12, *default_tuning("regular", 12, graph=regular), "post", graph=regular) < 0.9
    assert near_square_torus(12) == Graph.torus(3, 4) and near_square_torus(7) == Graph.ring(7)


def test_an_unstable_choice_is_refused_with_the_bound() -> None:
    cases: list[tuple[tuple[Kind, int, float, float, Momentum], str]] = [
        (("ring", 8, 1.0, 0.5, "post"), 'gamma 0.5 and momentum "post" loses consensus on ring with 8 nodes: .* 0.75 '),
        (("1peer", 16, 1.0, 0.9, "pre"), "1peer with 16 nodes: alpha must stay under 0.4"),
        (("base", 5, 1.6, 0.5, "post"), "base with 5 nodes: alpha must stay under 0.95"),
        (("1peer", 16, 1.0, 1.0, "pre"), r"gamma in \[0, 1\), got alpha 1 and gamma 1"),
        (("1peer", 16, 0.0, 0.3, "pre"), "alpha must be over 0"),
        (("regular", 16, 1.0, 0.3, "pre"), "give the graph"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            check_tuning(*arguments)
    with pytest.raises(ValueError, match="not connected"):
        check_tuning("regular", 4, 0.5, 0.0, "pre", graph=Graph.from_pairs(4, [(0, 1), (2, 3)]))
    check_tuning("ring", 8, 1.0, 0.5, "pre")
