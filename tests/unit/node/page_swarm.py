"""A swarm that is made up, for the page: records that change as those of a real one do."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from peerloom.node.http_endpoint import Endpoint
from peerloom.node.http_feed import SwarmFeed
from peerloom.node.http_server import HttpServer
from peerloom.node.metrics import exposition
from peerloom.protocol.peer_id import peer_id_of
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeState, NodeStatus, PeerId, PeerRecord

LOCAL = Endpoint("127.0.0.1", 0, moves=False)
NOW = 1_700_000_000.0


class FakeSwarm:
    """`count` trainers seen from a bootstrap node; in each `step` of ten seconds all renew their records."""

    def __init__(self, count: int, *, now: float = NOW, seed: int = 1) -> None:
        self.now = now
        self.rng = random.Random(seed)
        self.gone: dict[PeerId, float] = {}
        self.frozen: set[PeerId] = set()
        self.own = self._record(0, "organizer", "bootstrap", "serving")
        self.records = {
            record.peer_id: record
            for record in (self._record(n, f"node-{n:03}", "trainer", "training") for n in range(1, count + 1))
        }
        self.feed = SwarmFeed(
            RunSpec(), self.status, lambda: list(self.records.values()), lambda: dict(self.gone), lambda: self.now
        )

    def _record(self, number: int, name: str, role: str, state: NodeState) -> PeerRecord:
        return PeerRecord(
            peer_id=peer_id_of(self.rng.randbytes(32)),
            name=name,
            role=role,  # type: ignore[arg-type]
            addresses=(f"10.0.{number // 250}.{number % 250 + 1}:4001",),
            cert_der=b"c",
            version="0.1.0",
            instance="ab",
            started_at=self.now,
            issued_at=self.now,
            state=state,
            sketch=tuple(self.rng.gauss(0, 1) for _ in range(32)),
        )

    def status(self) -> NodeStatus:
        """The bootstrap node's own."""
        return NodeStatus(record=replace(self.own, issued_at=self.now), counters={"publish_failed": 1.0})

    def peer(self, name: str) -> PeerId:
        return next(peer for peer, record in self.records.items() if record.name == name)

    def change(self, name: str, /, **changes: object) -> None:
        """Sets fields of a node's record."""
        peer = self.peer(name)
        self.records[peer] = replace(self.records[peer], **changes)  # type: ignore[arg-type]

    def step(self, seconds: float = 10.0) -> None:
        self.now += seconds
        peers = [peer for peer in self.records if peer not in self.frozen]
        self.rng.shuffle(peers)
        partners = dict(zip(peers[::2], peers[1::2], strict=False))
        partners |= {b: a for a, b in partners.items()}
        for peer in peers:
            record = self.records[peer]
            self.records[peer] = replace(
                record,
                issued_at=self.now,
                round=record.round + 1,
                loss=(record.loss or 5.0) * 0.98 + self.rng.random() * 0.05,
                tokens=record.tokens + 10_000,
                tokens_per_s=900 + 200 * self.rng.random(),
                up_bytes_per_s=3e5 * self.rng.random(),
                last_partner=partners.get(peer, ""),
                last_met_at=self.now - 1,
            )

    def leave(self, name: str) -> None:
        """Withdraws a record."""
        peer = self.peer(name)
        del self.records[peer]
        self.gone[peer] = self.now


@asynccontextmanager
async def served(swarm: FakeSwarm, endpoint: Endpoint = LOCAL) -> AsyncIterator[HttpServer]:
    """The page of such a swarm."""
    metrics = exposition(swarm.status, swarm.feed.totals)
    server = await HttpServer.start(endpoint, feed=swarm.feed, status=swarm.status, metrics=metrics)
    try:
        yield server
    finally:
        await server.stop()
