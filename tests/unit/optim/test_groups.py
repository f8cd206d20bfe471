"""Groups: schedules of halving and doubling, who is in one, and the exact mean in a GASLoC round."""

from __future__ import annotations

import pytest
import torch

from peerloom.optim.gasloc import GASLoC
from peerloom.optim.groups import (
    Swap,
    copies_sent,
    group_mean,
    hypercube_groups,
    mixing_matrix,
    random_groups,
    schedule,
)

from .conftest import Draw

F64 = torch.float64


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [0, 3, 64, 1003])
def test_all_members_hold_the_same_bits_of_the_mean(size: int, numel: int, draw: Draw) -> None:
    stacked = draw(size, numel, dtype=torch.float32)
    kept = stacked.clone()
    means = group_mean(stacked)
    assert torch.equal(stacked, kept)
    assert all(torch.equal(means[0], row) for row in means)
    torch.testing.assert_close(means[0].double(), stacked.double().mean(0), atol=1e-6, rtol=0)


def test_the_order_of_summation_is_a_balanced_tree(draw: Draw) -> None:
    """Pairs four apart, then two, then one: the documented order, bit for bit."""
    x = draw(8, 500, dtype=torch.float32)
    fours = x[:4] + x[4:]
    twos = fours[:2] + fours[2:]
    assert torch.equal(group_mean(x)[0], (twos[0] + twos[1]) / 8)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_both_ends_of_a_step_list_it_alike_and_the_copies_are_as_said(size: int) -> None:
    numel = 1000
    plans = [schedule(size, member, numel) for member in range(size)]
    for member, plan in enumerate(plans):
        for step, swap in enumerate(plan):
            other = plans[swap.peer][step]
            assert other.peer == member and other.phase == swap.phase
            assert (other.send_start, other.send_stop) == (swap.receive_start, swap.receive_stop)
        sent = sum(swap.send_stop - swap.send_start for swap in plan)
        assert sent / numel == pytest.approx(copies_sent(size), abs=0.01)
    assert [copies_sent(g) for g in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]


def test_the_schedule_of_a_pair_and_of_four_stay_as_they_are() -> None:
    assert schedule(2, 1, 10) == [Swap("reduce", 0, 0, 5, 5, 10), Swap("share", 0, 5, 10, 0, 5)]
    assert schedule(4, 1, 8) == [
        Swap("reduce", 3, 4, 8, 0, 4), Swap("reduce", 0, 0, 2, 2, 4),
        Swap("share", 0, 2, 4, 0, 2), Swap("share", 3, 0, 4, 4, 8),
    ]  # fmt: skip
    assert schedule(1, 0, 8) == []


@pytest.mark.parametrize(("n", "size"), [(2, 2), (8, 2), (8, 4), (16, 4), (16, 8), (8, 8)])
def test_rotating_dimensions_average_exactly(n: int, size: int) -> None:
    dimensions, m = n.bit_length() - 1, size.bit_length() - 1
    for start in range(dimensions):
        total = torch.eye(n, dtype=F64)
        for t in range(-(-dimensions // m)):
            groups = hypercube_groups(n, size, start + t)
            assert sorted(i for group in groups for i in group) == list(range(n))
            assert all(len(group) == size for group in groups)
            total = mixing_matrix(n, groups) @ total
        assert (total - 1 / n).abs().max().item() < 1e-15
    assert hypercube_groups(8, 4, 1) == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize("n", [0, 1, 4, 7, 16, 23])
def test_random_groups_take_everybody_once_in_powers_of_two(n: int) -> None:
    for round in range(10):
        groups = random_groups(n, 4, seed=5, round=round)
        assert sorted(i for group in groups for i in group) == list(range(n))
        sizes = sorted((len(group) for group in groups), reverse=True)
        assert sizes == [4] * (n // 4) + [2] * (n % 4 // 2) + [1] * (n % 2)
    if n >= 7:
        assert random_groups(n, 4, 5, 0) != random_groups(n, 4, 5, 1) != random_groups(n, 4, 6, 1)
        companions = {group for t in range(40) for group in random_groups(n, 4, 5, t) if 0 in group}
        assert len(companions) > 10


def test_random_groups_stay_as_they_are() -> None:
    assert random_groups(8, 4, seed=1, round=0) == PINNED


PINNED = [(0, 2, 4, 5), (1, 3, 6, 7)]


@pytest.mark.parametrize("momentum", ["pre", "post"])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_mixing_with_the_mean_is_mixing_with_all_the_others(momentum: str, alpha: float, draw: Draw) -> None:
    start, steps = draw(4, 300, dtype=torch.float32), draw(3, 4, 300, dtype=torch.float32)
    by_mean, by_peers = start.clone(), start.clone()
    workers = [
        [GASLoC(row, eta=0.8, alpha=alpha, gamma=0.4, momentum=momentum) for row in rows]  # type: ignore[arg-type]
        for rows in (by_mean, by_peers)
    ]
    for step in steps:
        proposals = []
        for rows, group in zip((by_mean, by_peers), workers, strict=True):
            for worker in group:
                worker.start_round()
            rows += step
            proposals.append(torch.stack([worker.proposal() for worker in group]))
        for i, (one, other) in enumerate(zip(*workers, strict=True)):
            one.mix_mean(group_mean(proposals[0])[i])
            other.mix([(2 / 4, proposals[1][j]) for j in range(4) if j != i])
        torch.testing.assert_close(by_mean, by_peers, atol=2e-6, rtol=0)
    if momentum == "post" and alpha == 1:
        previous = torch.stack([worker.previous for worker in workers[0]])
        assert all(torch.equal(previous[0], row) for row in previous)


def test_the_mean_of_decoded_proposals_moves_by_their_difference(draw: Draw) -> None:
    """With `own` the term is own - mean, as the peers saw it, and y keeps its bits."""
    params, mean, own = draw(3, 50, dtype=torch.float32)
    worker = GASLoC(params, eta=1.0, alpha=1.0, gamma=0.0)
    worker.start_round()
    y = worker.proposal().clone()
    worker.mix_mean(mean.bfloat16(), own)
    assert torch.equal(params, y - (own - mean.bfloat16().float()))
    with pytest.raises(RuntimeError, match="mix_mean"):
        worker.mix_mean(mean)


def test_refusals() -> None:
    cases = [
        (lambda: schedule(3, 0, 10), "power of 2, got 3"),
        (lambda: schedule(4, 4, 10), "places 0 to 3"),
        (lambda: hypercube_groups(12, 4, 0), "power of 2 of nodes, at least the group's 4, got 12"),
        (lambda: hypercube_groups(2, 4, 0), "got 2"),
        (lambda: random_groups(-1, 4, 0, 0), "n >= 0, got -1"),
        (lambda: copies_sent(0), "power of 2, got 0"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
