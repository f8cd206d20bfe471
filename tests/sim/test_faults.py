"""Nodes are killed, come late, fall behind, are parted, lose their worker, are told to stop: nothing waits for ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from peerloom.protocol.errors import NoDonor, WorkerFailed
from tests.sim import stories
from tests.sim.swarm import TIMEOUT_S, Plan, Swarm, play, spec
from tests.sim.test_swarm import SLACK_S


def test_killed_node_resumes_and_nobody_waits_for_it() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(8)
        before = swarm.members[1].facts.round
        await swarm.kill(1)
        saved = swarm.members[1].disk.round
        assert 0 < saved <= before
        rounds = [swarm.members[i].facts.round for i in (0, 2, 3)]
        await asyncio.sleep(40)
        assert all(swarm.members[i].facts.round > r + 5 for i, r in zip((0, 2, 3), rounds, strict=True))
        swarm.start(1)
        await swarm.until("it trains", lambda: swarm.members[1].facts.state == "training", within_s=30)
        assert swarm.members[1].facts.tokens > 0
        first = swarm.members[1].rounds
        await swarm.until_round(swarm.members[0].facts.round + 8, 1)
        await swarm.drain()
        second_life = [line for line in first if line["life"] == 2]
        assert any(line["partner"] is not None for line in second_life)
        drawn = [(line["first_batch"], line["first_batch"] + line["batches"]) for line in first]
        assert all(end <= start for (_, end), (start, _) in zip(drawn, drawn[1:], strict=False)), "a batch was repeated"

    swarm = play(Plan(count=4, step_s=stories.uneven), scenario)
    assert swarm.longest_wait() <= TIMEOUT_S + SLACK_S


def test_restarted_within_the_skew_goes_on_from_its_saved_round() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(6)
        await swarm.kill(1)
        saved = swarm.members[1].disk.round
        swarm.start(1)
        await swarm.until_round(saved + 1, 1)
        second = next(line for line in swarm.members[1].rounds if line["life"] == 2)
        assert second["round"] == saved
        assert not swarm.members[1].adopted
        await swarm.drain()

    play(Plan(count=3, spec=spec(max_round_skew=50)), scenario)


def late(swarm: Swarm, joiner: int) -> None:
    for index in range(swarm.plan.count):
        if index != joiner:
            swarm.start(index)


def test_late_joiner_takes_over_a_donors_state() -> None:
    async def scenario(swarm: Swarm) -> None:
        late(swarm, 3)
        await swarm.until_round(10, 0, 1, 2)
        swarm.start(3)
        joiner = swarm.members[3]
        await swarm.until("it adopts", lambda: bool(joiner.adopted), within_s=30)
        taken = joiner.adopted[0]
        assert taken["round"] >= 9
        assert taken["loss"] == pytest.approx(taken["donor_loss"], rel=0.05)
        await swarm.until_round(taken["round"] + 5, 3)
        assert any(line["partner"] is not None for line in joiner.rounds)
        await swarm.drain()

    play(Plan(count=4, step_s=stories.uneven), scenario)


def test_donor_dies_midway_and_the_next_one_goes_on() -> None:
    async def scenario(swarm: Swarm) -> None:
        late(swarm, 3)
        await swarm.until_round(6, 0, 1, 2)
        joiner = swarm.members[3]
        for index in range(3):  # 256 bytes of state take 12 s
            swarm.hub.set_link(swarm.members[index].peer_id, joiner.peer_id, latency_s=0.02, bandwidth=40.0)
        swarm.start(3)
        await swarm.until("it fetches", lambda: joiner.facts.state == "fetching", within_s=30)
        await asyncio.sleep(3)
        open_to = {each.peers[1] for each in swarm.hub._connections if each.peers[0] == joiner.peer_id}
        asked = [member.index for member in swarm.members if member.peer_id in open_to]
        assert len(asked) == 1
        await swarm.kill(asked[0])
        await swarm.until("it adopts", lambda: bool(joiner.adopted), within_s=60)
        await swarm.drain()

    play(Plan(count=4), scenario)


def test_all_donors_gone() -> None:
    async def scenario(swarm: Swarm) -> None:
        late(swarm, 2)
        await swarm.until_round(6, 0, 1)
        joiner = swarm.members[2]
        for index in range(2):
            swarm.hub.set_link(swarm.members[index].peer_id, joiner.peer_id, latency_s=0.02, bandwidth=20.0)
        swarm.start(2)
        await asyncio.sleep(3)
        await swarm.kill(0)
        await swarm.kill(1)
        await swarm.until("it gives up", lambda: joiner.running is None, within_s=120)
        assert isinstance(joiner.failure, NoDonor)
        assert "no peer could hand over the model" in str(joiner.failure)
        assert joiner.rounds == []

    play(Plan(count=3), scenario)


def test_far_behind_fetches() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(20, 0, 1, 2)
        assert swarm.members[3].adopted
        await swarm.drain()

    def step_s(index: int) -> float:
        return 1.5 if index == 3 else 0.2

    swarm = play(Plan(count=4, step_s=step_s), scenario)
    assert all(line["round"] > 3 for line in swarm.members[3].adopted)


def test_two_halves_heal() -> None:
    left, right = range(5), range(5, 10)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(5)
        swarm.part(left, right)
        began = swarm.clock.monotonic()
        await asyncio.sleep(60)
        swarm.part(left, right, healed=True)
        healed = swarm.clock.monotonic()
        await asyncio.sleep(60)
        await swarm.drain()
        ids = {swarm.members[i].peer_id for i in right}

        def across(since: float, until: float) -> int:
            lines = [line for i in left for line in swarm.members[i].rounds if since < line["at"] <= until]
            return sum(line["partner"] in ids for line in lines)

        assert across(began + TIMEOUT_S, healed) == 0
        assert across(healed, healed + 60) > 5

    swarm = play(Plan(count=10, step_s=stories.uneven), scenario)
    assert swarm.spread() < 0.1
    assert swarm.longest_wait() <= TIMEOUT_S + SLACK_S


@pytest.mark.slow
def test_half_an_hour_of_kills_and_restarts() -> None:
    async def fate(swarm: Swarm, index: int, rng: random.Random) -> None:
        for _ in range(4):
            await asyncio.sleep(rng.uniform(10, 400))
            await swarm.kill(index)
            await asyncio.sleep(rng.uniform(0.5, 60))
            swarm.start(index)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        fates = [asyncio.create_task(fate(swarm, i, random.Random(f"fate {i}")), name=f"fate-{i}") for i in (1, 4, 7)]
        await asyncio.sleep(1800)
        await asyncio.gather(*fates)
        rounds = [member.facts.round for member in swarm.members]
        await asyncio.sleep(60)
        assert all(member.facts.round > before for member, before in zip(swarm.members, rounds, strict=True))
        await swarm.drain()
        assert all(member.failure is None for member in swarm.members)

    plan = Plan(count=10, spec=spec(match_timeout_s=20.0), step_s=lambda index: 8 * stories.uneven(index))
    swarm = play(plan, scenario)
    assert swarm.longest_wait() <= 20.0 + SLACK_S
    kills = sum(member.lives - 1 for member in swarm.members)
    assert kills == 12
    assert swarm.one_sided() <= swarm.total("gossip_in_doubt") + kills  # who is killed may have mixed unrecorded


def test_dead_worker_is_restarted_and_resumes() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(8)
        member = swarm.members[1]
        saved, at = member.disk.round, swarm.clock.monotonic()
        member.worker.die("killed by signal 9")
        await swarm.until("it notices", lambda: member.facts.state == "restarting", within_s=30)
        assert "killed by signal 9" in member.facts.reason
        await swarm.until("it trains", lambda: member.facts.state == "training", within_s=30)
        assert member.facts.round >= saved
        assert swarm.clock.monotonic() - at < 15
        assert member.count("worker_deaths") == 1
        await swarm.until_round(20)
        await swarm.drain()

    play(Plan(count=3, step_s=stories.uneven), scenario)


def test_worker_that_keeps_dying_ends_the_node() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(3)
        member = swarm.members[1]
        while member.running is not None:
            member.worker.die("CUDA error")
            await asyncio.sleep(0.2)
            assert swarm.clock.monotonic() < 600
        assert isinstance(member.failure, WorkerFailed)
        assert "6 times in a row" in str(member.failure) and "CUDA error" in str(member.failure)
        assert member.peer_id not in [record.peer_id for record in swarm.registry.live(swarm.plan.spec.run_id)]
        await swarm.drain()

    play(Plan(count=3), scenario)


@pytest.mark.parametrize("state", ["starting", "fetching", "training", "seeking", "exchanging", "restarting"])
def test_drain_in_every_state(state: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        late(swarm, 2)
        await swarm.until_round(6, 0, 1)
        member = swarm.members[2]
        for index in range(2):
            bandwidth = 20.0 if state == "fetching" else 400.0 if state == "exchanging" else None
            swarm.hub.set_link(swarm.members[index].peer_id, member.peer_id, latency_s=0.05, bandwidth=bandwidth)
        swarm.start(2)
        if state == "restarting":
            await swarm.until("it trains", lambda: len(member.rounds) > 2)
            member.worker.die()
        await swarm.until(state, lambda: member.facts.state == state, within_s=90, every_s=0.01)
        began, round = swarm.clock.monotonic(), member.facts.round
        await swarm.drain(2)
        assert swarm.clock.monotonic() - began <= 10.0
        assert member.failure is None
        assert member.disk.saves > 0 or state in ("starting", "fetching")
        if state in ("training", "seeking", "exchanging"):
            assert member.disk.round == round + 1
        assert member.peer_id not in [record.peer_id for record in swarm.registry.live(swarm.plan.spec.run_id)]
        await swarm.drain()

    play(Plan(count=3), scenario)


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_clock_jumps_by_an_hour(seconds: float) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(6)
        member = swarm.members[1]
        rounds = len(member.rounds)
        member.clock.jump(seconds)
        await asyncio.sleep(90)
        after = [line for line in member.rounds[rounds:]]
        assert len(after) > 10
        assert [line["round"] for line in after] == list(range(after[0]["round"], after[0]["round"] + len(after)))
        assert any(line["partner"] is not None for line in after[-10:])
        assert member.count("clock_jumps") == 1
        await swarm.drain()
        assert member.disk.round == member.facts.round

    play(Plan(count=4, step_s=stories.uneven), scenario)
