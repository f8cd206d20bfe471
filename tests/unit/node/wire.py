"""Builders for the transport tests: identities, records, a scripted handler, and one swarm of either transport."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from peerloom.node.clock import SystemClock
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import Identity
from peerloom.node.memory_transport import MemoryHub, MemoryTransport
from peerloom.node.seams import ExchangeStream, PeerHandler
from peerloom.node.tls import Certificate, make_certificate
from peerloom.protocol.handshake import RunClaim
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage, StatePiece
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord, RunId

RUN = RunId("0123456789abcdef")
SPEC = "ab" * 32
NOW = 1_700_000_000.0
AnyTransport = GrpcTransport | MemoryTransport


class Jumpable(SystemClock):
    """The machine's clock plus what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


def record_of(peer_id: PeerId, addresses: tuple[str, ...], cert_der: bytes, **changes: Any) -> PeerRecord:
    fields: dict[str, Any] = {"name": "n", "role": "trainer", "version": "0", "instance": "00"}
    fields |= {"started_at": NOW, "issued_at": NOW} | changes
    return PeerRecord(peer_id=peer_id, addresses=addresses, cert_der=cert_der, **fields)


async def silent(stream: ExchangeStream) -> None:
    """Takes what comes until the end."""
    while await stream.receive() is not None:
        pass


@dataclass
class Handler:
    """Serves what a test scripts; `ended` holds how each exchange ended, `left` counts fetches that were left."""

    on_exchange: Callable[[ExchangeStream], Awaitable[None]] = silent
    pieces: tuple[bytes, ...] = (b"abcd", b"ef")
    fetch_error: Exception | None = None
    own: NodeStatus | None = None
    ended: asyncio.Queue[BaseException | None] = field(default_factory=asyncio.Queue)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, service: Any, stream: Any) -> None:
        try:
            await self.on_exchange(stream)
        except BaseException as error:
            self.ended.put_nowait(error)
            raise
        self.ended.put_nowait(None)

    async def status(self) -> NodeStatus:
        assert self.own is not None
        return self.own

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        try:
            digests = (b"\1" * 32,) * len(self.pieces)
            total, size = sum(map(len, self.pieces)), len(self.pieces[0])
            yield StateManifest("snap", 3, 60, request.layout, total, size, digests, 2.5)
            for index in range(request.start_piece, len(self.pieces)):
                yield StatePiece(index, self.pieces[index])
            if self.fetch_error is not None:
                raise self.fetch_error
        finally:
            self.left.set()


class Swarm:
    """Makes transports of one kind, "grpc" or "memory", and stops them all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.clock = Jumpable()
        self.hub = MemoryHub(self.clock, random.Random(0))
        self._made: list[AnyTransport] = []

    def client(
        self, identity: Identity | None = None, certificate: Certificate | None = None, **changes: Any
    ) -> AnyTransport:
        identity = identity or Identity.generate()
        certificate = certificate or make_certificate(NOW)
        common: dict[str, Any] = {"run_id": RUN, "spec_hash": SPEC} | changes
        made: AnyTransport
        if self.kind == "memory":
            common.pop("listen", None)
            made = MemoryTransport(identity.peer_id, self.hub, cert_der=certificate.der, **common)
        else:
            rng = random.Random(0)
            made = GrpcTransport(identity=identity, certificate=certificate, clock=self.clock, rng=rng, **common)
        self._made.append(made)
        return made

    async def server(
        self,
        handler: PeerHandler,
        identity: Identity | None = None,
        certificate: Certificate | None = None,
        **changes: Any,
    ) -> tuple[AnyTransport, PeerRecord]:
        identity = identity or Identity.generate()
        certificate = certificate or make_certificate(NOW)
        made = self.client(identity, certificate, **changes)
        addresses = await made.start(handler)
        record = record_of(identity.peer_id, addresses, certificate.der)
        if isinstance(handler, Handler):
            handler.own = NodeStatus(record=record, partners={identity.peer_id: 2}, counters={"rounds": 3.0})
        return made, record

    async def stop(self) -> None:
        for made in self._made:
            await made.stop()


def claim_of(identity: Identity, **changes: Any) -> RunClaim:
    fields: dict[str, Any] = {"run_id": RUN, "spec_hash": SPEC, "version": "0"} | changes
    return RunClaim(peer_id=identity.peer_id, **fields)
