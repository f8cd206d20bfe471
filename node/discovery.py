"""Discovery on hivemind's DHT, in this process's own event loop.

What is published here is kept and served here too, so a record outlives the node that first took it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Final

from peerloom.node import dht_records as records
from peerloom.node.announce import announce_multiaddrs, best_first
from peerloom.node.backoff import Backoff
from peerloom.node.dht_records import PeerEntry
from peerloom.node.dht_stack import DhtStack
from peerloom.node.identity import Identity
from peerloom.node.p2pd import P2pDaemon, P2pdOptions, listen_multiaddrs
from peerloom.node.ports import HeldPort, hold_port
from peerloom.node.seams import Clock
from peerloom.node.seeds import ProbeReply, check_clock, probe_seeds
from peerloom.protocol.errors import LinkError, MalformedMessage, PeerloomError
from peerloom.protocol.invite import Invite
from peerloom.protocol.types import PROTOCOL_MAX, PROTOCOL_MIN, PeerId, PeerRecord, RunId, SignedSpec

log = logging.getLogger(__name__)

TEND_S: Final = 5.0  # between looks at whether the seeds are still with us
RESTART_DELAYS_S: Final = (0.0, 1.0, 5.0, 15.0, 30.0)  # before each attempt in a row to bring p2pd back
STEADY_S: Final = 60.0  # p2pd that lived this long starts the delays anew
MAX_CONTACTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    identity: Identity
    identity_path: Path | None
    seeds: tuple[Invite, ...]
    hosts: tuple[str, ...]
    announce: tuple[str, ...]
    clock: Clock
    client_only: bool
    port_map: bool


@dataclass(slots=True)
class _Own:
    """This node's last word, to publish again after a restart of p2pd."""

    record: PeerRecord | None = None
    first_issued_at: float = 0.0
    issued_at: float = 0.0
    expires_at: float = 0.0


