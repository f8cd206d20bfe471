"""How long it takes to publish a peer record and to read all of them, against bare hivemind DHTNodes.

    python -m tests.benchmarks.dht [--quick] [--full] [--json FILE]

N peers on loopback, each with a p2pd of its own, in the event loop of one process; as many bare nodes beside them in
that loop. Each keeps one record of the same size under one key; the two sides take turns, one call after another.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from peerloom.node.clock import SystemClock
from peerloom.node.dht_records import PEER_LIFE_S, encode_peer
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.identity import Identity, load_or_create
from peerloom.node.p2pd import load_hivemind
from peerloom.protocol.invite import Invite, parse_invite
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerRecord
from tests.benchmarks.rows import Row, main, median

QUICK_PEERS, PEERS = (16,), (16, 64, 256)
QUICK_CALLS, CALLS, FULL_CALLS = 24, 48, 200
AT_ONCE = 8  # joins, so that no seed times out
KEY = b"bare/peers"
MS = 1e3
T = TypeVar("T")


class OurPeer:
    """One node's DhtDiscovery, with a record to publish."""

    def __init__(self, discovery: DhtDiscovery, identity: Identity, clock: SystemClock) -> None:
        self.discovery, self._identity, self._clock = discovery, identity, clock

    def record(self) -> PeerRecord:
        """As a trainer's that has been running for a while."""
        now = self._clock.wall()
        return PeerRecord(
            peer_id=self._identity.peer_id,
            name="a benchmark's node",
            role="trainer",
            addresses=("127.0.0.1:4002", "192.168.1.17:4002"),
            cert_der=bytes(range(256)) + bytes(150),
            version="0.1.0",
            instance="ab" * 8,
            started_at=now - 3600,
            issued_at=now,
            state="training",
            init_digest="ab" * 32,
            layout_digest="cd" * 32,
            round=1234,
            step=24_680,
            tokens=25_272_320,
            tokens_per_s=12_345.6,
            loss=1.2345,
        )

    def value_bytes(self) -> int:
        """The length of the record as it is stored."""
        run_id = RunSpec().run_id
        return len(encode_peer(self._identity, run_id, self.record(), self._clock.wall() + PEER_LIFE_S))

    async def store(self) -> None:
        """Publishes; raises RuntimeError when no other node took it."""
        if not await self.discovery.publish(self.record()):
            raise RuntimeError("no node took the record")


class BarePeer:
    """One hivemind DHTNode as it comes, with a value of `size` bytes to store."""

    def __init__(self, node: Any, p2p: Any, size: int) -> None:
        self.node, self._p2p, self._value = node, p2p, bytes(size)

    async def store(self) -> None:
        """Stores; raises RuntimeError when no node took it."""
        from hivemind.utils import get_dht_time

        subkey = str(self._p2p.peer_id)
        if not await self.node.store(KEY, self._value, get_dht_time() + PEER_LIFE_S, subkey=subkey):
            raise RuntimeError("no node took the value")

    async def stop(self) -> None:
        """Ends the node and its p2pd."""
        await self.node.shutdown()
        await self._p2p.shutdown()


async def _our_peers(count: int, folder: Path, stack: AsyncExitStack) -> list[OurPeer]:
    clock = SystemClock()
    invites: list[Invite] = []

    async def one(index: int) -> OurPeer:
        path = folder / f"{count}-{index}.key"
        identity = load_or_create(path)
        discovery = await DhtDiscovery.create(
            identity=identity,
            identity_path=path,
            seeds=invites,
            host="127.0.0.1",
            clock=clock,
            run_id=RunSpec().run_id,
        )
        stack.push_async_callback(discovery.stop)
        return OurPeer(discovery, identity, clock)

    first = await one(0)
    invites = [parse_invite(line) for line in await first.discovery.invites()][:1]
    return [first, *await _in_batches(one, range(1, count))]


async def _bare_peers(count: int, size: int, stack: AsyncExitStack) -> list[BarePeer]:
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import P2P

    seeds: list[Any] = []

    async def one(_: int) -> BarePeer:
        p2p = await P2P.create(initial_peers=seeds, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        peer = BarePeer(await DHTNode.create(p2p=p2p, initial_peers=seeds), p2p, size)
        stack.push_async_callback(peer.stop)
        return peer

    first = await one(0)
    seeds = await first.node.get_visible_maddrs()
    return [first, *await _in_batches(one, range(1, count))]


async def _in_batches(one: Callable[[int], Awaitable[T]], indices: range) -> list[T]:
    made: list[T] = []
    for start in range(0, len(indices), AT_ONCE):
        made += await asyncio.gather(*(one(index) for index in indices[start : start + AT_ONCE]))
    return made


async def _timed(call: Awaitable[object]) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


async def time_calls(ours: Sequence[OurPeer], bare: Sequence[BarePeer], calls: int) -> dict[str, tuple[float, float]]:
    """Median seconds (ours, bare) of "store" and "get", the callers changing from call to call."""
    count = len(ours)
    for pair in zip(ours, bare, strict=True):  # all records stand before the first is read
        for each in pair:
            await each.store()
    times: dict[str, tuple[list[float], list[float]]] = {"store": ([], []), "get": ([], [])}
    for index in range(calls):
        our, its = ours[index % count], bare[index % count]
        times["store"][0].append(await _timed(our.store()))
        times["store"][1].append(await _timed(its.store()))
        times["get"][0].append(await _timed(our.discovery.peers()))
        times["get"][1].append(await _timed(its.node.get(KEY, latest=True)))
    return {name: (median(first), median(second)) for name, (first, second) in times.items()}


async def _measure(sizes: Sequence[int], calls: int) -> list[Row]:
    load_hivemind()
    found: list[Row] = []
    for peers in sizes:
        with tempfile.TemporaryDirectory(prefix="peerloom-dht-") as folder:
            async with AsyncExitStack() as stack:
                ours = await _our_peers(peers, Path(folder), stack)
                size = ours[0].value_bytes()
                bare = await _bare_peers(peers, size, stack)
                found += rows(peers, size, calls, await time_calls(ours, bare, calls))
    return found


def rows(peers: int, size: int, calls: int, seconds: dict[str, tuple[float, float]]) -> list[Row]:
    """`store_ms` and `get_ms` at 16 peers; at another number it ends the name: `store_ms_64`."""
    suffix = "" if peers == QUICK_PEERS[0] else f"_{peers}"
    what = {"store": "one record published", "get": "the records of all peers read and verified"}
    return [
        Row(
            name=f"{name}_ms{suffix}",
            value=ours * MS,
            unit="ms",
            baseline="bare hivemind DHTNode, its defaults, no signatures",
            baseline_value=bare * MS,
            setting=f"{what[name]}, {peers} peers in one process, records of {size} bytes, median of {calls} calls",
        )
        for name, (ours, bare) in seconds.items()
    ]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """16 peers in quick mode, 64 and 256 as well in full, 16 and 64 without either."""
    import uvloop

    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    sizes = QUICK_PEERS if arguments.quick else PEERS if arguments.full else PEERS[:2]
    calls = QUICK_CALLS if arguments.quick else FULL_CALLS if arguments.full else CALLS
    found: list[Row] = uvloop.run(_measure(sizes, calls))
    return found


if __name__ == "__main__":
    main("Publishing and reading of peer records", measure)
