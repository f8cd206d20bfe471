"""GASLoC with neighbours that come one by one, with group averages, and in fragments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peerloom.optim.encode import decode, encode
from peerloom.optim.fragmented import FragmentedGASLoC
from peerloom.optim.gasloc import GASLoC, gossip_round
from peerloom.optim.groups import group_mean, schedule

NUMEL = 1000
MOMENTA = ("pre", "post")


def worker(start: Tensor, **changes: Any) -> GASLoC:
    settings: dict[str, Any] = {"eta": 0.7, "alpha": 1.0, "gamma": 0.3, "momentum": "pre"}
    return GASLoC(start.clone(), **{**settings, **changes})


def proposals(workers: list[GASLoC], drifts: Tensor) -> list[Tensor]:
    found = []
    for one, drift in zip(workers, drifts, strict=True):
        one.start_round()
        one._y.add_(drift)
        found.append(one.proposal())
    return found


@pytest.mark.parametrize("momentum", MOMENTA)
def test_neighbours_one_by_one_are_neighbours_at_once(momentum: str) -> None:
    start, others = torch.randn(NUMEL), [(weight, torch.randn(NUMEL)) for weight in (0.4, 1.0, 0.7)]
    one, other = (worker(start, momentum=momentum) for _ in range(2))
    for _ in range(3):
        proposals([one, other], torch.randn(NUMEL).expand(2, -1))
        for weight, y_j in others:
            one.take(weight, y_j)
        one.mix([])
        other.mix(others)
        assert torch.equal(one.theta, other.theta)
        assert torch.equal(one.previous, other.previous)


def test_what_was_taken_need_not_be_kept() -> None:
    one, other = (worker(torch.zeros(NUMEL)) for _ in range(2))
    inbox, theirs = torch.ones(NUMEL), torch.ones(NUMEL)
    proposals([one, other], torch.zeros(2, NUMEL))
    one.take(1.0, inbox)
    inbox.fill_(9.0)
    one.mix([])
    other.mix([(1.0, theirs)])
    assert torch.equal(one.theta, other.theta)


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("alpha", [1.0, 0.6])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_averages_in_turn_are_the_groups_mean_to_the_bit(size: int, alpha: float, momentum: str) -> None:
    torch.manual_seed(size)
    start = torch.randn(NUMEL)
    workers = [worker(start, alpha=alpha, momentum=momentum) for _ in range(size)]
    theta = previous = start.expand(size, -1)
    for _ in range(3):
        drifts = torch.randn(size, NUMEL)
        y = theta + 0.7 * torch.stack([(one._y + drift) - one._y for one, drift in zip(workers, drifts, strict=True)])
        proposals(workers, drifts)
        assert torch.equal(torch.stack([one._y for one in workers]), y)
        distance = size // 2
        while distance:
            sent = [one._y.clone() for one in workers]
            for place, one in enumerate(workers):
                assert one.average(sent[place ^ distance]) is one._y
            distance //= 2
        assert all(torch.equal(one._y, group_mean(y)[0]) for one in workers)
        for one in workers:
            one.mix([])
        mean = group_mean(y)
        mixed = y - alpha * (y - mean) if alpha != 1 else mean
        carried = y if momentum == "pre" else mixed
        theta, previous = mixed + 0.3 * (carried - previous), carried
        assert torch.equal(torch.stack([one.theta for one in workers]), theta)
        assert torch.equal(torch.stack([one.previous for one in workers]), previous)


def test_three_averages_of_eight_with_post_momentum_are_diloco() -> None:
    """All copies coincide and follow torch's Nesterov SGD on the mean drift (digest, (i))."""
    torch.manual_seed(3)
    start = torch.randn(NUMEL, dtype=torch.float32)
    workers = [worker(start, momentum="post", gamma=0.5, eta=1.0) for _ in range(8)]
    parameter = torch.nn.Parameter(start.clone())
    diloco = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, nesterov=True)
    for _ in range(6):
        drifts = 0.1 * torch.randn(8, NUMEL)
        proposals(workers, drifts)
        for distance in (4, 2, 1):
            sent = [one._y.clone() for one in workers]
            for place, one in enumerate(workers):
                one.average(sent[place ^ distance])
        for one in workers:
            one.mix([])
        parameter.grad = -drifts.mean(0)
        diloco.step()
        assert all(torch.equal(one.theta, workers[0].theta) for one in workers)
        assert torch.allclose(workers[0].theta, parameter.data, atol=1e-5)


