"""Puts together what makes a node reach others and be reached: tunnels, dialler, relays, dial-backs."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from peerloom.node.config import NodeConfig
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.facts import Facts
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.port_mapping import PortMapping
from peerloom.node.reach import ReachDriver
from peerloom.node.seams import Clock
from peerloom.node.throttle import Traffic
from peerloom.node.tunnel import Tunnels
from peerloom.node.tunnel_dialer import RecordOf, TunnelDialer
from peerloom.node.tunnel_legs import Count
from peerloom.node.view import SwarmView
from peerloom.protocol.errors import PortInUse
from peerloom.protocol.reach import Reachability
from peerloom.protocol.relay_choice import RelayBook
from peerloom.protocol.relay_desk import DeskLimits, RelayDesk
from peerloom.protocol.types import PeerId

PORT_TRIES = 3  # of a free port, which must be free on all listen addresses


@dataclass(slots=True)
class Reaching:
    """What a node or an observer uses; `driver` is a node's alone."""

    tunnels: Tunnels
    dialer: TunnelDialer
    book: RelayBook
    clock: Clock
    _own_relays: list[Callable[[], frozenset[PeerId]]] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        own: PeerId,
        clock: Clock,
        limits: DeskLimits,
        record_of: RecordOf,
        count: Count,
        allow: frozenset[PeerId],
        traffic: Traffic | None = None,
    ) -> Reaching:
        """`allow` empty: everybody; `traffic` is the transport's, so that caps hold over calls and what is relayed."""
        book, relays = RelayBook(random.Random(secrets.randbits(64))), list[Callable[[], frozenset[PeerId]]]()
        tunnels = Tunnels(
            RelayDesk(own, limits),
            clock,
            traffic=traffic,
            my_relays=lambda: frozenset().union(*(each() for each in relays)),
            allowed=lambda peer: not allow or peer in allow,
            count=count,
        )
        return cls(tunnels, TunnelDialer(tunnels, book, clock, record_of, count), book, clock, relays)

    def driver(
        self,
        transport: GrpcTransport,
        view: SwarmView,
        facts: Facts,
        discovery: DhtDiscovery,
        mapping: PortMapping | None = None,
        leg_mapping: PortMapping | None = None,
    ) -> ReachDriver:
        """The node's background job; the mappings, where there are any, are others."""
        driver = ReachDriver(
            Reachability(random.Random(secrets.randbits(64)), self.book),
            transport=transport,
            tunnels=self.tunnels,
            view=view,
            facts=facts,
            clock=self.clock,
            moved=discovery.moved,
            libp2p=discovery.libp2p_addresses,
            mapping=mapping,
            leg_mapping=leg_mapping,
        )
        self._own_relays.append(driver.my_relays)
        return driver

    async def stop(self) -> None:
        """Ends all tunnels; the dialler's end with its transport."""
        await self.dialer.stop()
        await self.tunnels.stop()


def port_mapping_of(config: NodeConfig, transport: GrpcTransport) -> PortMapping | None:
    """The job that asks the router for the port of calls; None where it is not to, or could be of no use."""
    if not _asks_router(config):
        return None
    return PortMapping(lambda: transport.local()[1], random.Random(secrets.randbits(64)))


def leg_mapping_of(config: NodeConfig, port: int) -> PortMapping | None:
    """The job that asks it for a relay's own port, of which the ends are told the number alone; None likewise."""
    if not port or not _asks_router(config):
        return None
    return PortMapping(lambda: port, random.Random(secrets.randbits(64)), elsewhere=False)


def _asks_router(config: NodeConfig) -> bool:
    return config.port_mapping and not config.announce and "0.0.0.0" in config.listen


def listen_for_legs(tunnels: Tunnels, config: NodeConfig, port: int) -> int:
    """Opens the relay's own port; one that nobody named gives way where it was taken since it was chosen.

    Raises PortInUse or ConfigError.
    """
    for _ in range(PORT_TRIES):
        try:
            return tunnels.listen(config.listen, port)
        except PortInUse:
            if config.relay_port:
                raise
            port = 0
    return tunnels.listen(config.listen, port)


def desk_limits(config: NodeConfig) -> DeskLimits:
    """What a node's settings let others do; a cap on its own traffic holds for what it relays, unless that has one."""
    caps = [cap for cap in (config.max_upload, config.max_download) if cap]
    return DeskLimits(
        relays=config.relay,
        tunnels=config.relay_tunnels,
        rate=config.relay_rate or min(caps, default=0),
        pair_rate=config.relay_pair_rate,
    )
