"""One identity claims to be far ahead: no node that has trained loses its model to it, none stands still for it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from peerloom.node.donor import manifest_of
from peerloom.node.memory_discovery import MemoryDiscovery
from peerloom.protocol.errors import LinkError
from peerloom.protocol.lifecycle import FIRST_CATCH_UP_S, LONE_S, WORSE_NATS
from peerloom.protocol.messages import FetchRequest, StateMessage, StatePiece
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord
from tests.sim.swarm import TIMEOUT_S, Plan, Swarm, identity, play, spec

FAR = 10**6
NOISE = struct.pack("<64f", *([30.0, -30.0] * 32))


class Liar:
    """Publishes a round of its choice, and serves noise with digests that fit, or nothing at all."""

    def __init__(self, swarm: Swarm, index: int = 99, *, silent: bool = False, claim: float | None = 0.01) -> None:
        self.peer_id = identity(index)
        self.silent, self.claim = silent, claim
        self.asked: list[float] = []
        self._swarm = swarm
        self._discovery = MemoryDiscovery(swarm.registry, self.peer_id, swarm.plan.spec.run_id)
        run = swarm.plan.spec
        self._transport = swarm.hub.transport(self.peer_id, run_id=run.run_id, spec_hash=run.spec_hash())

    async def serve(self, service: Any, stream: Any) -> None:
        raise LinkError("not now")

    async def status(self) -> NodeStatus:
        raise LinkError("not now")

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        self.asked.append(self._swarm.clock.monotonic())
        if self.silent:
            await asyncio.sleep(3600)
        yield manifest_of(NOISE, round=FAR, step=FAR, layout=request.layout, held_out_loss=self.claim)
        yield StatePiece(0, NOISE)

    def round(self) -> int:
        """What its record says."""
        return FAR

    async def live(self, like: PeerRecord, seconds: float) -> None:
        """Keeps its record fresh for so long."""
        addresses = await self._transport.start(self)
        changes = {
            "peer_id": self.peer_id, "instance": "ff", "name": "liar", "state": "training", "round": 0,
            "step": FAR, "addresses": addresses, "cert_der": self._transport.cert_der,
        }  # fmt: skip
        fields = {name: getattr(like, name) for name in like.__slots__} | changes
        try:
            for _ in range(int(seconds / 5)):
                fields["round"] = self.round()
                fields["issued_at"] = self._swarm.clock.wall()
                await self._discovery.publish(PeerRecord(**fields))
                await asyncio.sleep(5)
        finally:
            await self._transport.stop()


def test_a_lone_liar_takes_no_model_away() -> None:
    async def scenario(swarm: Swarm) -> None:
        member = swarm.start(0)
        await swarm.until_round(10)
        assert member.facts.loss is not None
        liar, before, round = Liar(swarm), member.facts.loss, member.facts.round
        await liar.live(member.facts.record(), LONE_S - 10)
        assert not liar.asked, "asked before it had stayed"
        await liar.live(member.facts.record(), 60)
        assert liar.asked
        assert member.count("states_refused") >= 1
        assert member.count("peers_left_alone") >= 1
        assert not member.adopted
        assert [line["round"] for line in member.rounds] == list(range(member.facts.round)), "its rounds broke off"
        assert member.facts.round > round + 30
        assert member.facts.loss < before + 0.1
        await swarm.drain()
        assert member.disk.round == member.facts.round < 1000

    play(Plan(count=1), scenario)


class Creeping(Liar):
    """Always a little ahead of its victim, with the victim's own parameters made a little worse each time."""

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(swarm)
        self._victim = swarm.members[0]

    def round(self) -> int:
        return self._victim.facts.round + 10

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        self.asked.append(self._swarm.clock.monotonic())
        theta = struct.unpack("<64f", self._victim.worker.theta())
        data = struct.pack("<64f", *(value + 0.4 for value in theta))
        yield manifest_of(data, round=self.round(), step=1, layout=request.layout, held_out_loss=0.01)
        yield StatePiece(0, data)