def test_halves_that_come_back_are_the_same_mean() -> None:
    torch.manual_seed(8)
    start = torch.randn(NUMEL)
    whole, halves = ([worker(start, momentum="post") for _ in range(4)] for _ in range(2))
    drifts = torch.randn(4, NUMEL)
    for workers in (whole, halves):
        proposals(workers, drifts)
    for distance in (2, 1):
        sent = [one._y.clone() for one in whole]
        for place, one in enumerate(whole):
            one.average(sent[place ^ distance])
    plans = [schedule(4, place, NUMEL) for place in range(4)]
    for step in range(4):
        sent = [one._y.clone() for one in halves]
        for place, one in enumerate(halves):
            swap = plans[place][step]
            part = slice(swap.receive_start, swap.receive_stop)
            one.average(sent[swap.peer][part], part, replace=swap.phase == "share")
    for one, other in zip(whole, halves, strict=True):
        one.mix([])
        other.mix([])
        assert torch.equal(one.theta, other.theta)


def test_with_a_lossy_encoding_y_keeps_what_it_drops() -> None:
    torch.manual_seed(4)
    pair = [worker(torch.randn(NUMEL), gamma=0.0) for _ in range(2)]
    ys = torch.stack(proposals(pair, torch.zeros(2, NUMEL))).clone()
    sent = [decode(encode(y, "bf16"), "bf16") for y in ys]
    for place, one in enumerate(pair):
        x = one.average(sent[1 - place], own=sent[place])
        x.copy_(decode(encode(x, "bf16"), "bf16"))
    assert torch.equal(pair[0]._y, pair[1]._y)
    mean = pair[0]._y.clone()
    for one, y, own in zip(pair, ys, sent, strict=True):
        one.mix([])
        assert torch.equal(one.theta, y - (own - mean))
        assert not torch.equal(one.theta, mean)


def test_a_partner_lost_in_a_group_leaves_the_sum_as_it_was() -> None:
    torch.manual_seed(5)
    four = [worker(torch.randn(NUMEL), gamma=0.0) for _ in range(4)]
    ys = torch.stack(proposals(four, torch.zeros(4, NUMEL))).clone()
    for distance, lost in ((2, ()), (1, (2, 3))):
        sent = [one._y.clone() for one in four]
        for place, one in enumerate(four):
            if place not in lost:
                one.average(sent[place ^ distance])
    for one in four:
        one.mix([])
    assert torch.allclose(sum(one.theta for one in four), ys.sum(0), atol=1e-5)  # type: ignore[arg-type]
    assert torch.equal(four[0].theta, four[1].theta)


def test_terms_and_averages_do_not_go_together() -> None:
    one = worker(torch.zeros(8))
    with pytest.raises(RuntimeError, match="at the exchange"):
        one.take(1.0, torch.zeros(8))
    proposals([one], torch.zeros(1, 8))
    one.take(1.0, torch.zeros(8))
    with pytest.raises(RuntimeError, match=r"take\(\) has added"):
        one.average(torch.zeros(8))
    one.mix([])
    proposals([one], torch.zeros(1, 8))
    one.average(torch.zeros(8))
    with pytest.raises(RuntimeError, match=r"average\(\) has changed"):
        one.take(1.0, torch.zeros(8))
    with pytest.raises(RuntimeError, match=r"after average\(\)"):
        one.mix([(1.0, torch.zeros(8))])
    one.mix([])
    proposals([one], torch.zeros(1, 8))
    with pytest.raises(ValueError, match="weight is 0"):
        one.take(0.0, torch.zeros(8))


