"""Performs what protocol/reach.py decides: asks peers to dial back, holds places at relays, keeps the record true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

from peerloom.node import tunnel_keep
from peerloom.node.facts import Facts
from peerloom.node.logs import short
from peerloom.node.port_mapping import PortMapping
from peerloom.node.seams import Clock, Transport
from peerloom.node.tunnel import Tunnels
from peerloom.node.view import SwarmView
from peerloom.protocol import reach
from peerloom.protocol.checks import multiaddr
from peerloom.protocol.errors import MalformedMessage, PeerloomError
from peerloom.protocol.limits import MAX_ADDRESSES, MAX_LIBP2P
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks at this machine's addresses and at the swarm
LIBP2P_EVERY = 10  # looks; p2pd is asked for its addresses at each of those


class ReachDriver:
    """`run` is a background job of the node, begun once its server listens.

    `moved` is told when the machine's addresses have changed, `libp2p` tells p2pd's; `mapping`, if any, what a router
    forwards; `leg_mapping` is the one for the relay's own port.
    """

    def __init__(
        self,
        machine: reach.Reachability,
        *,
        transport: Transport,
        tunnels: Tunnels,
        view: SwarmView,
        facts: Facts,
        clock: Clock,
        moved: Callable[[], Awaitable[None]],
        libp2p: Callable[[], Awaitable[tuple[str, ...]]],
        mapping: PortMapping | None = None,
        leg_mapping: PortMapping | None = None,
    ) -> None:
        self._machine = machine
        self._transport = transport
        self._tunnels = tunnels
        self._view = view
        self._facts = facts
        self._clock = clock
        self._moved = moved
        self._libp2p = libp2p
        self._mapping = mapping
        self._all_mappings = [each for each in (mapping, leg_mapping) if each is not None]
        self._kept: dict[PeerId, asyncio.Task[None]] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._addresses: tuple[str, ...] = ()
        self._looks = 0

    def my_relays(self) -> frozenset[PeerId]:
        """Those through which others may bring tunnels here."""
        return frozenset(self._kept)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            jobs = [*self._kept.values(), *self._jobs]
            for job in jobs:
                job.remove_done_callback(self._done)  # which would begin others
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _look(self) -> None:
        addresses = self._transport.addresses()
        if self._addresses and addresses and addresses != self._addresses:
            log.info("this machine's addresses have changed to %s", ", ".join(addresses))
            self._facts.count("addresses_changed")
            self._looks = 0
            for each in self._all_mappings:
                each.network_changed()
            await self._moved()  # before relays are sought: they are on the other side of the old connections
        self._addresses = addresses
        if self._looks % LIBP2P_EVERY == 0:
            self._facts.libp2p = _fit(await self._libp2p())
        self._looks += 1
        self._facts.counters.update(self._tunnels.desk.counts())
        mapped = self._mapping.addresses if self._mapping is not None else ()
        addresses = tuple(dict.fromkeys((*mapped, *addresses)))[:MAX_ADDRESSES]
        self._handle(reach.Looked(addresses=addresses, records=tuple(self._view.believed())))

    def _handle(self, event: reach.Event) -> None:
        for effect in self._machine.handle(event, self._clock.monotonic()):
            self._perform(effect)

    def _perform(self, effect: reach.Effect) -> None:
        match effect:
            case reach.AskDialBack(peer, addresses):
                self._spawn(self._ask(peer, addresses), "reach-dial-back")
            case reach.KeepRelay(relay):
                self._kept[relay] = asyncio.create_task(self._keep(relay), name="reach-keep")
                self._kept[relay].add_done_callback(self._done)
            case reach.LeaveRelay(relay):
                if (job := self._kept.pop(relay, None)) is not None:
                    job.cancel()
                    self._jobs.add(job)
                    job.add_done_callback(self._jobs.discard)
            case reach.MeasureRelay(relay):
                self._spawn(self._measure(relay), "reach-measure")
            case reach.ReachChanged():
                self._publish(effect)

    def _publish(self, news: reach.ReachChanged) -> None:
        facts = self._facts
        if news.reach != facts.reach or news.via != facts.via:
            through = f", through {', '.join(map(short, news.via))}" if news.via else ""
            log.info("this node is reached: %s%s (%s)", news.reach, through, news.why)
        relays = news.reach == "direct" and self._tunnels.desk.limits.relays
        facts.reach, facts.via, facts.addresses, facts.relays = news.reach, news.via, news.addresses, relays
        self._tunnels.desk.willing = news.reach != "via"
        self._view.announce()

    async def _ask(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        record = self._view.record_of(peer)
        reached: tuple[str, ...] | None = None
        if record is not None:
            try:
                reached = await self._transport.dial_back(record, addresses)
            except PeerloomError as error:
                log.debug("%s has not dialled back: %s", peer, error)
        self._handle(reach.DialledBack(peer, reached))

    async def _keep(self, relay: PeerId) -> None:
        stood = False

        def measured(latency_s: float, load: float) -> None:
            nonlocal stood
            stood = True
            self._handle(reach.RelayMeasured(relay, latency_s, load))

        await self._introduce(relay)
        fault = await tunnel_keep.keep(self._tunnels, relay, self._clock, measured, place=True)
        self._kept.pop(relay, None)
        log.log(logging.INFO if stood else logging.DEBUG, "relay %s is lost: %s", short(relay), fault)
        self._facts.count("relays_lost", float(stood))
        self._handle(reach.RelayLost(relay, fault))

    async def _measure(self, relay: PeerId) -> None:
        await self._introduce(relay)
        if (found := await tunnel_keep.measure(self._tunnels, relay, self._clock)) is not None:
            self._handle(reach.RelayMeasured(relay, *found))

    async def _introduce(self, relay: PeerId) -> None:
        """Has libp2p connect to a relay by its record's addresses, if it is not yet."""
        record = self._view.record_of(relay)
        if record is not None and relay not in await self._tunnels.connected():
            await self._tunnels.connect(relay, record.libp2p)

    def _spawn(self, job: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(job, name=name)
        self._jobs.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self._failed(task)

    def _failed(self, task: asyncio.Task[None]) -> None:
        """A relay whose keeping failed is not kept, whatever it was that failed."""
        for relay in [relay for relay, job in self._kept.items() if job is task]:
            del self._kept[relay]
            self._handle(reach.RelayLost(relay, "broken"))


def _fit(multiaddrs: tuple[str, ...]) -> tuple[str, ...]:
    """What a record can hold."""
    found = []
    for each in multiaddrs:
        try:
            found.append(multiaddr(each))
        except MalformedMessage:
            continue
    return tuple(found[:MAX_LIBP2P])
