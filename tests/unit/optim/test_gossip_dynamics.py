"""What GASLoC does over many rounds, in fp64: mean dynamics, consensus rounds, special cases, stability.

Rounds to consensus are counted as follows. Start from independent standard normal parameters, no drift, theta_{-1} =
theta_0. The error of a round is the norm over workers of the distance to the mean, relative to that of theta_0. As
heavy-ball carries two iterates, consensus is reached in the first round t where the errors of t and t - 1 are both
below 1e-3 (one alone can pass through zero: on the complete graph it does at once). The expected numbers come
from one random start each, so here the median over many starts must agree with them and the spread must contain them.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from peerloom.optim.gasloc import Momentum, simulate_gossip
from peerloom.optim.topology import Graph, Tuning, best_heavy_ball, best_plain, random_matching, stable

from .conftest import Draw

F64 = torch.float64
BOTH = pytest.mark.parametrize("momentum", ["pre", "post"])


def matchings(n: int, rounds: int, seed: int = 1) -> list[Tensor]:
    return [Graph.from_pairs(n, random_matching(n, seed, t)).laplacian() for t in range(rounds)]


def torch_nesterov(theta0: Tensor, drifts: Tensor, lr: float, gamma: float) -> Tensor:
    """torch's SGD fed with -drift, (T + 1, ...)."""
    parameter = theta0.clone().requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=gamma, nesterov=gamma > 0)
    history = [theta0]
    for drift in drifts:
        parameter.grad = -drift
        optimizer.step()
        history.append(parameter.detach().clone())
    return torch.stack(history)


def spread(history: Tensor) -> Tensor:
    """Norm over workers of the distance to their mean: (T, d) of (T, n, d)."""
    return (history - history.mean(1, keepdim=True)).norm(dim=1)


def rounds_to_consensus(start: Tensor, laplacian: Tensor, tuning: Tuning, limit: int) -> Tensor:
    """For each of d starts (n, d), the round as defined above; fails if one needs more than `limit`."""
    history = simulate_gossip(
        start, laplacian, torch.zeros(limit, *start.shape, dtype=F64), eta=1.0, alpha=tuning.alpha, gamma=tuning.gamma
    )
    error = spread(history)
    below = error < 1e-3 * error[0]
    reached = below[1:] & below[:-1]
    assert bool(reached.any(0).all())
    return reached.int().argmax(0) + 1


@BOTH
@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("kind", ["ring", "torus", "complete", "metropolis", "regular", "matchings", "odd matchings"])
def test_the_mean_follows_torch_nesterov_for_any_topology(
    kind: str, gamma: float, momentum: Momentum, draw: Draw
) -> None:
    """Both variants: mixing moves no mean, so the mean of the mixed iterate is the mean of y (exact up to rounding)."""
    rounds, n = 12, 9 if kind == "odd matchings" else 8
    graphs = {
        "ring": Graph.ring(8), "torus": Graph.torus(2, 4), "complete": Graph.complete(8),
        "metropolis": Graph.random_regular(8, 3, 1).metropolis(), "regular": Graph.random_regular(8, 3, 2),
    }  # fmt: skip
    laplacians = [graphs[kind].laplacian()] * rounds if kind in graphs else matchings(n, rounds)
    theta0, drifts = draw(1, 6).expand(n, -1), draw(rounds, n, 6)
    history = simulate_gossip(theta0, laplacians, drifts, eta=0.7, alpha=0.23, gamma=gamma, momentum=momentum)
    expected = torch_nesterov(theta0[0], drifts.mean(1), lr=0.7, gamma=gamma)
    assert (history.mean(1) - expected).abs().max().item() < 1e-12
    assert spread(history)[-1].min().item() > 1e-3 or kind == "complete"


CONSENSUS = [  # graph, plain best alpha, heavy-ball best, gamma = 0.9 with alpha = 1 / L
    (Graph.ring(8), 23, 13, 130),
    (Graph.ring(16), 85, 24, 127),
    (Graph.ring(32), 262, 49, 125),
    (Graph.torus(4, 4), 14, 9, 125),
    (Graph.complete(16), 2, 2, 124),
]


@pytest.mark.parametrize(
    ("graph", "plain", "heavy_ball", "fixed"), CONSENSUS, ids=["ring8", "ring16", "ring32", "torus", "complete"]
)
def test_consensus_takes_the_expected_number_of_rounds(
    graph: Graph, plain: int, heavy_ball: int, fixed: int, draw: Draw
) -> None:
    """The expected step sizes are for D - A, which Lambda reaches with twice the alpha."""
    laplacian, top, bottom = graph.laplacian(), graph.lambda_max, graph.lambda_2
    start = draw(graph.n, 100)
    cases = [
        (best_heavy_ball(top, bottom), heavy_ball, 1, 70),
        (Tuning(1 / top, 0.9, math.sqrt(0.9)), fixed, 5, 150),
        (best_plain(top, bottom), plain, max(1, 0.15 * plain), 30 if plain < 30 else 350),
    ]
    for tuning, expected, tolerance, limit in cases:
        rounds = rounds_to_consensus(start, laplacian, tuning, limit)
        assert abs(rounds.median().item() - expected) <= tolerance, (tuning, rounds.median())
        assert rounds.min() <= expected <= rounds.max(), (tuning, rounds.min(), rounds.max())


