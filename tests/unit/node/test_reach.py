"""A node that cannot be dialled finds that out from its peers and takes places at relays; over real daemons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from peerloom.node.clock import SystemClock
from peerloom.node.facts import Facts
from peerloom.node.reach import ReachDriver
from peerloom.node.view import SwarmView
from peerloom.protocol import reach
from peerloom.protocol.types import PeerId, PeerRecord
from tests.unit.node.reach_swarm import ReachMember, ReachSwarm
from tests.unit.node.test_tunnel import NOWHERE, WITHIN_S, through_relays_alone, way_to
from tests.unit.node.wire import record_of

RELAY = PeerId("relay")


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[ReachSwarm]:
    async with ReachSwarm(tmp_path) as made:
        yield made


class View:
    """What the driver asks a SwarmView for."""

    def __init__(self, swarm: ReachSwarm, own: PeerId) -> None:
        self._records, self._own = swarm.records, own
        self.announced = asyncio.Event()

    def believed(self) -> list[PeerRecord]:
        return [record for peer, record in self._records.items() if peer != self._own]

    def record_of(self, peer: PeerId) -> PeerRecord | None:
        return self._records.get(peer)

    def announce(self) -> None:
        self.announced.set()


class Driven:
    """A member with its driver running; `facts` are what its record would say."""

    def __init__(self, swarm: ReachSwarm, member: ReachMember) -> None:
        self.view = View(swarm, member.peer_id)
        self.facts = Facts(
            peer_id=member.peer_id,
            name="n",
            role="trainer",
            version="0",
            instance="00",
            cert_der=member.record.cert_der,
            clock=swarm.clock,
            bytes_moved=member.transport.bytes_moved,
        )
        self.moves = 0
        self.member = member
        driver = member.reaching.driver(
            member.transport, cast(SwarmView, self.view), self.facts, cast(Any, self)
        )
        self.driver: ReachDriver = driver
        self.job = asyncio.create_task(driver.run())

    async def moved(self) -> None:
        self.moves += 1
        await self.member.discovery.moved()

    async def libp2p_addresses(self) -> tuple[str, ...]:
        return await self.member.discovery.libp2p_addresses()

    async def until(self, what: str, holds: Any) -> None:
        try:
            async with asyncio.timeout(WITHIN_S):
                while not holds(self.facts):
                    await self.view.announced.wait()
                    self.view.announced.clear()
        except TimeoutError:
            pytest.fail(f"not in time: {what}; {self.facts.reach} {self.facts.via} {self.facts.addresses}")

    async def stop(self) -> None:
        self.job.cancel()
        await asyncio.gather(self.job, return_exceptions=True)


async def test_a_node_learns_how_it_is_reached_and_others_reach_it_so(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, node = [await swarm.join() for _ in range(3)]
    monkeypatch.setattr("peerloom.node.reach.LOOK_S", 0.1)
    driven = Driven(swarm, node)
    try:
        await driven.until("it can be dialled", lambda facts: facts.reach == "direct")
        assert driven.facts.addresses == node.record.addresses and driven.facts.relays
        assert driven.facts.libp2p == node.record.libp2p and driven.facts.via == ()

        monkeypatch.setattr(node.transport, "addresses", lambda: NOWHERE)  # as if it had moved behind a router
        swarm.clock.ahead_s += 10.0  # past the helpers' least interval
        await driven.until("two relays", lambda facts: facts.reach == "via" and len(facts.via) == 2)
        assert set(driven.facts.via) == {first.peer_id, second.peer_id}
        assert (driven.facts.relays, driven.moves) == (False, 1)
        through_relays_alone(second, monkeypatch)
        record = replace(node.record, addresses=NOWHERE, reach="via", via=(first.peer_id,), libp2p=())
        await second.transport.status(record)
        assert way_to(second, record) == first.peer_id

        await first.reaching.tunnels.stop()
        await driven.until("the lost relay is left out", lambda facts: facts.via == (second.peer_id,))
        assert driven.facts.counters["relays_lost"] >= 1
    finally:
        await driven.stop()


async def test_with_nobody_there_nothing_is_claimed(swarm: ReachSwarm) -> None:
    alone = await swarm.join()
    driven = Driven(swarm, alone)
    try:
        await driven.until("its addresses are told", lambda facts: facts.addresses == alone.record.addresses)
        assert (driven.facts.reach, driven.facts.relays) == ("unknown", False)
    finally:
        await driven.stop()


class Scripted:
    """Stands in for the machine, the tunnels and the transport: keeps one relay, the way to which fails unforeseen."""

    def __init__(self) -> None:
        self.events: list[reach.Event] = []
        self.desk = self
        self.lost = asyncio.Event()

    def handle(self, event: reach.Event, now: float) -> list[reach.Effect]:
        self.events.append(event)
        if isinstance(event, reach.RelayLost):
            self.lost.set()
        return [reach.KeepRelay(RELAY)] if len(self.events) == 1 else []

    async def connected(self) -> frozenset[PeerId]:
        raise RuntimeError("nobody has foreseen this")

    async def libp2p(self) -> tuple[str, ...]:
        return ()

    def addresses(self) -> tuple[str, ...]:
        return NOWHERE

    def counts(self) -> dict[str, float]:
        return {}

    def believed(self) -> list[PeerRecord]:
        return []

    def record_of(self, peer: PeerId) -> PeerRecord:
        return record_of(peer, (), b"x")


async def test_a_relay_whose_keeping_fails_is_lost_and_not_kept_for_ever() -> None:
    stub, clock = Scripted(), SystemClock()
    facts = Facts(
        peer_id=PeerId("me"),
        name="n",
        role="trainer",
        version="0",
        instance="00",
        cert_der=b"x",
        clock=clock,
        bytes_moved=lambda: (0, 0),
    )
    parts: dict[str, Any] = {"transport": stub, "tunnels": stub, "view": stub, "libp2p": stub.libp2p, "moved": None}
    driver = ReachDriver(cast(reach.Reachability, stub), facts=facts, clock=clock, **parts)
    job = asyncio.create_task(driver.run())
    try:
        async with asyncio.timeout(WITHIN_S):
            await stub.lost.wait()
        assert reach.RelayLost(RELAY, "broken") in stub.events and not driver.my_relays()
    finally:
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
