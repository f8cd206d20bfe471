"""Whole pipelines in virtual time: stages find their hosts, die, are taken over, and no microbatch counts twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from peerloom.node.memory_stage_worker import MemoryStageWorker
from peerloom.node.worker import messages
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.runspec import DataSpec, ModelSpec, RunSpec, TrainSpec
from peerloom.protocol.spec_pipeline import PipelineSpec
from tests.sim.swarm import Member, Plan, Swarm, identity, play

STAGES = 4


def pipeline_spec(**keys: Any) -> RunSpec:
    table = {"stages": STAGES, "backup_every": 10, "eval_every": 20, **keys}
    return RunSpec(
        method="pipeline",
        model=ModelSpec(layers=STAGES),
        data=DataSpec(sequence_length=512),
        train=TrainSpec(batch_size=4, eval_batches=2),
        pipeline=PipelineSpec(**table),
    )


def plan(home: Path, count: int = STAGES, **keys: Any) -> Plan:
    return Plan(
        count=count, spec=pipeline_spec(**keys), worker=MemoryStageWorker, step_s=lambda index: 0.1, home=home,
        checkpoint_every_s=1e6,
    )  # fmt: skip


def host(swarm: Swarm, stage: int) -> Member:
    """The one node that hosts a stage."""
    (found,) = [
        member
        for member in swarm.members
        if member.running is not None and (member.facts.stage, member.facts.stage_role) == (stage, "hosts")
    ]
    return found


def updates(swarm: Swarm, stage: int) -> int:
    return host(swarm, stage).facts.step


def hosted(swarm: Swarm) -> set[int]:
    return {m.facts.stage for m in swarm.members if m.running is not None and m.facts.stage_role == "hosts"}


async def until_update(swarm: Swarm, update: int, within_s: float = 120.0) -> None:
    def reached() -> bool:
        return hosted(swarm) == set(range(STAGES)) and updates(swarm, 0) >= update

    await swarm.until(f"update {update}", reached, within_s=within_s)


def trained(member: Member) -> list[Counter[Microbatch]]:
    """What each life of a node's worker trained on."""
    return [worker.trained for worker in member.workers if isinstance(worker, MemoryStageWorker)]


