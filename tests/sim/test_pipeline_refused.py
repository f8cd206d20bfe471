"""Nodes that keep a stage from training in virtual time: liars who claim one, and a machine too small for its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peerloom.node.memory_discovery import MemoryDiscovery
from peerloom.node.memory_stage_worker import MemoryStageWorker
from peerloom.protocol.errors import ConfigError, LinkError
from peerloom.protocol.types import NodeStatus, PeerRecord
from tests.sim.swarm import Swarm, identity, play
from tests.sim.test_pipeline import STAGES, host, hosted, plan, until_update

LIARS_STAGE = 1


class Claimant:
    """Says in its record that it hosts a stage, and answers nothing; `polite`: a Status alone."""

    def __init__(self, swarm: Swarm, *, polite: bool) -> None:
        spec = swarm.plan.spec
        self.peer_id, self.polite, self._clock = identity(99), polite, swarm.clock
        self._discovery = MemoryDiscovery(swarm.registry, self.peer_id, spec.run_id)
        self._transport = swarm.hub.transport(self.peer_id, run_id=spec.run_id, spec_hash=spec.spec_hash())
        self._like: PeerRecord | None = None

    async def serve(self, service: Any, stream: Any) -> None:
        await asyncio.sleep(3600)

    async def fetch(self, peer: Any, request: Any) -> Any:
        raise LinkError("not now")
        yield

    async def status(self) -> NodeStatus:
        if not self.polite or self._like is None:
            raise LinkError("not now")
        return NodeStatus(record=self._like, partners={}, counters={})

    async def live(self, like: PeerRecord) -> None:
        """Keeps its record fresh until cancelled."""
        addresses = await self._transport.start(self)  # type: ignore[arg-type]
        fields = {name: getattr(like, name) for name in like.__slots__} | {
            "peer_id": self.peer_id, "instance": "ff", "name": "liar", "state": "training", "addresses": addresses,
            "cert_der": self._transport.cert_der, "stage": LIARS_STAGE, "stage_role": "hosts",
        }  # fmt: skip
        try:
            while True:
                self._like = PeerRecord(**{**fields, "issued_at": self._clock.wall()})
                await self._discovery.publish(self._like)
                await asyncio.sleep(5)
        finally:
            await self._transport.stop()


@pytest.mark.parametrize("polite", [False, True])
def test_a_stage_claimed_by_a_liar_is_trained_by_an_honest_node(tmp_path: Path, polite: bool) -> None:
    async def scenario(swarm: Swarm) -> None:
        liar = Claimant(swarm, polite=polite)
        for index in range(STAGES):
            swarm.start(index)
            if index == 0:
                await swarm.until("one is there", lambda: swarm.members[0].facts.stage_role != "")
                lying = asyncio.create_task(liar.live(swarm.members[0].facts.record()))
                await asyncio.sleep(5)  # the claim stands before the others look
        await until_update(swarm, 30, within_s=300.0)
        assert host(swarm, LIARS_STAGE).count("stages_taken_over") == 1, "the claim had counted"
        lying.cancel()
        await asyncio.wait([lying])
        await swarm.drain()

    play(plan(tmp_path, answer_s=10.0), scenario)


class Small(MemoryStageWorker):
    """Does not hold any stage on node 1."""

    async def start(self, setup: Any, progress: Any) -> Any:
        if setup.peer_id == identity(1):
            raise ConfigError(f"stage {setup.stage} takes 80.0 GB, and 2.0 GB are free on cpu; free memory")
        return await super().start(setup, progress)


def test_a_stage_that_a_node_s_memory_does_not_hold_is_free_again(tmp_path: Path) -> None:
    async def scenario(swarm: Swarm) -> None:
        small = swarm.members[1]
        for index in range(STAGES):
            swarm.start(index)
        await swarm.until("it gives up", lambda: small.lives == 1 and small.running is None)
        assert isinstance(small.failure, ConfigError) and "are free on cpu" in str(small.failure)
        assert small.facts.stage_role == ""
        left = set(range(STAGES)) - hosted(swarm)
        newcomer = swarm.start(STAGES)
        await until_update(swarm, 30, within_s=60.0)
        assert {newcomer.facts.stage} == left
        await swarm.drain(0, 2, 3, STAGES)

    large = plan(tmp_path, STAGES + 1)
    large.worker = Small
    play(large, scenario)