def fragmented(start: Tensor, count: int, momentum: Any = "post") -> FragmentedGASLoC:
    buffers = (torch.empty(NUMEL), torch.empty(NUMEL))
    return FragmentedGASLoC(
        start.clone(), count, eta=0.8, alpha=1.0, gamma=0.4, momentum=momentum, buffers=buffers, alignment=8
    )


def test_one_fragment_is_the_plain_method() -> None:
    start, theirs = torch.randn(NUMEL), torch.randn(NUMEL)
    plain, whole = worker(start, eta=0.8, gamma=0.4, momentum="post"), fragmented(start, 1)
    for round in range(4):
        drift = torch.randn(NUMEL)
        proposals([plain], drift[None])
        whole.start_round()
        whole._params.add_(drift)
        whole.propose(0)
        neighbors = [(1.0, theirs)] if round % 2 else []
        plain.mix(neighbors)
        whole.parts[0].mix(neighbors)
        whole.settled(0)
        assert torch.equal(whole.theta, plain.theta)
        assert torch.equal(whole.previous, plain.previous)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_a_fragments_drift_is_all_since_its_own_exchange(momentum: str) -> None:
    """Each fragment alone is plain GASLoC with the steps between its exchanges."""
    torch.manual_seed(6)
    method = fragmented(torch.randn(NUMEL), 4, momentum)
    theta, previous = method.theta.clone()[None], method.theta.clone()[None]
    state = [(theta[:, span], previous[:, span]) for span in method.slices]
    drifts = [torch.zeros(1, span.stop - span.start) for span in method.slices]
    lone = torch.zeros(1, 1)
    for _ in range(3):
        method.start_round()
        for fragment in range(4):
            step = 0.01 * torch.randn(NUMEL)
            method._params.add_(step)
            drifts = [drift + step[span] for drift, span in zip(drifts, method.slices, strict=True)]
            method.propose(fragment)
            method.parts[fragment].mix([])
            method.settled(fragment)
            state[fragment] = gossip_round(
                *state[fragment], lone, drifts[fragment], eta=0.8, alpha=1.0, gamma=0.4, momentum=momentum  # type: ignore[arg-type]
            )
            drifts[fragment] = torch.zeros_like(drifts[fragment])
            span = method.slices[fragment]
            assert torch.allclose(method.theta[span], state[fragment][0][0], atol=1e-6)
            assert torch.equal(method._params[span], method.theta[span])


def test_state_between_rounds_goes_on_as_if_nothing_had_been() -> None:
    torch.manual_seed(7)
    one, other = fragmented(torch.randn(NUMEL), 3), fragmented(torch.randn(NUMEL), 3)

    def play(method: FragmentedGASLoC, round: int) -> None:
        method.start_round()
        for fragment in range(3):
            method._params.add_(0.1 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(9 * round + fragment)))
            method.propose(fragment)
            method.parts[fragment].mix([])
            method.settled(fragment)

    play(one, 0)
    assert not torch.equal(one._params, one.theta)
    other.load_state_dict({k: v.clone() if isinstance(v, Tensor) else v for k, v in one.state_dict().items()})
    for round in (1, 2):
        play(one, round)
        play(other, round)
    assert torch.equal(one._params, other._params)
    assert torch.equal(one.theta, other.theta)
    assert torch.equal(one.previous, other.previous)
    other.adopt(one.theta)
    assert torch.equal(other._params, one.theta)
    play(other, 3)


def test_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the state's params has the shape \(5,\)"):
        method = fragmented(torch.randn(NUMEL), 2)
        method.load_state_dict({**method.state_dict(), "params": torch.zeros(5)})
