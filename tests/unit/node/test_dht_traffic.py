"""The DHT's own traffic under the caps: in virtual time to the byte, and as the kernel counts what p2pd moves."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from peerloom.node.dht_traffic import DhtTraffic
from peerloom.node.memory_transport import MemoryHub
from peerloom.node.tcp_bytes import Moved, TcpBytes
from peerloom.node.throttle import Caps, Traffic
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.protocol.messages import Chunk
from peerloom.protocol.services import EXCHANGE
from tests.unit.node.discovery_swarm import DhtSwarm
from tests.unit.node.reach_swarm import ReachSwarm
from tests.unit.node.test_throttle import RATE, A, B, C, exchange, swap, windows
from tests.unit.node.test_tunnel import echo, placed, through_relays_alone

from .wire import Handler, record_of

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")


class Meter(TcpBytes):
    """Tells what a test says has moved."""

    def __init__(self, moved: Callable[[], int]) -> None:
        self._moved = moved

    def read(self) -> Moved:
        return Moved(self._moved(), self._moved())


@pytest.mark.parametrize(
    ("capped", "index", "used"), [("upload", 0, 0.95), ("download", 1, 0.8)], ids=["upload", "download"]
)
def test_every_five_seconds_of_exchanges_and_the_dht_keep_to_the_cap(capped: str, index: int, used: float) -> None:
    """Two exchanges at once, answers of a DHT at any time and, of a download, a find of a fifth of the cap's 5 s.

    `used` is the part of the cap that is used up on the whole: a burst costs its own size once more.
    """
    samples: list[tuple[float, int]] = []
    dht, counted = 0, dict.fromkeys(("dht_sent_bytes", "dht_received_bytes"), 0.0)

    async def body() -> None:
        clock, rng = VirtualClock(), random.Random(1)
        hub = MemoryHub(clock, random.Random(0), latency_s=0.01, bandwidth=10e6)
        records = []
        for peer in (B, C):
            records.append(record_of(peer, await hub.transport(peer).start(Handler(swap)), b"memory"))
        mine = hub.transport(A, caps=Caps(**{capped: RATE}))
        traffic = mine._traffic

        def count(metric: str, amount: float) -> None:
            counted[metric] += amount

        async def answer() -> None:
            nonlocal dht
            while True:
                await asyncio.sleep(rng.expovariate(5.0))
                dht += 3_000

        async def find() -> None:
            nonlocal dht
            while index == 1:
                await asyncio.sleep(rng.uniform(5.0, 10.0))
                await traffic.save(100_000)
                for _ in range(10):
                    dht += 10_000
                    await asyncio.sleep(0.02)

        async def sample() -> None:
            while True:
                samples.append((clock.monotonic(), mine.bytes_moved()[index] + dht))
                await asyncio.sleep(0.05)

        looking = DhtTraffic(traffic, lambda: 1, clock, count, lambda _: Meter(lambda: dht))
        jobs = [asyncio.create_task(job()) for job in (answer, find, sample, looking.run)]
        await asyncio.gather(*(exchange(mine, record) for record in records))
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    run_virtual(body)
    found = windows([sample for sample in samples if sample[0] > 5.0])
    assert len(found) > 500
    assert max(found) <= 1.05 * 5 * RATE
    assert sum(found) / len(found) >= used * 5 * RATE
    assert dht > 0.1 * samples[-1][1] and dht - 50_000 < counted["dht_sent_bytes"] <= dht


def test_a_dht_above_the_cap_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        clock, moved = VirtualClock(), [0]
        traffic, meter = Traffic(clock, Caps(upload=RATE)), Meter(lambda: moved[0])
        looking = DhtTraffic(traffic, lambda: 1, clock, lambda *_: None, lambda _: meter)
        for _ in range(10):
            moved[0] += RATE
            looking.look()
            await asyncio.sleep(0.2)

    with caplog.at_level(logging.WARNING):
        run_virtual(body)
    assert [record.getMessage() for record in caplog.records] == [
        "the DHT alone sends more than --max-upload allows, and nothing can hold it back: raise the cap"
    ]


async def test_a_machine_that_does_not_tell_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(pid: int) -> TcpBytes:
        raise OSError("no such thing here")

    traffic = Traffic(VirtualClock(), Caps(upload=RATE))
    with caplog.at_level(logging.WARNING):
        await DhtTraffic(traffic, lambda: 1, VirtualClock(), lambda *_: None, refuses).run()
    assert caplog.messages == ["what the DHT moves is not held against the caps: no such thing here"]


@on_linux
async def test_the_kernels_count_is_exact() -> None:
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accepted.put((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    before = TcpBytes(os.getpid()).read()
    meter = TcpBytes(os.getpid())
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    far_reader, far_writer = await accepted.get()
    writer.write(bytes(123_456))
    await far_reader.readexactly(123_456)
    assert meter.read() == Moved(before.sent + 123_456, before.received + 123_456)  # both ends are ours
    far_writer.write(bytes(1_000))
    await reader.readexactly(1_000)
    meter.read()
    for each in (writer, far_writer):
        each.close()
        await each.wait_closed()
    server.close()
    await server.wait_closed()
    assert meter.read() == Moved(before.sent + 124_456, before.received + 124_456)


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[ReachSwarm]:
    async with ReachSwarm(tmp_path) as made:
        yield made


@on_linux
async def test_what_one_node_of_a_dht_sends_the_other_receives(tmp_path: Path) -> None:
    dht = DhtSwarm(tmp_path)
    try:
        one, other = await dht.join(), await dht.join()
        counted: dict[str, float] = {"dht_sent_bytes": 0.0, "dht_received_bytes": 0.0}

        def count(metric: str, amount: float) -> None:
            counted[metric] += amount

        traffic = Traffic(VirtualClock())
        looking = DhtTraffic(traffic, lambda: other.dht().p2pd_pid, VirtualClock(), count)
        assert one.dht().p2pd_pid is not None
        meter = TcpBytes(one.dht().p2pd_pid)
        assert await one.discovery.publish(one.record())
        for _ in range(20):
            assert len(await other.discovery.peers()) == 1
        looking.look()
        assert counted["dht_received_bytes"] > 20 * 500 + counted["dht_sent_bytes"]  # one process's, not both's
        async with asyncio.timeout(10):
            while (counted["dht_sent_bytes"], counted["dht_received_bytes"]) != meter.read()[::-1]:
                await asyncio.sleep(0.05)
                looking.look()
    finally:
        await dht.stop()


@on_linux
async def test_a_tunnel_that_crosses_p2pd_is_not_counted_twice(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, node, caller = [await swarm.join(leg_port=False) for _ in range(3)]
    node.handler.on_exchange = echo
    through_relays_alone(caller, monkeypatch)
    looking: list[tuple[Any, DhtTraffic, TcpBytes]] = []
    for member in (relay, node, caller):
        pid = member.discovery.p2pd_pid
        assert pid is not None
        traffic, counts = member.transport._traffic, member.counted

        def count(metric: str, amount: float, counts: dict[str, float] = counts) -> None:
            counts[metric] = counts.get(metric, 0.0) + amount

        looking.append((member, DhtTraffic(traffic, lambda pid=pid: pid, swarm.clock, count), TcpBytes(pid)))
    pieces, size = 16, 1 << 18
    async with placed(swarm, node, relay) as record:
        stream = await caller.transport.open(record, EXCHANGE)
        for index in range(pieces):
            await stream.send(Chunk(index * size, bytes(size)))
            assert await stream.receive() is not None
            for _, job, _ in looking:
                job.look()
        await stream.close()
        for member, job, meter in looking:
            job.look()
            moved = pieces * size * (2 if member is relay else 1)
            assert min(meter.read()) > moved
            assert member.counted["dht_sent_bytes"] < 0.05 * moved
            assert member.counted["dht_received_bytes"] < 0.25 * moved  # what was on its way counts once