def test_states_each_a_little_worse_do_not_add_up() -> None:
    async def scenario(swarm: Swarm) -> None:
        member = swarm.start(0)
        await swarm.until_round(100)
        best = min(line["held_out_loss"] for line in member.rounds)
        liar = Creeping(swarm)
        await liar.live(member.facts.record(), 300)
        assert len(liar.asked) >= 2
        assert member.count("states_refused") >= 1
        assert all(line["loss"] <= best + WORSE_NATS for line in member.adopted)
        await swarm.drain()

    play(Plan(count=1, spec=spec(local_steps=1), step_s=lambda index: 5.0), scenario)


def test_a_silent_liar_hardly_stops_anybody() -> None:
    async def scenario(swarm: Swarm) -> None:
        member = swarm.start(0)
        await swarm.until_round(3)
        liar, began = Liar(swarm, silent=True), swarm.clock.monotonic()
        await liar.live(member.facts.record(), 600)
        attempts = [at for at, state in member.states if state == "fetching" and at > began]
        assert 3 <= len(attempts) <= 5  # after 60 s, then 60, 120, 240 s apart
        gaps = [later - earlier for earlier, later in zip(attempts, attempts[1:], strict=False)]
        assert all(gap >= FIRST_CATCH_UP_S * 2**i for i, gap in enumerate(gaps))
        for at in attempts:
            left = min(later for later, state in member.states if later > at and state != "fetching")
            assert left - at <= TIMEOUT_S + 0.1
        await swarm.drain()

    play(Plan(count=1), scenario)


def test_a_liar_beside_an_honest_peer_is_not_even_asked() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(5)
        liar = Liar(swarm)
        await liar.live(swarm.members[0].facts.record(), 120)
        assert not liar.asked
        assert all(not member.adopted for member in swarm.members)
        await swarm.drain()

    play(Plan(count=2), scenario)


@pytest.mark.parametrize("claim", [0.01, None])
def test_a_newcomer_that_meets_the_liar_alone_starts_from_theta_0(claim: float | None) -> None:
    async def scenario(swarm: Swarm) -> None:
        member = swarm.start(0)
        await swarm.until_round(1, 0)
        like = member.facts.record()
        await swarm.drain()
        liar = Liar(swarm, claim=claim)
        lying = asyncio.create_task(liar.live(like, 60))
        await asyncio.sleep(1)
        newcomer = swarm.start(1)
        await swarm.until("it trains", lambda: newcomer.facts.round >= 3, within_s=60)
        assert liar.asked and newcomer.count("states_refused") == 1
        assert [line["round"] for line in newcomer.rounds][:3] == [0, 1, 2]
        await lying
        await swarm.drain()

    play(Plan(count=2), scenario)


def test_a_newcomer_takes_the_honest_state_after_the_liars() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start(0)
        await swarm.until_round(8, 0)
        lying = asyncio.create_task(Liar(swarm).live(swarm.members[0].facts.record(), 60))
        await asyncio.sleep(1)
        newcomer = swarm.start(1)
        await swarm.until("it adopts", lambda: bool(newcomer.adopted), within_s=30)
        assert 7 <= newcomer.adopted[0]["round"] < 100
        await lying
        await swarm.drain()

    play(Plan(count=2), scenario)


def test_two_liars_ahead_of_one_honest_node_take_nothing_either() -> None:
    async def scenario(swarm: Swarm) -> None:
        member = swarm.start(0)
        await swarm.until_round(5)
        liars = [Liar(swarm, 98), Liar(swarm, 99)]
        async with asyncio.TaskGroup() as lying:
            for liar in liars:
                lying.create_task(liar.live(member.facts.record(), 40))
        assert all(liar.asked for liar in liars), "the next donor was not tried"
        assert member.count("states_refused") == 2
        assert not member.adopted
        await swarm.drain()

    play(Plan(count=1), scenario)


def test_the_tokens_of_those_that_left_still_count() -> None:
    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until_round(15)
        stayed, gone = swarm.members
        await swarm.drain(1)
        tokens = gone.facts.tokens
        await asyncio.sleep(60)
        assert not stayed.context.view.records()
        told = stayed.context.view.tokens()[gone.peer_id]
        assert 0 < told <= tokens
        await swarm.drain()

    play(Plan(count=2), scenario)