def test_four_nodes_take_a_stage_each_and_train_with_the_delays_of_the_paper(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await until_update(swarm, 60)
        for stage in range(STAGES):
            member = host(swarm, stage)
            (worker,) = member.workers
            assert isinstance(worker, MemoryStageWorker)
            assert worker.versions == [(u, max(0, u - (STAGES - 1 - stage))) for u, _ in worker.versions]
            assert [u for u, _ in worker.versions] == list(range(len(worker.versions)))
            assert set(worker.trained.values()) == {1}
            assert member.facts.loss is not None and member.facts.state == "training"
        await swarm.drain()

    play(plan(tmp_path), scenario)


def test_a_killed_stage_is_taken_over_by_its_standby_with_its_copy(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await until_update(swarm, 40)
        standby = next(m for m in swarm.members if m.facts.stage_role == "stands_by")
        stage = standby.facts.stage
        victim = host(swarm, stage)
        before = victim.facts.step
        died_at = swarm.clock.monotonic()
        await swarm.kill(victim.index)
        await swarm.until("it is hosted again", lambda: stage in hosted(swarm), within_s=15.0)
        assert host(swarm, stage) is standby
        await until_update(swarm, before + 5, within_s=15.0)
        assert swarm.clock.monotonic() - died_at < 15.0
        await until_update(swarm, before + 60)
        assert standby.count("stage_copies_kept") > 0
        resumed = standby.workers[-1]
        assert isinstance(resumed, MemoryStageWorker) and min(u for u, _ in resumed.versions) >= before - 15
        for member in swarm.members:
            for life in trained(member):
                assert set(life.values()) <= {1}, "a microbatch counted twice"
        await swarm.drain(*(m.index for m in swarm.members if m is not victim))

    play(plan(tmp_path, STAGES + 1), scenario)


def test_without_a_standby_the_run_waits_says_for_what_and_goes_on_with_a_newcomer(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        for index in range(STAGES):
            swarm.start(index)
        await until_update(swarm, 40)
        victim = host(swarm, 2)
        await swarm.kill(victim.index)
        others = [m for m in swarm.members[:STAGES] if m is not victim]
        await swarm.until("it is said", lambda: all("stage 2 has no host" in m.facts.reason for m in others))
        await asyncio.sleep(60)
        assert all("stage 2 has no host" in m.facts.reason for m in others)
        at = updates(swarm, 0)
        newcomer = swarm.start(STAGES)
        await until_update(swarm, at + 30)
        assert host(swarm, 2) is newcomer
        assert newcomer.count("stage_copies_fetched") == 1
        for member in swarm.members:
            for life in trained(member):
                assert set(life.values()) <= {1}
        await swarm.drain(*(m.index for m in swarm.members if m is not victim))

    play(plan(tmp_path, STAGES + 1), scenario)


def test_a_first_stage_that_moves_draws_no_microbatch_anew_that_counted(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        for index in range(STAGES):
            swarm.start(index)
        await until_update(swarm, 33)
        victim = host(swarm, 0)
        await swarm.kill(victim.index)
        swarm.start(victim.index)  # the same node, from its own checkpoint
        await until_update(swarm, 60)
        lanes = {mb.lane for life in trained(victim) for mb in life}
        assert len(lanes) == 1
        first, second = trained(victim)
        assert set(first.values()) == set(second.values()) == {1}
        again = {mb.index for mb in first} & {mb.index for mb in second}
        assert again and min(again) >= 30 - 1, "only what no checkpoint held is trained on again"
        for member in swarm.members:
            if member is not victim:
                assert set(trained(member)[-1].values()) == {1}
        await swarm.drain()

    play(plan(tmp_path), scenario)


class Mute(MemoryStageWorker):
    """Takes every microbatch of stage 1 and gives none back, in its node's first life."""

    async def _forward(self, microbatch: Microbatch, version: int, update: int | None) -> messages.Ran:
        if self._setup.stage == 1 and self._setup.peer_id == identity(1):
            await asyncio.sleep(1e9)
        return await super()._forward(microbatch, version, update)


def test_a_stage_whose_host_answers_nothing_is_taken_from_it(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        for index in range(STAGES):
            swarm.start(index, stage=index)
        await swarm.until("all are hosted", lambda: hosted(swarm) == set(range(STAGES)))
        spare = swarm.start(STAGES)
        at = swarm.clock.monotonic()
        await swarm.until("it trains after all", lambda: swarm.members[0].facts.step > 30, within_s=120.0)
        assert swarm.clock.monotonic() - at > 20, "a slow answer is no crime at once"
        assert (spare.facts.stage, spare.facts.stage_role) == (1, "hosts")
        assert swarm.members[0].count("peers_left_alone") >= 1
        await swarm.drain()

    mute = plan(tmp_path, STAGES + 1, answer_s=10.0)
    mute.worker = Mute
    play(mute, scenario)


def test_a_host_too_many_takes_over_a_stage_that_nobody_stands_by_for(tmp_path: Path) -> None:
    """The last node had claimed stage 0 when it was alone; the one placed there by its owner has the first turn."""

    async def scenario(swarm: Swarm) -> None:
        placed, free = sorted((0, STAGES), key=identity, reverse=True)
        surplus = swarm.start(free)
        await swarm.until("it hosts stage 0", lambda: surplus.facts.stage_role == "hosts")
        first = swarm.start(placed, stage=0)
        for index in range(1, STAGES):
            swarm.start(index, stage=index)
        await swarm.until("all are hosted", lambda: hosted(swarm) == set(range(STAGES)))
        await swarm.until("they train", lambda: swarm.members[2].facts.step > 30)
        assert (surplus.facts.stage, first.facts.stage) == (0, 0)
        await swarm.kill(2)
        await swarm.until("it is hosted again", lambda: hosted(swarm) == set(range(STAGES)), within_s=30.0)
        assert host(swarm, 2) is surplus and host(swarm, 0) is first
        await until_update(swarm, first.facts.step + 30)
        assert surplus.count("stages_left") == 1 and surplus.count("stage_copies_fetched") == 1
        for member in swarm.members:
            for life in trained(member):
                assert set(life.values()) <= {1}, "a microbatch counted twice"
        await swarm.drain(*(m.index for m in swarm.members if m.index != 2))

    play(plan(tmp_path, STAGES + 1), scenario)


def test_of_several_hosts_too_many_one_moves(tmp_path: Path) -> None:
    """Without standbys two more share stages 0 and 1, and either may leave its own."""

    async def scenario(swarm: Swarm) -> None:
        for index in range(STAGES):
            swarm.start(index, stage=index)
        await swarm.until("all are hosted", lambda: hosted(swarm) == set(range(STAGES)))
        for index in (STAGES, STAGES + 1):
            swarm.start(index)
        await swarm.until("they host a stage", lambda: all(m.facts.stage_role == "hosts" for m in swarm.members))
        await asyncio.sleep(5)
        await swarm.kill(3)
        await swarm.until("it is hosted again", lambda: hosted(swarm) == set(range(STAGES)), within_s=40.0)
        await asyncio.sleep(15)
        assert sum(m.count("stages_left") for m in swarm.members) == 1
        await swarm.drain(*(m.index for m in swarm.members if m.index != 3))

    play(plan(tmp_path, STAGES + 2, standbys=0, backup_every=40), scenario)


def test_a_drained_pipeline_goes_on_where_it_was(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await until_update(swarm, 25)
        await swarm.drain()
        swarm.start_all()
        await until_update(swarm, 50)
        for member in swarm.members:
            first, second = trained(member)
            assert not first.keys() & second.keys(), "what counted before the stop counts no more"
        await swarm.drain()

    play(plan(tmp_path), scenario)
