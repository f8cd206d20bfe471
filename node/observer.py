"""Looks at a swarm from outside: a DHT client that reads the records and asks each node for its Status."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from peerloom.node.agree import find_run, wanted_run
from peerloom.node.clock import SystemClock
from peerloom.node.config import NodeConfig
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import Identity
from peerloom.node.reaching import Reaching
from peerloom.node.specs import verify_spec
from peerloom.node.tls import make_certificate
from peerloom.protocol.errors import PeerloomError
from peerloom.protocol.invite import parse_invite
from peerloom.protocol.relay_desk import DeskLimits
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

ANSWER_S = 3.0
RUN_PATIENCE_S = 10.0
MAX_ASKED_AT_ONCE = 32
MAX_ASKED = 64  # of a larger swarm the records alone are read: one DHT key, and all but the counts of partners


@dataclass(frozen=True, slots=True)
class Observer:
    """A client of one swarm; `look` may be called again and again."""

    spec: RunSpec
    discovery: DhtDiscovery
    transport: GrpcTransport
    _known: dict[PeerId, PeerRecord] = field(default_factory=dict)

    async def look(self) -> list[NodeStatus]:
        """All nodes: as they answer, or as their record says when they do not, or when they are more than MAX_ASKED.

        One that has withdrawn its record since the last look is there once more, as draining, so that a watch can tell
        it from one that fell silent.
        """
        limit = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
        records = await self.discovery.peers()
        if len(records) > MAX_ASKED:
            return [*(NodeStatus(record=record) for record in records), *self._left(records)]
        seen = await asyncio.gather(*(self._ask(record, limit) for record in records))
        return [*seen, *self._left(records)]

    def _left(self, records: list[PeerRecord]) -> list[NodeStatus]:
        before = dict(self._known)
        self._known.update({record.peer_id: record for record in records})
        left = {peer: at for peer, at in self.discovery.left().items() if peer in self._known}
        for peer in left:
            del self._known[peer]
        return [
            NodeStatus(record=replace(before[peer], state="draining", reason="it has left", issued_at=at))
            for peer, at in left.items()
        ]

    async def _ask(self, record: PeerRecord, limit: asyncio.Semaphore) -> NodeStatus:
        try:
            async with limit, asyncio.timeout(ANSWER_S):
                return await self.transport.status(record)
        except (PeerloomError, TimeoutError):  # a peer may name errors that are none of PeerError's
            return NodeStatus(record=record)


async def open_observer(invites: list[str], stack: AsyncExitStack) -> Observer:
    """Joins as a client under a throw-away identity; raises what `peer join` would for a bad invite."""
    clock, identity = SystemClock(), Identity.generate()
    seeds = [parse_invite(text) for text in invites]
    discovery = await DhtDiscovery.create(
        identity=identity, identity_path=None, seeds=seeds, clock=clock, client_only=True
    )
    stack.push_async_callback(discovery.stop)
    spec = verify_spec(await find_run(discovery, wanted_run(seeds, None), RUN_PATIENCE_S))
    discovery.join_run(spec.run_id)
    known: dict[PeerId, PeerRecord] = {}
    limits = DeskLimits(relays=False)
    reaching = Reaching.build(identity.peer_id, clock, limits, known.get, lambda *_: None, frozenset())
    stack.push_async_callback(reaching.stop)
    await discovery.attach(reaching.tunnels.attach_client)
    transport = GrpcTransport(
        identity=identity,
        certificate=make_certificate(clock.wall()),
        run_id=spec.run_id,
        spec_hash=spec.spec_hash(),
        listen=(),
        clock=clock,
        rng=random.Random(secrets.randbits(64)),
        dialer=reaching.dialer,
    )
    stack.push_async_callback(transport.stop)
    return Observer(spec, discovery, transport, known)


async def swarm_status(config: NodeConfig, invites: list[str]) -> tuple[RunSpec, list[NodeStatus]]:
    """Looks once."""
    async with AsyncExitStack() as stack:
        observer = await open_observer(invites, stack)
        return observer.spec, await observer.look()


async def watch_swarm(
    config: NodeConfig, invites: list[str], interval_s: float
) -> AsyncIterator[tuple[RunSpec, list[NodeStatus]]]:
    """Looks every `interval_s` seconds until closed."""
    async with AsyncExitStack() as stack:
        observer = await open_observer(invites, stack)
        while True:
            yield observer.spec, await observer.look()
            await asyncio.sleep(interval_s)
