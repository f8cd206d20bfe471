"""Topologies, groups and fragments live: a whole swarm of nodes computes what the stacked reference computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from peerloom.node.memory_worker import MemoryWorker
from peerloom.optim.gasloc import gossip_round
from peerloom.optim.groups import group_mean
from peerloom.protocol import graphs, plan
from peerloom.protocol.graphs import Leg
from peerloom.protocol.spec_gasloc import GaslocSpec
from tests.sim import stories
from tests.sim.swarm import STEP_S, Member, Plan, Swarm, play, spec

ROUNDS = 6  # compared, from the first that all nodes are in with one view


class Recorder(MemoryWorker):
    """Keeps what stands at each exchange point: theta, previous, drift of the fragment."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def _propose(self) -> None:
        fragment, method = self._exchanges.fragment, self._method
        part = method.slices[fragment]
        theta, params = method.theta[part].clone(), self._params[part]
        self.seen[self._round, fragment] = (theta, method.previous[part].clone(), params - theta)
        super()._propose()


def swarm_of(count: int, rounds: int, **gasloc: Any) -> Swarm:
    """`count` nodes of uneven speed, until each has finished `rounds` rounds."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(rounds)
        await swarm.drain()

    run = spec(clip_radius=0.0, **gasloc)
    return play(Plan(count=count, spec=run, worker=Recorder, step_s=stories.uneven), scenario)


def in_order(swarm: Swarm) -> list[Member]:
    """The members as the topology counts them."""
    return sorted(swarm.members, key=lambda member: member.peer_id)


def met(member: Member, round: int) -> list[str]:
    """Whom a node met in a round, turn by turn; "-" for nobody."""
    (line,) = [line for line in member.rounds if line["round"] == round]
    return line["met"].split() if "met" in line else [line["partner"] or "-"]


def expected(members: Sequence[Member], index: int, legs: Sequence[Leg]) -> list[str]:
    """Whom the plan gives a node, leg by leg."""
    partners = []
    for leg in legs:
        ends = [i + j - index for i, j, _ in leg if index in (i, j)]
        partners.append(members[ends[0]].peer_id if ends else "-")
    return partners


def plans(swarm: Swarm, round: int, fragment: int) -> tuple[Leg, ...]:
    run = swarm.plan.spec
    return plan.legs(run.gasloc, run.seed, round, fragment, swarm.plan.count)


def together_from(swarm: Swarm) -> int:
    """The first of ROUNDS rounds in which every node met all that the plan gives it."""
    members, gasloc = in_order(swarm), swarm.plan.spec.gasloc
    last = min(line["round"] for member in members for line in member.rounds[-1:])
    for first in range(last - ROUNDS):
        if all(
            met(member, round)
            == [who for f in range(gasloc.fragments) for who in expected(members, i, plans(swarm, round, f))]
            for i, member in enumerate(members)
            for round in range(first, first + ROUNDS)
        ):
            return first
    raise AssertionError("the nodes never met as planned: " + "; ".join(str(met(m, last - 1)) for m in members))


def stacked(swarm: Swarm, round: int, fragment: int) -> tuple[Tensor, ...]:
    rows = [member.worker.seen[round, fragment] for member in in_order(swarm)]  # type: ignore[attr-defined]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def in_leg_order(theta: Tensor, previous: Tensor, drift: Tensor, legs: Sequence[Leg], gasloc: GaslocSpec) -> Any:
    """`gossip_round` with the terms added up as the legs come."""
    y = theta + gasloc.eta * drift
    terms: list[Tensor | None] = [None] * len(y)
    for i, j, weight in (edge for leg in legs for edge in leg):
        for me, other in ((i, j), (j, i)):
            part, so_far = (weight / 2) * (y[me] - y[other]), terms[me]
            terms[me] = part if so_far is None else so_far + part
    mixed = torch.stack([row if s is None else row - gasloc.alpha * s for row, s in zip(y, terms, strict=True)])
    carried = y if gasloc.momentum == "pre" else mixed
    return mixed + gasloc.gamma * (carried - previous), carried


def laplacian(n: int, legs: Sequence[Leg]) -> Tensor:
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for i, j, weight in (edge for leg in legs for edge in leg):
        matrix[i, j] -= weight / 2
        matrix[j, i] -= weight / 2
        matrix[i, i] += weight / 2
        matrix[j, j] += weight / 2
    return matrix


@pytest.mark.parametrize(
    ("count", "gasloc"),
    [
        (8, {"pairing": "ring", "alpha": 0.9}),
        (4, {"pairing": "complete"}),
        (8, {"pairing": "hypercube"}),
        (6, {"pairing": "base"}),
        (5, {"pairing": "exponential"}),
        (7, {"pairing": "two_peer"}),
        (8, {"pairing": "regular", "degree": 3, "alpha": 0.7}),
        (6, {"pairing": "scheduled", "fragments": 3}),
        (8, {"pairing": "ring", "alpha": 0.9, "fragments": 4}),
        (16, {"pairing": "torus", "alpha": 0.7}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(map(str, value.values())),
)
@pytest.mark.parametrize("momentum", ["pre", "post"])
def test_a_swarm_is_the_stacked_reference(count: int, gasloc: dict[str, Any], momentum: str) -> None:
    """To the bit where the terms add up as the legs come (so for 2 neighbours in any order), else to 1e-6."""
    swarm = swarm_of(count, 14, momentum=momentum, gamma=0.3, **gasloc)
    run, first = swarm.plan.spec.gasloc, together_from(swarm)
    for fragment in range(run.fragments):
        theta, previous, _ = stacked(swarm, first, fragment)
        for round in range(first, first + ROUNDS):
            drift, legs = stacked(swarm, round, fragment)[2], plans(swarm, round, fragment)
            close, _ = gossip_round(
                theta,
                previous,
                laplacian(count, legs),
                drift,
                eta=run.eta,
                alpha=run.alpha,
                gamma=run.gamma,
                momentum=run.momentum,
            )
            theta, previous = in_leg_order(theta, previous, drift, legs, run)
            if len(legs) <= 2:
                assert torch.equal(close, theta)
            assert torch.allclose(close, theta, atol=1e-6, rtol=1e-6)
            if round + 1 < first + ROUNDS:
                after = stacked(swarm, round + 1, fragment)
                assert torch.equal(after[0], theta), f"theta differs after round {round}, fragment {fragment}"
                assert torch.equal(after[1], previous)


@pytest.mark.parametrize("momentum", ["pre", "post"])
@pytest.mark.parametrize(("pairing", "alpha"), [("hypercube", 1.0), ("scheduled", 1.0), ("scheduled", 0.75)])
def test_groups_of_four_in_four_fragments_take_their_exact_mean(pairing: str, alpha: float, momentum: str) -> None:
    """To the bit: a group's mean is a balanced tree of additions, the same for all its members."""
    swarm = swarm_of(8, 14, pairing=pairing, alpha=alpha, group_size=4, fragments=4, gamma=0.3, momentum=momentum)
    run, seed, first = swarm.plan.spec.gasloc, swarm.plan.spec.seed, together_from(swarm)
    for fragment in range(4):
        theta, previous, _ = stacked(swarm, first, fragment)
        for round in range(first, first + ROUNDS - 1):
            y = theta + run.eta * stacked(swarm, round, fragment)[2]
            if pairing == "hypercube":
                groups = graphs.hypercube_groups(8, 4, round + fragment)
            else:
                groups = graphs.random_groups(8, 4, seed, round * 4 + fragment)
            mean = y.clone()
            for group in groups:
                mean[list(group)] = group_mean(y[list(group)])
            mixed = mean if alpha == 1 else y - alpha * (y - mean)
            carried = y if momentum == "pre" else mixed
            theta, previous = mixed + run.gamma * (carried - previous), carried
            after = stacked(swarm, round + 1, fragment)
            assert torch.equal(after[0], theta), f"theta differs after round {round}, fragment {fragment}"
            assert torch.equal(after[1], previous)


