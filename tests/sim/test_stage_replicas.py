"""Several hosts of one stage in virtual time: their weights stay together, and no other stage's come among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from peerloom.node.memory_stage_worker import MemoryStageWorker
from peerloom.protocol.messages import Decline, Offer
from peerloom.protocol.replicas import replica_layout
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.spec_gasloc import GaslocSpec
from tests.sim.swarm import Member, Plan, Swarm, play
from tests.sim.test_pipeline import STAGES, hosted, plan

LOCAL_STEPS = 2
Report = Callable[[str, object], None]


def replicas_plan(home: Path, count: int, **gasloc: Any) -> Plan:
    made = plan(home, count, standbys=0, backup_every=1000, eval_every=1000)
    table = {"local_steps": LOCAL_STEPS, "match_timeout_s": 4.0, **gasloc}
    made.spec = replace(made.spec, gasloc=GaslocSpec(**table))
    return made


def worker(member: Member) -> MemoryStageWorker:
    found = member.workers[-1]
    assert isinstance(found, MemoryStageWorker)
    return found


async def apart(swarm: Swarm, seconds: float) -> float:
    """The root mean square distance of the two hosts of stage 1, from each other, over so long."""
    first, second = worker(swarm.members[1]), worker(swarm.members[STAGES])
    seen = []
    for _ in range(int(seconds)):
        await asyncio.sleep(1.0)
        seen.append(float((first.weights - second.weights).square().mean()))
    return (sum(seen) / len(seen)) ** 0.5


async def start(swarm: Swarm) -> None:
    """A host a stage, and a second one of stage 1."""
    for index in range(STAGES):
        swarm.start(index, stage=index)
    swarm.start(STAGES, stage=1)
    await swarm.until("all are hosted", lambda: hosted(swarm) == set(range(STAGES)))
    await swarm.until("both train", lambda: all(swarm.members[i].facts.step > 20 for i in (1, STAGES)))


def distance(home: Path, **gasloc: Any) -> float:
    found = []

    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        await swarm.until("they are as far apart as they get", lambda: swarm.members[1].facts.step > 100)
        found.append(await apart(swarm, 20.0))
        for index in (0, 2, 3):
            assert worker(swarm.members[index]).mixings == [], "alone with its stage"
        await swarm.drain()

    play(replicas_plan(home, STAGES + 1, **gasloc), scenario)
    return found[0]


def test_two_hosts_of_a_stage_stay_together(tmp_path: Path, record_property: Report) -> None:
    without = distance(tmp_path / "without", local_steps=10**6)
    for encoding in ("fp32", "bf16"):
        among = distance(tmp_path / encoding, encoding=encoding)
        record_property(f"of_without_{encoding}", among / without)
        assert among < 0.3 * without, (encoding, among, without)


def test_a_partner_of_another_stage_is_refused(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        asked, stranger = swarm.members[1], swarm.members[2]
        size = len(worker(asked).proposal())
        answers = []
        for stage in (1, 2):
            record = stranger.context.view.record_of(asked.peer_id)
            assert record is not None
            stream = await stranger.transport.open(record, EXCHANGE)
            layout = replica_layout(stage, "57a9e0")
            await stream.send(Offer(f"{stage:032x}", 0, layout, "fp32", size))
            answers.append(await stream.receive())
            await stream.close()
        ours, theirs = answers
        assert isinstance(ours, Decline) and ours.reason == "refused", "no host of the stage, whatever it offers"
        assert isinstance(theirs, Decline) and theirs.reason == "incompatible" and "layout" in theirs.detail
        assert set(asked.facts.partners) & {m.peer_id for m in swarm.members} <= {
            swarm.members[i].peer_id for i in (0, 2, STAGES)
        }
        await swarm.drain()

    play(replicas_plan(tmp_path, STAGES + 1), scenario)


def test_the_one_that_is_left_alone_trains_on_as_if_it_had_never_mixed(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        await start(swarm)
        left = worker(swarm.members[1])
        await swarm.until("they have mixed", lambda: left.mixings.count("mix") >= 3)
        await swarm.kill(STAGES)
        await swarm.until("it knows", lambda: left.mixings[-1] == "drop", within_s=60.0)
        steps = len(left.mixings)
        await asyncio.sleep(20)
        assert len(left.mixings) == steps
        swarm.start(STAGES, stage=1)
        await swarm.until("they mix again", lambda: left.mixings.count("mix") >= 6, within_s=120.0)
        await swarm.drain()

    play(replicas_plan(tmp_path, STAGES + 1), scenario)


def test_a_second_host_begins_where_the_first_one_is(tmp_path: Path) -> None:
    """Nobody has saved yet, and so little is trained that a lost stage would begin anew."""

    async def scenario(swarm: Swarm) -> None:
        for index in range(STAGES):
            swarm.start(index, stage=index)
        await swarm.until("they train", lambda: all(m.facts.step > 20 for m in swarm.members[:STAGES]))
        await asyncio.sleep(15)  # their records say so
        second = swarm.start(STAGES, stage=1)
        await swarm.until("it trains", lambda: bool(second.workers) and bool(worker(second).made), within_s=60.0)
        assert worker(second).made[0].update > 20 and second.count("stage_copies_fetched") == 1
        await swarm.drain()

    play(replicas_plan(tmp_path, STAGES + 1), scenario)