class DhtDiscovery:
    """node.seams.Discovery on a hivemind DHT; `closed` is set when it has ended, `failure` says why if by itself.

    `warnings` holds sentences for the user from the join; `seed_runs` the runs the seeds say they
    are in; `rival` another node's record under this node's peer id.
    """

    def __init__(self, settings: _Settings, run_id: RunId | None) -> None:
        self._settings = settings
        self._clock = settings.clock
        self.run_id = run_id
        self.peer_id = settings.identity.peer_id
        self.closed = asyncio.Event()
        self.failure: str | None = None
        self.warnings: list[str] = []
        self.seed_runs: set[RunId] = set()
        self.rival: PeerRecord | None = None
        self.restarts = 0  # of p2pd, by itself
        self.restarted = asyncio.Event()
        self._ports: list[HeldPort] = []
        self._stack: DhtStack | None = None
        self._own = _Own()
        self._seen: dict[PeerId, PeerEntry] = {}
        self._contacts: dict[PeerId, str] = {}
        self._hooks: list[Callable[[P2pDaemon], Awaitable[None]]] = []
        self._has_moved = asyncio.Event()
        self._redials: dict[PeerId, Backoff] = {}
        self._rng = random.Random(settings.identity.peer_id)
        self._kept: list[tuple[Any, Any]] = []  # what a life of p2pd that ended had stored
        self._tasks: list[asyncio.Task[None]] = []

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
        settings = _Settings(
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
        self._tasks = [
            asyncio.create_task(self._supervise(), name="discovery supervisor"),
            asyncio.create_task(self._tend(), name="discovery tending"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        return self

    def _hold_ports(self, port: int) -> None:
        for host in self._settings.hosts:
            self._ports.append(hold_port(host, port))
            port = self._ports[0].port

    @property
    def port(self) -> int:
        """The TCP port p2pd listens on; 0 for a client."""
        return self._ports[0].port if self._ports else 0

    @property
    def p2pd_pid(self) -> int | None:
        """Of the libp2p daemon, None while it is down."""
        return self._stack.daemon.pid if self._stack else None

    # -- joining ------------------------------------------------------------------------------------------------

    async def _join(self) -> None:
        stack = await self._start_stack()
        good: list[Invite] = []
        if seeds := self._other_seeds():
            reports = await probe_seeds(stack.daemon, seeds, self._clock, self.run_id)
            if warning := check_clock(reports):
                self.warnings.append(warning)
                log.warning("%s", warning)
            good = [report.invite for report in reports]
            self.seed_runs = {RunId(report.reply.run_id) for report in reports if report.reply.run_id is not None}
        await stack.join(good, self._clock.wall, self._settings.client_only)

    async def _start_stack(self) -> DhtStack:
        hosts = () if self._settings.client_only else self._settings.hosts
        options = P2pdOptions(
            listen=listen_multiaddrs(hosts, self.port),
            announce=announce_multiaddrs(self._settings.announce, self.port),
            identity_path=self._settings.identity_path,
            port_map=self._settings.port_map and any(host in ("0.0.0.0", "::") for host in hosts),
        )
        stack = await DhtStack.start(options, self._probe_reply)
        try:
            for hook in self._hooks:
                await hook(stack.daemon)
        except BaseException:
            await stack.stop()
            raise
        self._stack = stack
        return stack

    async def attach(self, hook: Callable[[P2pDaemon], Awaitable[None]]) -> None:
        """Has `hook` see each life of p2pd, this one first, before its DHT takes part."""
        self._hooks.append(hook)
        if self._stack is not None:
            await hook(self._stack.daemon)

    async def libp2p_addresses(self) -> tuple[str, ...]:
        """The multiaddrs of p2pd that others can dial, best first, those that a router has mapped among them."""
        if self._stack is None or self._settings.client_only:
            return ()
        try:
            return tuple(best_first(await self._stack.daemon.addresses()))
        except (LinkError, TimeoutError) as error:
            log.debug("no addresses of p2pd: %s", error)
            return ()

    async def moved(self) -> None:
        """This machine's addresses are others now: drops connections that lead nowhere any more.

        All whom it knew are dialled anew, at once but after this returns.
        """
        if (stack := self._stack) is not None:
            self._contacts |= await stack.contacts()
            await stack.hang_up()
        self._redials.clear()
        self._has_moved.set()

    def _probe_reply(self) -> ProbeReply:
        return ProbeReply(
            wall=self._clock.wall(),
            version=package_version("peerloom"),
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            run_id=self.run_id,
        )

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

    async def invites(self) -> list[str]:
        """The lines others may join by, best first; a node on loopback alone names that."""
        if self._stack is None or self._settings.client_only:
            return []
        addresses = best_first(await self._stack.daemon.addresses())
        return [str(Invite(address, self.peer_id, self.run_id)) for address in addresses]

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

    async def _store(self, key: bytes, subkey: str, value: bytes, expires_at: float) -> bool:
        stack = self._stack
        if stack is None:
            return False
        return await stack.store(key, subkey, value, expires_at) or self._alone(stack)

    async def _find(self, key: bytes) -> list[tuple[str, bytes, float]]:
        return await self._stack.find(key) if self._stack else []

    def _alone(self, stack: DhtStack) -> bool:
        """Whether there is nobody to take a record: no node in sight, none in memory, no seed to expect."""
        return not (stack.has_neighbours() or self._contacts or self._other_seeds())

    def _other_seeds(self) -> list[Invite]:
        return [seed for seed in self._settings.seeds if seed.peer_id != self.peer_id]

    # -- staying alive ------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Brings p2pd back when it ends; gives up after the last of RESTART_DELAYS_S, with `failure` and `closed`."""
        loop, attempt = asyncio.get_running_loop(), 0
        while self._stack is not None:
            began = loop.time()
            code = await asyncio.shield(self._stack.daemon.exited)
            attempt = 0 if loop.time() - began > STEADY_S else attempt
            log.warning("the libp2p daemon ended with code %s; starting it again", code)
            while not await self._restart(RESTART_DELAYS_S[attempt]):
                attempt += 1
                if attempt == len(RESTART_DELAYS_S):
                    self.failure = f"the libp2p daemon ended (code {code}) and could not be started again"
                    log.error("%s", self.failure)
                    self.closed.set()
                    return
            attempt = min(attempt + 1, len(RESTART_DELAYS_S) - 1)

    async def _restart(self, delay_s: float) -> bool:
        former, self._stack = self._stack, None
        if former is not None:
            self._kept = former.kept() or self._kept
            await former.stop()
        await asyncio.sleep(delay_s)
        try:
            stack = await self._start_stack()
            await stack.join([], self._clock.wall, self._settings.client_only)
        except (PeerloomError, OSError, TimeoutError) as error:
            log.warning("the libp2p daemon does not start: %s", error)
            return False
        stack.keep(self._kept)
        await self._reconnect(stack)
        if self._own.record is not None:
            await self.publish(self._own.record)
        self.restarts += 1
        self.restarted.set()
        return True

    async def _tend(self) -> None:
        """Remembers whom we are connected to, and dials seeds that we have lost; until cancelled."""
        while True:
            moved = self._has_moved.is_set()
            self._has_moved.clear()
            if (stack := self._stack) is not None:
                self._contacts |= await stack.contacts()
                for peer in list(self._contacts)[:-MAX_CONTACTS]:
                    del self._contacts[peer]
                await self._reconnect(stack, everybody=moved)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TEND_S):
                    await self._has_moved.wait()

    async def _reconnect(self, stack: DhtStack, *, everybody: bool = False) -> None:
        """Dials the seeds that are not connected and, when the routing table is empty, everybody we ever met.

        For ever, each with a backoff of its own: a cut of hours heals without a restart.
        """
        seeds = {seed.peer_id: seed.host_multiaddr for seed in self._other_seeds()}
        known = seeds if stack.has_neighbours() and not everybody else self._contacts | seeds
        await asyncio.gather(*(self._redial(stack, peer, at) for peer, at in (await stack.lost(known)).items()))

    async def _redial(self, stack: DhtStack, peer: PeerId, multiaddr: str) -> None:
        backoff, now = self._redials.setdefault(peer, Backoff(self._rng)), self._clock.monotonic
        try:
            backoff.check(now())
            await stack.greet(peer, multiaddr)
        except (LinkError, TimeoutError) as error:
            log.debug("%s at %s is not back: %s", peer, multiaddr, error)
            if backoff.due(now()):
                backoff.failed(now(), str(error))
        else:
            self._redials.pop(peer, None)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = f"{task.get_name()} failed: {error!r}"
            log.error("%s", self.failure, exc_info=error)
            self.closed.set()

    async def stop(self) -> None:
        """Leaves the DHT, ends p2pd and frees the port; safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.stop()
        for port in self._ports:
            port.release()
        self.closed.set()
