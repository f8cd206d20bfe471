"""Builders for tests of discovery: a clock to set, records to publish, and swarms of either implementation."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peerloom.node.discovery import DhtDiscovery
from peerloom.node.identity import Identity, load_or_create
from peerloom.node.memory_discovery import MemoryDiscovery, MemoryRegistry
from peerloom.node.seams import Clock
from peerloom.protocol.invite import Invite, parse_invite
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerId, PeerRecord, RunId

SPEC = RunSpec()
RUN = SPEC.run_id


def has_ipv6() -> bool:
    """Whether ::1 can be bound here."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@dataclass
class ShiftedClock:
    """The machine's clock, `shift` seconds on."""

    shift: float = 0.0

    def wall(self) -> float:
        return time.time() + self.shift

    def monotonic(self) -> float:
        return time.monotonic() + self.shift


@dataclass
class ManualClock:
    """Stands still until it is moved."""

    shift: float = 1_700_000_000.0

    def wall(self) -> float:
        return self.shift

    def monotonic(self) -> float:
        return self.shift


def record_of(peer_id: PeerId, clock: Clock, **changes: object) -> PeerRecord:
    """A record that may be published."""
    fields: dict[str, object] = {
        "peer_id": peer_id,
        "name": "a node",
        "role": "trainer",
        "addresses": ("127.0.0.1:4002", "[::1]:4002"),
        "cert_der": bytes(range(256)),
        "version": "0.1.0",
        "instance": "ab" * 8,
        "started_at": 1.0,
        "issued_at": clock.wall(),
        "state": "training",
        "loss": 2.5,
    }
    return PeerRecord(**fields | changes)  # type: ignore[arg-type]


@dataclass
class Member:
    """One node of a test swarm."""

    discovery: DhtDiscovery | MemoryDiscovery
    identity: Identity
    clock: Clock

    def record(self, **changes: object) -> PeerRecord:
        return record_of(self.identity.peer_id, self.clock, **changes)

    def dht(self) -> DhtDiscovery:
        assert isinstance(self.discovery, DhtDiscovery)
        return self.discovery

    async def invites(self) -> list[Invite]:
        return [parse_invite(line) for line in await self.dht().invites()]


@dataclass
class MemorySwarm:
    """Members on one registry."""

    clock: ManualClock = field(default_factory=ManualClock)
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = MemoryRegistry(self.clock)

    async def join(self) -> Member:
        identity = Identity.generate()
        member = Member(MemoryDiscovery(self.registry, identity.peer_id, RUN), identity, self.clock)
        self.members.append(member)
        return member

    async def stop(self) -> None:
        for member in self.members:
            await member.discovery.stop()


@dataclass
class DhtSwarm:
    """Members on loopback; each joins by all that joined before it."""

    folder: Path
    clock: ShiftedClock = field(default_factory=ShiftedClock)
    members: list[Member] = field(default_factory=list)

    async def join(
        self,
        seeds: Sequence[Invite] | None = None,
        host: str = "127.0.0.1",
        clock: Clock | None = None,
        run_id: RunId | None = RUN,
        client_only: bool = False,
    ) -> Member:
        path = self.folder / f"{len(self.members)}.key"
        identity = load_or_create(path)
        if seeds is None:
            seeds = [invite for member in self.members[:1] for invite in await member.invites()]
        clock = clock or self.clock
        discovery = await DhtDiscovery.create(
            identity=identity,
            identity_path=path,
            seeds=seeds,
            host=host,
            clock=clock,
            run_id=run_id,
            client_only=client_only,
        )
        member = Member(discovery, identity, clock)
        self.members.append(member)
        return member

    async def stop(self) -> None:
        for member in self.members:
            await member.discovery.stop()
