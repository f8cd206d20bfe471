"""The processes of the reach benchmark: a relay, and ends whose calls go through it alone."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
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
from peerloom.protocol.dial_order import relay_address
from peerloom.protocol.invite import parse_invite
from peerloom.protocol.relay_desk import DeskLimits
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord
from tests.benchmarks.ends import on_uvloop, received
from tests.benchmarks.exchange_ends import ProductEnd

CALLS = 50  # small calls a turn


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
    """An end with a libp2p daemon, whose record gives the relay alone."""

    def __init__(self, invite: str, relay: PeerId, folder: Path) -> None:
        super().__init__(numel=0, encoding="fp32")
        self._invite, self._relay, self._folder = invite, relay, folder

    def sized(self, numel: int) -> RelayedEnd:
        """With so many parameters."""
        self._numel = numel
        return self

    async def start(self) -> PeerRecord:
        """Joins the relay's DHT, takes a place at the relay, listens."""
        self._identity = load_or_create(self._folder / "identity.key")
        self._discovery, self._reaching = await _join(self._identity, self._folder, [self._invite], self._clock)
        self._reaching._own_relays.append(lambda: frozenset({self._relay}))
        self._transport = GrpcTransport(
            identity=self._identity,
            certificate=self._certificate,
            run_id=self._spec.run_id,
            spec_hash=self._spec.spec_hash(),
            clock=self._clock,
            rng=random.Random(0),
            dialer=_Through(self._relay, self._reaching),
            origin_of=self._reaching.tunnels.origin_of,
        )
        record = await super().start()
        self._reaching.tunnels.serve(*self._transport.local())
        placed = asyncio.Event()
        self._keeping = asyncio.create_task(
            tunnel_keep.keep(
                self._reaching.tunnels, self._relay, self._clock, lambda *_: placed.set(), place=True
            )
        )
        await placed.wait()
        self._record = replace(record, addresses=("127.0.0.1:9",), reach="via", via=(self._relay,))
        return self._record

    async def stop(self) -> None:
        """Frees everything."""
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await super().stop()
        await self._reaching.stop()
        await self._discovery.stop()


class _Through(TunnelDialer):
    """Dials through one relay and nothing else: libp2p has connected the two ends as well, on loopback."""

    def __init__(self, relay: PeerId, reaching: Reaching) -> None:
        super().__init__(reaching.tunnels, reaching.book, reaching.clock, lambda _: None, lambda *_: None)
        self._relay = relay

    async def routes(self, peer: PeerRecord) -> tuple[str, ...]:
        """The relay."""
        return (relay_address(self._relay),)


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
    """Sends (invite, peer id), then relays until the benchmark is over."""
    on_uvloop(_relay(pipe))


async def _relay(pipe: Connection[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        identity = load_or_create(Path(name) / "identity.key")
        discovery, reaching = await _join(identity, Path(name), [], SystemClock())
        try:
            pipe.send(((await discovery.invites())[0], identity.peer_id))
            await received(pipe)
        finally:
            await reaching.stop()
            await discovery.stop()


def direct_end(pipe: Connection[Any, Any], numel: int) -> None:
    """Sends its record, takes the partner's, then answers turns."""
    on_uvloop(_serve(pipe, StatusEnd(numel, "fp32")))


def relayed_end(pipe: Connection[Any, Any], numel: int, invite: str, relay: PeerId) -> None:
    """The same, through the relay."""
    with tempfile.TemporaryDirectory() as name:
        on_uvloop(_serve(pipe, RelayedEnd(invite, relay, Path(name)).sized(numel)))


async def _serve(pipe: Connection[Any, Any], end: StatusEnd) -> None:
    """A number asks for so many exchanges, "calls" for the seconds of small calls, "wait" for nothing."""
    try:
        pipe.send(await end.start())
        end.meet(await received(pipe))
        pipe.send(None)
        while True:
            asked = await received(pipe)
            pipe.send(await _answer(end, asked))
    finally:
        await end.stop()


async def _answer(end: StatusEnd, asked: Any) -> list[float]:
    if asked == "calls":
        return await end.calls()
    if asked == "wait":
        return []
    times = []
    for _ in range(asked):
        await end.round()
        times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:], strict=False)]


