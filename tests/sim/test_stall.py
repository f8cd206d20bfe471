"""A training process that freezes: told by its node, left alone by the others, back with its next step."""

from __future__ import annotations

import asyncio
from typing import Any

from peerloom.node.memory_worker import MemoryWorker
from peerloom.node.worker_seams import RoundFinished
from peerloom.protocol.progress import BETWEEN_ROUNDS_S, LEAST_STALL_S
from peerloom.protocol.types import PeerRecord
from tests.sim.swarm import STEP_S, Plan, Swarm, play


class Freezable(MemoryWorker):
    """Stops inside a step, as under SIGSTOP, until `thaw`."""

    frozen: asyncio.Event | None = None

    def freeze(self) -> None:
        self.frozen = asyncio.Event()
        self._step_s = 1e9

    def thaw(self) -> None:
        self._step_s = STEP_S
        self._interrupted.set()


class FreezesAtTheEnd(MemoryWorker):
    """Never comes back from the end of its fifth round; its peers go on to offer exchanges to it."""

    async def finish(self, mix: bool) -> RoundFinished:
        if self._round == 4 and self._disk.saves == 0:
            await asyncio.sleep(1e9)
        return await super().finish(mix)


def record_of(swarm: Swarm, index: int) -> PeerRecord:
    peer = swarm.members[index].peer_id
    return next(r for r in swarm.registry.live(swarm.plan.spec.run_id) if r.peer_id == peer)


def test_a_frozen_worker_is_told_as_stalled_and_comes_back() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(3)
        frozen = swarm.members[2]
        worker = frozen.worker
        assert isinstance(worker, Freezable)
        worker.freeze()
        round = frozen.facts.round
        await swarm.until("stalled", lambda: frozen.facts.state == "stalled", within_s=LEAST_STALL_S + 20)
        assert frozen.facts.round in (round, round + 1)
        assert frozen.facts.reason.startswith("no step for ")
        await asyncio.sleep(15)
        told = record_of(swarm, 2)
        assert told.state == "stalled" and "no step for" in told.reason
        assert frozen.peer_id not in [seen.peer for seen in swarm.members[0].context.view.live()]
        others = swarm.members[0].facts.round
        await swarm.until_round(others + 3, 0, 1)  # the rest goes on
        assert frozen.count("worker_stalls") == 1
        worker.thaw()
        await swarm.until_round(frozen.facts.round + 3, 2)
        assert frozen.facts.state != "stalled"
        await swarm.drain()

    play(Plan(count=3, worker=Freezable), scenario)


def test_a_worker_that_freezes_between_rounds_is_told_too() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(2)
        (frozen,) = (member for member in swarm.members if isinstance(member.worker, FreezesAtTheEnd))
        await swarm.until("stalled", lambda: frozen.facts.state == "stalled", within_s=BETWEEN_ROUNDS_S + 60)
        assert frozen.facts.round == 4

    def worker(**arguments: Any) -> MemoryWorker:
        made.append(1)
        return (FreezesAtTheEnd if len(made) == 2 else MemoryWorker)(**arguments)

    made: list[int] = []
    play(Plan(count=3, worker=worker, checkpoint_every_s=1e6), scenario)


def test_nobody_stalls_in_an_ordinary_swarm() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(100)
        await swarm.drain()

    assert play(Plan(count=3), scenario).total("worker_stalls") == 0
