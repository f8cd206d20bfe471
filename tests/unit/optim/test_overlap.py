"""Overlap: the blocking form where nothing is late, the stacked reference where something is, the bound, the modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peerloom.optim.gasloc import GASLoC, Momentum
from peerloom.optim.overlap import OverlappedGASLoC, simulate_overlap
from peerloom.optim.topology import Graph, random_matching

from .conftest import Draw

F64 = torch.float64
H, N, D = 4, 4, 37
BOTH = pytest.mark.parametrize("momentum", ["pre", "post"])


def pull(target: Tensor, share: float) -> Callable[[Tensor], Tensor]:
    """A local step that goes `share` of the way to each worker's target."""
    return lambda params: params + share * (target - params)


@BOTH
@pytest.mark.parametrize("late", [0, 1, H])
def test_workers_give_what_the_reference_gives_bit_for_bit(draw: Draw, momentum: Momentum, late: int) -> None:
    theta0, targets = draw(D, dtype=torch.float32).repeat(N, 1), draw(N, D, dtype=torch.float32)
    pairs = [random_matching(N, 1, t) for t in range(5)]
    laplacians = [Graph.from_pairs(N, matching).laplacian() for matching in pairs]
    outer: dict[str, Any] = {"eta": 0.9, "alpha": 0.8, "gamma": 0.3, "momentum": momentum}
    expected = simulate_overlap(theta0, laplacians, pull(targets, 0.1), local_steps=H, late=late, **outer)
    params = [row.clone() for row in theta0]
    workers = [OverlappedGASLoC(p, torch.empty(D), **outer) for p in params]

    def train(steps: int) -> None:
        for p, target in zip(params, targets, strict=True):
            for _ in range(steps):
                p.copy_(pull(target, 0.1)(p))

    train(late)
    for t, matching in enumerate(pairs):
        train(H - late)
        for worker in workers:
            worker.start_round()
        sent = [worker.proposal().clone() for worker in workers]
        train(late)
        for i, j in matching:
            workers[i].mix([(1.0, sent[j])])
            workers[j].mix([(1.0, sent[i])])
        assert torch.equal(torch.stack([worker.theta for worker in workers]), expected[t + 1])


@BOTH
def test_mixed_at_once_it_is_the_blocking_form_to_the_bit(draw: Draw, momentum: Momentum) -> None:
    outer: dict[str, Any] = {"eta": 0.7, "alpha": 1.0, "gamma": 0.2, "momentum": momentum}
    blocking, live = (draw(D, dtype=torch.float32).clone() for _ in range(2))
    live.copy_(blocking)
    one, other = GASLoC(blocking, **outer), OverlappedGASLoC(live, torch.empty(D), **outer)
    for _ in range(3):
        step, peer = draw(D, dtype=torch.float32), draw(D, dtype=torch.float32)
        for worker, params in ((one, blocking), (other, live)):
            worker.start_round()
            params.add_(step)
            worker.proposal()
            worker.average(peer) if momentum == "post" else worker.take(1.0, peer)
            worker.mix([])
        assert torch.equal(live, blocking) and torch.equal(one.previous, other.previous)
    other.adopt(torch.ones(D))
    assert torch.equal(live, torch.ones(D))


def spread(alpha: float, gamma: float, momentum: Momentum, eta: float, late: int, share: float, rounds: int) -> float:
    """How far a pair without noise is apart in the end, of what it was; its steps go back to one shared optimum."""
    start = torch.tensor([[1.0], [-1.0]], dtype=F64)
    pair = Graph.from_pairs(2, [(0, 1)]).laplacian()
    back = pull(torch.zeros(2, 1, dtype=F64), 1 - (1 - share) ** (1 / H))
    outer: dict[str, Any] = {"eta": eta, "alpha": alpha, "gamma": gamma, "momentum": momentum}
    history = simulate_overlap(start, [pair] * rounds, back, local_steps=H, late=late, **outer)
    return float((history[-2:, 0] - history[-2:, 1]).abs().max() / 2)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.7])
@BOTH
def test_a_pair_loses_consensus_at_the_bound_and_not_before(momentum: Momentum, gamma: float) -> None:
    eta, c = 0.8, 0.999  # of a disagreement, the local steps of a round undo almost all
    bound = (2 * (1 + gamma) - eta * c) / (1.0 if momentum == "pre" else 1 + 2 * gamma)
    assert spread(0.97 * bound, gamma, momentum, eta, H, c, 400) < 1e-2
    assert spread(1.03 * bound, gamma, momentum, eta, H, c, 400) > 1e2
    blocking = 2 * (1 + gamma) / (1.0 if momentum == "pre" else 1 + 2 * gamma)
    assert spread(0.97 * blocking, gamma, momentum, eta, H, 1e-9, 400) < 1e-2  # nothing is lost where steps pull little


def test_where_a_whole_round_late_diverges_this_does_not() -> None:
    roots = torch.linalg.eigvals(torch.tensor([[1.0, -0.7, -0.3], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=F64))
    assert float(roots.abs().max()) > 1.01  # z^3 - z^2 + (alpha l - gamma) z + gamma at alpha l = 1, gamma = 0.3
    for momentum in ("pre", "post"):
        assert spread(1.0, 0.3, momentum, 1.0, H, 0.5, 100) < 1e-6


def test_refusals(draw: Draw) -> None:
    with pytest.raises(ValueError, match="y must be flat float32"):
        OverlappedGASLoC(torch.zeros(4), torch.zeros(5), eta=1.0, alpha=1.0, gamma=0.0)
    with pytest.raises(ValueError, match="late is from 0 to local_steps = 4, not 5"):
        simulate_overlap(torch.zeros(2, 1), [], lambda p: p, local_steps=4, late=5, eta=1.0, alpha=1.0, gamma=0.0)