def test_the_expected_alpha_is_for_twice_lambda(draw: Draw) -> None:
    graph, start = Graph.ring(8), draw(8, 50)
    own = rounds_to_consensus(start, graph.laplacian(), best_heavy_ball(graph.lambda_max, graph.lambda_2), 30)
    tuning = best_heavy_ball(2 * graph.lambda_max, 2 * graph.lambda_2)
    assert (round(tuning.alpha, 3), round(tuning.gamma, 3)) == (0.523, 0.199)
    assert torch.equal(own, rounds_to_consensus(start, graph.unit_laplacian(), tuning, 30))


def test_rounds_grow_as_kappa_without_and_as_its_root_with_acceleration(draw: Draw) -> None:
    kappas: list[float] = []
    plain: list[float] = []
    heavy: list[float] = []
    for n, limit in ((8, 40), (32, 350)):
        graph, start = Graph.ring(n), draw(n, 100)
        spectrum = (graph.lambda_max, graph.lambda_2)
        kappas.append(spectrum[0] / spectrum[1])
        for counts, tuning in ((plain, best_plain(*spectrum)), (heavy, best_heavy_ball(*spectrum))):
            rounds = rounds_to_consensus(start, graph.laplacian(), tuning, limit if counts is plain else 70)
            counts.append(rounds.double().mean().item())
    slope = [math.log(counts[-1] / counts[0]) / math.log(kappas[-1] / kappas[0]) for counts in (plain, heavy)]
    assert 0.85 < slope[0] < 1.05 and 0.4 < slope[1] < 0.6


MATCHINGS: list[tuple[Momentum, float, float, float]] = [
    ("pre", 1.0, 0.0, 17.8),
    ("pre", 1.0, 0.2, 21.7),
    ("pre", 0.5, 0.3, 21),
    ("pre", 0.25, 0.5, 28),
    ("post", 1.0, 0.3, 23),
    ("post", 0.5, 0.5, 21),
    ("post", 0.25, 0.5, 25),
]


@pytest.mark.parametrize(("momentum", "alpha", "gamma", "expected"), MATCHINGS)
def test_random_matchings_take_the_expected_number_of_rounds(
    momentum: Momentum, alpha: float, gamma: float, expected: float, draw: Draw
) -> None:
    """Mean over 10 sequences of matchings on 16 workers of the first round below 1e-3, within 10 %."""
    counts = []
    for seed in range(10):
        history = simulate_gossip(
            draw(16, 8), matchings(16, 50, seed), torch.zeros(50, 16, 8, dtype=F64),
            eta=1.0, alpha=alpha, gamma=gamma, momentum=momentum,
        )  # fmt: skip
        error = spread(history).norm(dim=1)
        assert error[-1] < 1e-3 * error[0]
        counts.append(int((error < 1e-3 * error[0]).int().argmax()))
    assert sum(counts) / 10 == pytest.approx(expected, rel=0.1)


@BOTH
def test_large_momentum_destroys_consensus_under_random_matchings(momentum: Momentum, draw: Draw) -> None:
    history = simulate_gossip(
        draw(16, 4), matchings(16, 200), torch.zeros(200, 16, 4, dtype=F64),
        eta=1.0, alpha=1.0, gamma=0.9, momentum=momentum,
    )  # fmt: skip
    assert spread(history)[-1].min() > 100 * spread(history)[0].max()


@pytest.mark.parametrize(("gamma", "expected"), [(0.3, 0.39), (0.7, 1.13)])
def test_disagreement_on_the_complete_graph_is_the_momentum_s(gamma: float, expected: float, draw: Draw) -> None:
    """Standard deviation over 16 workers under unit drift noise once steady: "pre" keeps some, "post" none."""
    laplacian = torch.eye(16, dtype=F64) - torch.full((16, 16), 1 / 16, dtype=F64)
    drifts, zero = draw(60, 16, 300), torch.zeros(16, 300, dtype=F64)
    pre = simulate_gossip(zero, laplacian, drifts, eta=1.0, alpha=1.0, gamma=gamma)
    post = simulate_gossip(zero, laplacian, drifts, eta=1.0, alpha=1.0, gamma=gamma, momentum="post")
    assert pre[-20:].var(1, unbiased=False).mean().sqrt().item() == pytest.approx(expected, rel=0.05)
    assert spread(post).max().item() < 1e-12


