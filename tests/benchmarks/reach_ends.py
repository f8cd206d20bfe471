"""The processes of the reach benchmark: a relay, and ends whose calls go through it alone."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from peerloom.node import tunnel_keep
from peerloom.node.clock import SystemClock
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import load_or_create
from peerloom.node.reaching import Reaching
from peerloom.node.tunnel_dialer import TunnelDialer
from peerloom.protocol.dial_order import relay_address, relay_of
from peerloom.protocol.errors import PeerError
from peerloom.protocol.invite import parse_invite
from peerloom.protocol.relay_desk import DeskLimits
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord
from tests.benchmarks.ends import on_uvloop, received
from tests.benchmarks.exchange_ends import ProductEnd

CALLS = 50  # small calls a turn
AGAIN_S = 0.05  # after a call that failed


class StatusEnd(ProductEnd):
    """A ProductEnd that answers Status, and asks its partner's."""

    async def start(self) -> PeerRecord:
        """Listens; returns this end's record."""
        self._record = await super().start()
        return self._record

    def meet(self, partner: PeerRecord) -> None:
        """Sees the one partner."""
        super().meet(partner)
        self._other = partner

    async def status(self) -> NodeStatus:
        return NodeStatus(record=self._record)

    async def calls(self) -> list[float]:
        """The seconds of each of CALLS small calls, one after the other."""
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            await self._transport.status(self._other)
            times.append(time.perf_counter() - began)
        return times


class RelayedEnd(StatusEnd):
    """An end with a libp2p daemon, whose record gives the relays alone; `relays` are invites and peer ids."""

    def __init__(self, relays: Sequence[tuple[str, PeerId]], folder: Path) -> None:
        super().__init__(numel=0, encoding="fp32")
        self._invites = [invite for invite, _ in relays]
        self._relays = tuple(peer for _, peer in relays)
        self._folder = folder

    def sized(self, numel: int) -> RelayedEnd:
        """With so many parameters."""
        self._numel = numel
        return self

    async def start(self) -> PeerRecord:
        """Joins the relays' DHT, takes a place at each, listens."""
        self._identity = load_or_create(self._folder / "identity.key")
        self._discovery, self._reaching = await _join(self._identity, self._folder, self._invites, self._clock)
        self._reaching._own_relays.append(lambda: frozenset(self._relays))
        self._dialer = _Through(self._relays, self._reaching)
        self._transport = GrpcTransport(
            identity=self._identity,
            certificate=self._certificate,
            run_id=self._spec.run_id,
            spec_hash=self._spec.spec_hash(),
            clock=self._clock,
            rng=random.Random(0),
            dialer=self._dialer,
            origin_of=self._reaching.tunnels.origin_of,
        )
        record = await super().start()
        self._reaching.tunnels.serve(*self._transport.local())
        self._keeping: list[asyncio.Task[str]] = []
        await asyncio.gather(*map(self._take_place, self._relays))
        self._record = replace(record, addresses=("127.0.0.1:9",), reach="via", via=self._relays)
        return self._record

    async def _take_place(self, relay: PeerId) -> None:
        placed = asyncio.Event()
        keeping = tunnel_keep.keep(
            self._reaching.tunnels, relay, self._clock, lambda *_: placed.set(), place=True
        )
        self._keeping.append(asyncio.create_task(keeping))
        await placed.wait()

    def way(self) -> PeerId | None:
        """The relay that calls go through now."""
        return relay_of(self._dialer._last.get(self._other.peer_id, ""))

    async def failover(self) -> float:
        """Calls without end until a call has gone through another relay than now; returns when (monotonic)."""
        used = self.way()
        while True:
            try:
                await self._transport.status(self._other)
            except PeerError:
                await asyncio.sleep(AGAIN_S)
            else:
                if self.way() != used:
                    return time.monotonic()

    async def stop(self) -> None:
        """Frees everything."""
        for keeping in self._keeping:
            keeping.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await super().stop()
        await self._reaching.stop()
        await self._discovery.stop()


class _Through(TunnelDialer):
    """Dials through relays and nothing else: libp2p has connected the two ends as well, on loopback."""

    def __init__(self, relays: tuple[PeerId, ...], reaching: Reaching) -> None:
        super().__init__(reaching.tunnels, reaching.book, reaching.clock, lambda _: None, lambda *_: None)
        self._relays = relays

    async def routes(self, peer: PeerRecord) -> tuple[str, ...]:
        """The relays, that used last first."""
        ways = map(relay_address, self._book.order(self._relays, self.clock.monotonic()))
        return tuple(sorted(ways, key=lambda way: way != self._last.get(peer.peer_id)))


async def _join(identity: Any, folder: Path, invites: list[str], clock: Any) -> tuple[DhtDiscovery, Reaching]:
    discovery = await DhtDiscovery.create(
        identity=identity,
        identity_path=folder / "identity.key",
        seeds=[parse_invite(each) for each in invites],
        host="127.0.0.1",
        clock=clock,
        run_id=RunSpec().run_id,
    )
    reaching = Reaching.build(identity.peer_id, clock, DeskLimits(), lambda _: None, lambda *_: None, frozenset())
    await discovery.attach(reaching.tunnels.attach)
    return discovery, reaching


def relay(pipe: Connection[Any, Any]) -> None:
    """Sends (invite, peer id, process id of p2pd), then relays until the benchmark is over."""
    on_uvloop(_relay(pipe))


async def _relay(pipe: Connection[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        identity = load_or_create(Path(name) / "identity.key")
        discovery, reaching = await _join(identity, Path(name), [], SystemClock())
        reaching.tunnels.listen(("127.0.0.1",), 0)
        try:
            pipe.send(((await discovery.invites())[0], identity.peer_id, discovery.p2pd_pid))
            await received(pipe)
        finally:
            await reaching.stop()
            await discovery.stop()


def direct_end(pipe: Connection[Any, Any], numel: int) -> None:
    """Sends its record, takes the partner's, then answers turns."""
    on_uvloop(_serve(pipe, StatusEnd(numel, "fp32")))


def relayed_end(pipe: Connection[Any, Any], numel: int, relays: Sequence[tuple[str, PeerId]]) -> None:
    """The same, through one of the relays."""
    with tempfile.TemporaryDirectory() as name:
        on_uvloop(_serve(pipe, RelayedEnd(relays, Path(name)).sized(numel)))


async def _serve(pipe: Connection[Any, Any], end: StatusEnd) -> None:
    """A number asks for so many exchanges, "calls" for the seconds of small calls, "wait" for nothing.

    A relayed end also takes "way", for the relay in use, and "failover".
    """
    try:
        pipe.send(await end.start())
        end.meet(await received(pipe))
        pipe.send(None)
        while True:
            asked = await received(pipe)
            pipe.send(await _answer(end, asked))
    finally:
        await end.stop()


async def _answer(end: StatusEnd, asked: Any) -> Any:
    if isinstance(end, RelayedEnd) and asked == "way":
        return end.way()
    if isinstance(end, RelayedEnd) and asked == "failover":
        return await end.failover()
    if asked == "calls":
        return await end.calls()
    if asked == "wait":
        return []
    times = []
    for _ in range(asked):
        await end.round()
        times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:], strict=False)]
