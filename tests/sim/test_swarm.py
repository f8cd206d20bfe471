"""A swarm trains together, the same way each time, and as the stacked reference says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peerloom.node.memory_worker import NUMEL, MemoryWorker
from peerloom.node.worker_seams import RoundFinished
from peerloom.optim.gasloc import simulate_gossip
from tests.sim import stories
from tests.sim.swarm import Plan, Swarm, play, spec

ROOT = Path(__file__).parents[2]
SLACK_S = 0.5  # latency of a few messages: the time in which bytes move is not waiting


def check_trained_together(swarm: Swarm, *, partners: int = 2, spread: float = 0.1) -> None:
    timeout_s = swarm.plan.spec.gasloc.match_timeout_s
    for member in swarm.members:
        losses = [line["held_out_loss"] for line in member.rounds]
        assert losses[-1] < 0.2 * losses[0]
        assert len({line["partner"] for line in member.rounds} - {None}) >= partners
        assert member.disk.round == member.facts.round
    assert swarm.spread() < spread
    assert swarm.one_sided() == swarm.total("gossip_in_doubt") == 0
    assert swarm.longest_wait() <= timeout_s + SLACK_S


@pytest.mark.slow
def test_fifty_nodes_of_uneven_speed_the_same_each_time() -> None:
    swarm = stories.rounds(50)
    check_trained_together(swarm)
    assert swarm.alone_share(0, 20) < 0.08
    assert swarm.alone_share(4, 20) < 0.01  # once all know each other
    short, again, other = (stories.rounds(50, rounds=3, seed=seed) for seed in (1, 1, 2))
    assert again.digest() == short.digest()
    assert again.text() == short.text() != other.text()


def test_nodes_of_one_speed_pair_too() -> None:
    swarm = stories.rounds(20, even=True)
    check_trained_together(swarm)
    assert swarm.alone_share(4, 20) < 0.05


def test_scheduled_nodes_of_one_speed() -> None:
    swarm = stories.rounds(20, even=True, pairing="scheduled", match_timeout_s=20.0)
    check_trained_together(swarm)
    assert swarm.alone_share(4, 20) < 0.05
    assert stories.rounds(20, even=True, pairing="scheduled", match_timeout_s=20.0).text() == swarm.text()


def test_scheduled_nodes_of_uneven_speed_keep_meeting() -> None:
    swarm = stories.rounds(6, pairing="scheduled", match_timeout_s=5.0, local_steps=8)
    check_trained_together(swarm)
    assert swarm.alone_share(4, 20) < 0.05  # 0.56 where one end alone offers, and the other learns nothing


def test_overlapped_exchanges_cost_little_time_and_train_as_well() -> None:
    blocking, overlapped = (
        stories.rounds(8, overlap=overlap, local_steps=8, match_timeout_s=5.0) for overlap in (False, True)
    )
    check_trained_together(overlapped)
    assert overlapped.alone_share(4, 20) < 0.05
    share = [swarm.total("exchange_seconds") / swarm.total("train_seconds") for swarm in (blocking, overlapped)]
    assert share[1] < 0.75 * share[0]  # 0.54 and 0.62 were seen: it hangs on who met whom


def test_overlapped_rounds_by_the_clock_seek_beneath_local_steps_and_outlive_a_kill() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(8)
        await swarm.kill(1)
        await swarm.until_round(12, 0, 2, 3, 4)
        swarm.start(1)
        await swarm.until_round(20)
        await swarm.drain()

    run = spec(overlap=True, round_s=2.0)
    swarm = play(Plan(count=5, spec=run, step_s=stories.uneven, latency_s=0.1), scenario)
    check_trained_together(swarm)
    late = [line for member in swarm.members for line in member.rounds if line["round"] >= 2 and line["partner"]]
    waited = sorted(line["exchange_s"] for line in late)
    assert waited[len(waited) * 3 // 4] == 0.0  # the transfer, 0.5 s, is over before its quarter and what is spare


def test_rounds_by_the_clock_train_on_until_a_partner_is_there() -> None:
    swarm = stories.rounds(6, round_s=3.0, match_timeout_s=10.0, max_round_skew=8)
    check_trained_together(swarm)
    assert swarm.alone_share(4, 20) < 0.05
    waited = swarm.total("exchange_seconds") / swarm.total("train_seconds")
    assert waited < 0.1  # 0.05, of which most is the partner's step under way; 0.2 where the steps end first


def test_two_fast_nodes_of_eight_go_on_meeting_the_others() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(60)
        await swarm.drain()

    plan = Plan(count=8, spec=spec(), step_s=lambda index: 0.1 if index < 2 else 0.2)
    swarm = play(plan, scenario)
    fast = {member.peer_id for member in swarm.members[:2]}
    late = [line["partner"] for member in swarm.members[:2] for line in member.rounds if line["round"] >= 60]
    assert len(late) > 60  # far more rounds than the others: by their own round alone they would meet no one else
    assert sum(partner is not None and partner not in fast for partner in late) > len(late) / 4


def test_bf16() -> None:
    swarm = stories.rounds(20, encoding="bf16")
    check_trained_together(swarm)
    assert stories.rounds(20, encoding="bf16").text() == swarm.text()


@pytest.mark.slow
def test_the_log_does_not_hang_on_the_order_of_sets() -> None:
    digests = set()
    for hash_seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.sim.stories"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        digests.add(done.stdout.strip())
    assert digests == {stories.troubled().digest()}


class Recorder(MemoryWorker):
    """Keeps the drift of each round and the theta after it."""

    made: list[Recorder] = []

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.drifts: list[torch.Tensor] = []
        self.thetas: list[torch.Tensor] = []
        Recorder.made.append(self)

    def _propose(self) -> None:
        self.thetas.append(self._theta.clone())
        self.drifts.append(self._params - self._theta)
        super()._propose()

    async def finish(self, mix: bool) -> RoundFinished:
        finished = await super().finish(mix)
        self._last = self._theta.clone()
        return finished


@pytest.mark.parametrize("momentum", ["pre", "post"])
def test_two_nodes_give_what_the_reference_gives_bit_for_bit(momentum: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(12)
        await swarm.drain()

    run = spec(momentum=momentum, max_round_skew=0)
    Recorder.made = []
    swarm = play(Plan(count=2, spec=run, worker=Recorder, step_s=stories.uneven), scenario)
    both = [swarm.members[0].worker, swarm.members[1].worker]
    assert all(isinstance(worker, Recorder) for worker in both)
    together = [line["partner"] is not None for line in swarm.members[0].rounds]
    assert together == [line["partner"] is not None for line in swarm.members[1].rounds][: len(together)]
    count = min(len(worker.drifts) for worker in Recorder.made)
    assert sum(together[:count]) >= 8
    pair = 0.5 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    laplacians = [pair if edge else torch.zeros(2, 2) for edge in together[:count]]
    drifts = [torch.stack([worker.drifts[r] for worker in Recorder.made]) for r in range(count)]
    theta0 = torch.stack([worker.thetas[0] for worker in Recorder.made])
    gasloc = run.gasloc
    history = simulate_gossip(
        theta0, laplacians, drifts, eta=gasloc.eta, alpha=gasloc.alpha, gamma=gasloc.gamma, momentum=gasloc.momentum
    )
    assert history.shape == (count + 1, 2, NUMEL)
    for r in range(count):
        for i, worker in enumerate(Recorder.made):
            assert torch.equal(history[r, i], worker.thetas[r]), f"round {r}, node {i}"


def test_rounds_longer_than_the_timeout_meet_all_the_same() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(12)
        await swarm.drain()

    plan = Plan(
        count=2,
        spec=spec(1, match_timeout_s=4.0),
        step_s=lambda index: 40.0 / spec(1).gasloc.local_steps,
        start_s=lambda index: 20.0 * index,
    )
    swarm = play(plan, scenario)
    assert swarm.total("gossip_cut_short") >= 1
    assert swarm.alone_share(3, 12) < 0.1
    assert swarm.longest_wait() <= 4.0 + SLACK_S