@BOTH
def test_complete_averaging_without_momentum_is_fedavg_bit_for_bit(momentum: Momentum) -> None:
    """alpha Lambda = I - J, eta = 1, gamma = 0; on small multiples of 1/8, where no order of summation rounds."""
    numbers = torch.Generator().manual_seed(3)
    theta0 = (torch.randint(-50, 50, (1, 20), generator=numbers) / 8).expand(8, -1)
    drifts = torch.randint(-50, 50, (3, 8, 20), generator=numbers) / 8
    graph = Graph.complete(8)
    history = simulate_gossip(theta0, graph.laplacian(), drifts, eta=1.0, alpha=2 / 8, gamma=0.0, momentum=momentum)
    average = theta0[0]
    for round, drift in enumerate(drifts):
        average = (average + drift).sum(0) / 8
        assert torch.equal(history[round + 1], average.expand(8, -1))
    assert torch.equal(graph.laplacian() * 2 / 8, torch.eye(8, dtype=F64) - 1 / 8)


def test_three_hypercube_matchings_with_post_momentum_are_diloco_for_every_worker(draw: Draw) -> None:
    """Pairing along each of the three dimensions in turn is the exact average of 8 workers."""
    identity = torch.eye(8, dtype=F64)
    mixing = identity
    for dimension in range(3):
        pairs = [(i, i ^ (1 << dimension)) for i in range(8)]
        mixing = (identity - Graph.from_pairs(8, pairs).laplacian()) @ mixing
    assert torch.equal(mixing, torch.full((8, 8), 1 / 8, dtype=F64))
    theta0, drifts = draw(1, 10).expand(8, -1), draw(15, 8, 10)
    history = simulate_gossip(theta0, identity - mixing, drifts, eta=0.7, alpha=1.0, gamma=0.9, momentum="post")
    diloco = torch_nesterov(theta0[0], drifts.mean(1), lr=0.7, gamma=0.9)
    assert (history - diloco[:, None]).abs().max().item() < 1e-12
    pre = simulate_gossip(theta0, identity - mixing, drifts, eta=0.7, alpha=1.0, gamma=0.9, momentum="pre")
    assert (pre.mean(1) - diloco).abs().max().item() < 1e-12 < 1e-2 < spread(pre)[-1].min().item()


@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_post_momentum_diverges_on_an_even_ring_with_alpha_one(n: int, gamma: float, draw: Draw) -> None:
    ring = Graph.ring(n)
    quiet = torch.zeros(150, n, 3, dtype=F64)
    history = {
        (momentum, alpha): spread(
            simulate_gossip(start, ring.laplacian(), quiet, eta=1.0, alpha=alpha, gamma=gamma, momentum=momentum)
        )
        for start in [draw(n, 3)]
        for momentum, alpha in (("pre", 1.0), ("post", 1.0), ("post", 0.6))
    }
    for (momentum, alpha), error in history.items():
        grows = bool(error[-1].min() > 100 * error[0].max())
        assert grows == (not stable(alpha, gamma, ring.lambda_max, momentum)) == ((momentum, alpha) == ("post", 1.0))


@BOTH
@pytest.mark.parametrize("gamma", [0.0, 0.4])
def test_either_side_of_the_stability_bound(momentum: Momentum, gamma: float, draw: Draw) -> None:
    graph = Graph.torus(3, 4)
    bound = 2 * (1 + gamma) / (1 if momentum == "pre" else 1 + 2 * gamma) / graph.lambda_max
    for alpha, shrinks in ((0.97 * bound, True), (1.03 * bound, False)):
        history = simulate_gossip(
            draw(12, 3), graph.laplacian(), torch.zeros(400, 12, 3, dtype=F64),
            eta=1.0, alpha=alpha, gamma=gamma, momentum=momentum,
        )  # fmt: skip
        error = spread(history)
        assert stable(alpha, gamma, graph.lambda_max, momentum) == shrinks
        assert bool((error[-1] < 0.1 * error[0]).all() if shrinks else (error[-1] > 10 * error[0]).all())


@BOTH
def test_an_edge_dropped_at_both_ends_keeps_the_mean_and_at_one_end_does_not(momentum: Momentum, draw: Draw) -> None:
    theta0, drifts = draw(1, 5).expand(6, -1), draw(8, 6, 5)
    expected = torch_nesterov(theta0[0], drifts.mean(1), lr=1.0, gamma=0.3)
    both = [Graph.from_pairs(6, random_matching(6, 1, t)[t % 2 :]).laplacian() for t in range(8)]
    one = [laplacian.clone() for laplacian in matchings(6, 8)]
    for laplacian in one:
        laplacian[0] = 0  # worker 0 drops its edge, its partner does not
    for laplacians, kept in ((both, True), (one, False)):
        history = simulate_gossip(theta0, laplacians, drifts, eta=1.0, alpha=1.0, gamma=0.3, momentum=momentum)
        error = (history.mean(1) - expected).abs().max().item()
        assert error < 1e-12 if kept else error > 1e-2
