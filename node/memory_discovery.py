"""Discovery without a network, for swarms in one process and in virtual time: the same rules, one shared registry."""

from __future__ import annotations

from peerloom.node.dht_records import (
    OUTRANK_S,
    SPEC_LIFE_S,
    PeerEntry,
    check_peer,
    fit,
    next_expiry,
    spec_is_signed,
    spec_run_id,
)
from peerloom.node.seams import Clock
from peerloom.protocol.types import PeerId, PeerRecord, RunId, SignedSpec

ANY_RUN = RunId("0" * 16)


class MemoryRegistry:
    """What a DHT would hold, of any number of runs; a peer in `cut` reaches nobody and reads nothing."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.cut: set[PeerId] = set()
        self.members: dict[RunId, set[PeerId]] = {}
        self._peers: dict[tuple[RunId, PeerId], PeerEntry] = {}
        self._specs: dict[RunId, tuple[float, SignedSpec]] = {}

    def put(self, run_id: RunId, entry: PeerEntry) -> None:
        """Stores an entry unless a newer one stands."""
        key = (run_id, entry.peer_id)
        if entry.outranks(self._peers.get(key)):
            self._peers[key] = entry

    def live(self, run_id: RunId) -> list[PeerRecord]:
        """The records that stand, in the order of their first publication."""
        now = self.clock.wall()
        self._peers = {key: entry for key, entry in self._peers.items() if entry.expires_at > now}
        return [entry.record for (run, _), entry in self._peers.items() if run == run_id and entry.record is not None]

    def left(self, run_id: RunId) -> dict[PeerId, float]:
        """Whose tombstone stands, and when it was put there."""
        return {
            peer: entry.issued_at
            for (run, peer), entry in self._peers.items()
            if run == run_id and entry.record is None
        }

    def put_spec(self, spec: SignedSpec) -> None:
        """Stores a spec for a day."""
        self._specs[spec_run_id(spec.text)] = (self.clock.wall() + SPEC_LIFE_S, spec)

    def specs(self) -> dict[RunId, SignedSpec]:
        """The specs that stand."""
        now = self.clock.wall()
        return {run_id: spec for run_id, (expires_at, spec) in self._specs.items() if expires_at > now}


class MemoryDiscovery:
    """One node's Discovery on a shared registry."""

    def __init__(self, registry: MemoryRegistry, peer_id: PeerId, run_id: RunId = ANY_RUN) -> None:
        self.peer_id = peer_id
        self.run_id = run_id
        self._registry = registry
        self._issued_at = 0.0
        self._expires_at = 0.0
        self._others().add(peer_id)

    def _others(self) -> set[PeerId]:
        return self._registry.members.setdefault(self.run_id, set())

    async def publish(self, record: PeerRecord) -> bool:
        """Stores this node's record for 30 s; False when it is cut off and others exist. Raises ValueError."""
        check_peer(record)
        if record.peer_id != self.peer_id:
            raise ValueError(f"{self.peer_id} cannot publish the record of {record.peer_id}")
        if self.peer_id in self._registry.cut:
            return len(self._others()) <= 1
        self._expires_at = next_expiry(self._registry.clock.wall(), self._expires_at)
        self._issued_at = record.issued_at
        entry = PeerEntry(
            peer_id=self.peer_id, issued_at=record.issued_at, expires_at=self._expires_at, record=fit(record)
        )
        self._registry.put(self.run_id, entry)
        return True

    async def peers(self) -> list[PeerRecord]:
        """All live records of the run but this node's own."""
        if self.peer_id in self._registry.cut:
            return []
        return [record for record in self._registry.live(self.run_id) if record.peer_id != self.peer_id]

    def left(self) -> dict[PeerId, float]:
        """Who has withdrawn its record, and when."""
        return {} if self.peer_id in self._registry.cut else self._registry.left(self.run_id)

    async def own_record(self) -> PeerRecord | None:
        """The live record under this node's own id."""
        if self.peer_id in self._registry.cut:
            return None
        return next((record for record in self._registry.live(self.run_id) if record.peer_id == self.peer_id), None)

    async def publish_spec(self, spec: SignedSpec) -> bool:
        """Stores a spec for a day; raises ValueError when its owner did not sign it."""
        if not spec_is_signed(spec):
            raise ValueError(f"the spec is not signed by {spec.owner}")
        if self.peer_id in self._registry.cut:
            return len(self._others()) <= 1
        self._registry.put_spec(spec)
        return True

    async def runs(self) -> dict[RunId, SignedSpec]:
        """All specs that stand."""
        return {} if self.peer_id in self._registry.cut else self._registry.specs()

    async def withdraw(self) -> None:
        """Puts a tombstone over this node's record, if it published one."""
        if self._expires_at and self.peer_id not in self._registry.cut:
            self._expires_at += OUTRANK_S
            issued_at = max(self._registry.clock.wall(), self._issued_at)
            entry = PeerEntry(peer_id=self.peer_id, issued_at=issued_at, expires_at=self._expires_at, record=None)
            self._registry.put(self.run_id, entry)

    async def stop(self) -> None:
        """Leaves; a record that was not withdrawn stands until it expires, as in the DHT."""
        self._others().discard(self.peer_id)
