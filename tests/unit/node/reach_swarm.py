"""Builders for tests of tunnels: members with a real p2pd each, on loopback, whose grpc server may be hidden."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peerloom.node.discovery import DhtDiscovery
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.reaching import Reaching
from peerloom.node.throttle import NO_CAPS, Caps, Traffic
from peerloom.node.tls import make_certificate
from peerloom.protocol.relay_desk import DeskLimits
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord
from tests.unit.node import wire
from tests.unit.node.discovery_swarm import DhtSwarm
from tests.unit.node.wire import NOW, RUN, SPEC, Handler, Jumpable


@dataclass
class ReachMember:
    """One node: its parts, its record, and what it counted."""

    discovery: DhtDiscovery
    transport: GrpcTransport
    reaching: Reaching
    handler: Handler
    record: PeerRecord
    counted: dict[str, float]
    relays: set[PeerId]

    @property
    def peer_id(self) -> PeerId:
        return self.record.peer_id


@dataclass
class ReachSwarm:
    """The first member is everybody's seed."""

    folder: Path
    members: list[ReachMember] = field(default_factory=list)
    records: dict[PeerId, PeerRecord] = field(default_factory=dict)
    clock: Jumpable = field(default_factory=Jumpable)

    def __post_init__(self) -> None:
        self._dht = DhtSwarm(self.folder)

    async def join(
        self, limits: DeskLimits | None = None, caps: Caps = NO_CAPS, *, leg_port: bool = True, **changes: Any
    ) -> ReachMember:
        """With `leg_port` the legs of what it relays go over TCP."""
        member = await self._dht.join()
        counted: dict[str, float] = {}
        relays: set[PeerId] = set()

        def count(metric: str, amount: float) -> None:
            counted[metric] = counted.get(metric, 0.0) + amount

        peer_id, traffic = member.identity.peer_id, Traffic(self.clock, caps)
        reaching = Reaching.build(
            peer_id, self.clock, limits or DeskLimits(), self.records.get, count, frozenset(), traffic
        )
        reaching._own_relays.append(lambda: frozenset(relays))
        await member.dht().attach(reaching.tunnels.attach)
        if leg_port:
            reaching.tunnels.listen(("127.0.0.1",), 0)
        certificate = make_certificate(NOW)
        transport = GrpcTransport(
            identity=member.identity,
            certificate=certificate,
            run_id=RUN,
            spec_hash=SPEC,
            clock=self.clock,
            rng=random.Random(0),
            traffic=traffic,
            dialer=reaching.dialer,
            origin_of=reaching.tunnels.origin_of,
        )
        handler = Handler()
        addresses = await transport.start(handler)
        reaching.tunnels.serve(*transport.local())
        libp2p = await member.dht().libp2p_addresses()
        record = wire.record_of(
            peer_id, addresses, certificate.der, **{"libp2p": libp2p, "reach": "direct", "relays": True} | changes
        )
        handler.own = NodeStatus(record=record, partners={}, counters={})
        made = ReachMember(member.dht(), transport, reaching, handler, record, counted, relays)
        self.members.append(made)
        self.records[peer_id] = record
        return made

    async def __aenter__(self) -> ReachSwarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        for member in self.members:
            await member.transport.stop()
            await member.reaching.stop()
        await self._dht.stop()
