"""A node's part in hivemind's DHT: joining by seeds, and staying in it whatever ends or moves, until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Final

from peerloom.node.announce import announce_multiaddrs, best_first
from peerloom.node.backoff import Backoff
from peerloom.node.dht_stack import DhtStack, Room, no_wait
from peerloom.node.identity import Identity
from peerloom.node.p2pd import P2pDaemon, P2pdOptions, listen_multiaddrs
from peerloom.node.ports import HeldPort, hold_port
from peerloom.node.seams import Clock
from peerloom.node.seeds import ProbeReply, check_clock, probe_seeds
from peerloom.protocol.errors import LinkError, PeerloomError
from peerloom.protocol.invite import Invite
from peerloom.protocol.types import PROTOCOL_MAX, PROTOCOL_MIN, PeerId, RunId

log = logging.getLogger(__name__)

TEND_S: Final = 5.0  # between looks at whether the seeds are still with us
RESTART_DELAYS_S: Final = (0.0, 1.0, 5.0, 15.0, 30.0)  # before each attempt in a row to bring p2pd back
STEADY_S: Final = 60.0  # p2pd that lived this long starts the delays anew
MAX_CONTACTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a node joins the DHT with; see DhtDiscovery.create."""

    identity: Identity
    identity_path: Path | None
    seeds: tuple[Invite, ...]
    hosts: tuple[str, ...]
    announce: tuple[str, ...]
    clock: Clock
    client_only: bool
    port_map: bool


class DhtMember:
    """Joined by `_join()`, kept by `_keep()`; the base of DhtDiscovery, which says what its attributes mean."""

    def __init__(self, settings: Settings, run_id: RunId | None) -> None:
        self._settings = settings
        self._clock = settings.clock
        self.run_id = run_id
        self.peer_id = settings.identity.peer_id
        self.closed = asyncio.Event()
        self.failure: str | None = None
        self.warnings: list[str] = []
        self.seed_runs: set[RunId] = set()
        self.restarts = 0  # of p2pd, by itself
        self.restarted = asyncio.Event()
        self._ports: list[HeldPort] = []
        self._stack: DhtStack | None = None
        self._contacts: dict[PeerId, str] = {}
        self._hooks: list[Callable[[P2pDaemon], Awaitable[None]]] = []
        self.room: Room = no_wait  # what a find waits for
        self._has_moved = asyncio.Event()
        self._redials: dict[PeerId, Backoff] = {}
        self._rng = random.Random(settings.identity.peer_id)
        self._kept: list[tuple[Any, Any]] = []  # what a life of p2pd that ended had stored
        self._tasks: list[asyncio.Task[None]] = []

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

    async def invites(self) -> list[str]:
        """The lines others may join by, best first; a node on loopback alone names that."""
        if self._stack is None or self._settings.client_only:
            return []
        addresses = best_first(await self._stack.daemon.addresses())
        return [str(Invite(address, self.peer_id, self.run_id)) for address in addresses]

    def _alone(self, stack: DhtStack) -> bool:
        """Whether there is nobody to take a record: no node in sight, none in memory, no seed to expect."""
        return not (stack.has_neighbours() or self._contacts or self._other_seeds())

    def _other_seeds(self) -> list[Invite]:
        return [seed for seed in self._settings.seeds if seed.peer_id != self.peer_id]

    # -- staying alive ------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Stays in the DHT from now on."""
        self._tasks = [
            asyncio.create_task(self._supervise(), name="discovery supervisor"),
            asyncio.create_task(self._tend(), name="discovery tending"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def _republish(self) -> None:
        """Called in a new life of p2pd: what it published stands nowhere but with others."""

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
        await self._republish()
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