@pytest.mark.parametrize("fragments", [2, 5])
def test_two_nodes_half_a_round_apart_come_to_one_fragment(fragments: int) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(8)
        await swarm.drain()

    plan = Plan(count=2, spec=spec(fragments=fragments), start_s=lambda index: 1.1 * index)
    swarm = play(plan, scenario)
    assert swarm.total("gossip_committed") >= 2 * 6 * fragments


def test_by_the_clock_a_slow_node_comes_to_every_fragment_with_the_others() -> None:
    """Its steps take nearly half a round, with four fragments in it, and it meets all that the plan names."""
    run = spec(clip_radius=0.0, pairing="scheduled", group_size=4, fragments=4, round_s=2.0, gamma=0.3)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(10)
        await swarm.drain()

    swarm = play(Plan(count=4, spec=run, worker=Recorder, step_s=lambda i: 0.9 if i == 3 else STEP_S), scenario)
    first = together_from(swarm)
    lines = {m.index: [line for line in m.rounds if first <= line["round"] < first + ROUNDS] for m in swarm.members}
    assert all(line["batches"] == 2 for line in lines[3])
    assert all(8 <= line["batches"] <= 14 for index in range(3) for line in lines[index])
    assert not any(member.adopted for member in swarm.members)


@pytest.mark.parametrize(
    "gasloc",
    [
        {"pairing": "ring", "alpha": 0.9},
        {"pairing": "hypercube", "group_size": 4, "fragments": 2},
        {"pairing": "rendezvous", "fragments": 2},
        {"pairing": "base", "encoding": "bf16"},
    ],
    ids=lambda gasloc: "-".join(map(str, gasloc.values())),
)
def test_a_node_killed_in_a_round_costs_the_others_only_its_edges(gasloc: dict[str, Any]) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(6)
        others = [index for index in range(8) if index != 3]
        await swarm.until("an exchange", lambda: swarm.members[3].facts.state == "exchanging", every_s=0.01)
        await swarm.kill(3)
        await swarm.until_round(16, *others)
        swarm.start(3)
        await swarm.until_round(22)
        await swarm.drain()

    swarm = play(Plan(count=8, spec=spec(**gasloc), step_s=stories.uneven), scenario)
    others = [member for member in swarm.members if member.index != 3]
    assert swarm.longest_wait() <= swarm.plan.spec.gasloc.match_timeout_s * 4
    for member in others:  # a slow one may have fetched its way past some
        rounds = [line["round"] for line in member.rounds]
        assert rounds == sorted(set(rounds))
        assert gasloc["pairing"] == "rendezvous" or rounds == list(range(len(rounds)))
    lost = sum(member.count("gossip_alone") for member in others)
    assert lost <= 0.35 * sum(member.count("gossip_committed") for member in others)
    assert swarm.spread() < 0.5
