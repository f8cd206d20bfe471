"""Discovery on hivemind's DHT, in this process's own event loop.

What is published here is kept and served here too, so a record outlives the node that first took it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peerloom.node import dht_records as records
from peerloom.node.dht_member import DhtMember, Settings
from peerloom.node.dht_records import PeerEntry
from peerloom.node.identity import Identity
from peerloom.node.seams import Clock
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.invite import Invite
from peerloom.protocol.types import PeerId, PeerRecord, RunId, SignedSpec

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Own:
    """This node's last word, to publish again after a restart of p2pd."""

    record: PeerRecord | None = None
    first_issued_at: float = 0.0
    issued_at: float = 0.0
    expires_at: float = 0.0


class DhtDiscovery(DhtMember):
    """node.seams.Discovery on a hivemind DHT; `closed` is set when it has ended, `failure` says why if by itself.

    `warnings` holds sentences for the user from the join; `seed_runs` the runs the seeds say they
    are in; `rival` another node's record under this node's peer id.
    """

    def __init__(self, settings: Settings, run_id: RunId | None) -> None:
        super().__init__(settings, run_id)
        self.rival: PeerRecord | None = None
        self._own = _Own()
        self._seen: dict[PeerId, PeerEntry] = {}

    @classmethod
    async def create(
        cls,
        *,
        identity: Identity,
        identity_path: Path | None,
        clock: Clock,
        seeds: Sequence[Invite] = (),
        host: str | Sequence[str] = "0.0.0.0",
        port: int = 0,
        announce: Sequence[str] = (),
        client_only: bool = False,
        run_id: RunId | None = None,
        port_map: bool = True,
    ) -> DhtDiscovery:
        """Listens on `port` of each IP address in `host`, probes the seeds, and joins the DHT by those that answer.

        `announce` are multiaddrs to give to others (without a port: the one bound). A client listens on nothing and
        publishes nothing; it alone may have no identity file. Raises ConfigError, PortInUse, SeedUnreachable,
        RunMismatch, VersionMismatch or ClockSkew.
        """
        settings = Settings(
            identity=identity,
            identity_path=identity_path,
            seeds=tuple(seeds),
            hosts=(host,) if isinstance(host, str) else tuple(host),
            announce=tuple(announce),
            clock=clock,
            client_only=client_only,
            port_map=port_map,
        )
        self = cls(settings, run_id)
        try:
            if not client_only:
                self._hold_ports(port)
            await self._join()
        except BaseException:
            await self.stop()
            raise
        self._keep()
        return self

    def join_run(self, run_id: RunId) -> None:
        """Says which run this node is in, once it has found out by `runs()`."""
        self.run_id = run_id
        self._seen.clear()

    def _run(self) -> RunId:
        if self.run_id is None:
            raise ValueError("no run was joined: call join_run first")
        return self.run_id

    def records_kept(self) -> int:
        """How many live records of the DHT this node stores."""
        return self._stack.records_kept() if self._stack is not None else 0

    # -- records ------------------------------------------------------------------------------------------------

    async def publish(self, record: PeerRecord) -> bool:
        """Signs and stores this node's record for 30 s; False when others exist and none took it. Raises ValueError."""
        if record.peer_id != self.peer_id:
            raise ValueError(f"{self.peer_id} cannot publish the record of {record.peer_id}")
        own, run_id = self._own, self._run()
        own.expires_at = records.next_expiry(self._clock.wall(), own.expires_at)
        value = records.encode_peer(self._settings.identity, run_id, record, own.expires_at)
        own.first_issued_at = own.first_issued_at or record.issued_at
        own.record, own.issued_at = record, record.issued_at
        return await self._store(records.peers_key(run_id), self.peer_id, value, own.expires_at)

    async def withdraw(self) -> None:
        """Puts a tombstone over this node's record, if it published one."""
        own = self._own
        if own.record is None:
            return
        own.record, own.expires_at = None, own.expires_at + records.OUTRANK_S
        own.issued_at = max(self._clock.wall(), own.issued_at)
        value = records.encode_gone(self._settings.identity, self._run(), own.issued_at, own.expires_at)
        await self._store(records.peers_key(self._run()), self.peer_id, value, own.expires_at)

    async def publish_spec(self, spec: SignedSpec) -> bool:
        """Stores a spec for a day under its run and in the list of runs; ValueError when its owner did not sign it."""
        if not records.spec_is_signed(spec):
            raise ValueError(f"the spec is not signed by {spec.owner}")
        run_id, value = records.spec_run_id(spec.text), records.encode_spec(spec)
        expires_at = self._clock.wall() + records.SPEC_LIFE_S
        return all(
            await asyncio.gather(
                self._store(records.RUNS_KEY, run_id, value, expires_at),
                self._store(records.spec_key(run_id), spec.owner, value, expires_at),
            )
        )

    async def peers(self) -> list[PeerRecord]:
        """All live records of the run, verified, this node's own left out; what was seen stays until it expires."""
        run_id = self._run()
        for subkey, value, expires_at in await self._find(records.peers_key(run_id)):
            try:
                entry = records.decode_peer(run_id, PeerId(subkey), value, expires_at)
            except MalformedMessage as error:
                log.debug("a record of %s is left out: %s", subkey, error)
                continue
            if entry.outranks(self._seen.get(entry.peer_id)):
                self._seen[entry.peer_id] = entry
        now = self._clock.wall()
        self._seen = {peer: entry for peer, entry in self._seen.items() if entry.expires_at > now}
        self._look_for_rival()
        return [
            entry.record
            for peer, entry in self._seen.items()
            if entry.record is not None and peer != self.peer_id and entry.issued_at <= now + records.SKEW_S
        ]

    def left(self) -> dict[PeerId, float]:
        """Who has withdrawn its record, and when (Unix seconds), as far as the last `peers` saw."""
        return {peer: entry.issued_at for peer, entry in self._seen.items() if entry.record is None}

    def _look_for_rival(self) -> None:
        entry, own = self._seen.get(self.peer_id), self._own
        if entry is None or entry.record is None or own.record is None or self.rival is not None:
            return
        if entry.record.instance != own.record.instance and entry.issued_at > own.first_issued_at:
            self.rival = entry.record
            log.error("another node runs with this node's identity %s (as %r)", self.peer_id, entry.record.name)

    async def own_record(self) -> PeerRecord | None:
        """The live record under this node's own id: of an earlier life, or of another node with the same key."""
        await self.peers()
        entry = self._seen.get(self.peer_id)
        return entry.record if entry is not None else None

    async def runs(self) -> dict[RunId, SignedSpec]:
        """The specs of all runs that this swarm knows, verified."""
        found: dict[RunId, SignedSpec] = {}
        for _, value, _ in await self._find(records.RUNS_KEY):
            try:
                run_id, spec = records.decode_spec(value)
            except MalformedMessage as error:
                log.debug("a spec is left out: %s", error)
                continue
            found[run_id] = spec
        return found

    async def _republish(self) -> None:
        if self._own.record is not None:
            await self.publish(self._own.record)

    async def _store(self, key: bytes, subkey: str, value: bytes, expires_at: float) -> bool:
        stack = self._stack
        if stack is None:
            return False
        return await stack.store(key, subkey, value, expires_at) or self._alone(stack)

    async def _find(self, key: bytes) -> list[tuple[str, bytes, float]]:
        return await self._stack.find(key, self.room) if self._stack else []
