"""Streams that ask too much of a relay: mute ones by the thousand, watchers, pings: bounded, refused, let go."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest

from peerloom.node import tunnel
from peerloom.node.clock import SystemClock
from peerloom.node.p2pd import Stream
from peerloom.node.tunnel import Tunnels
from peerloom.node.tunnel_pump import hang_up
from peerloom.protocol.relay_desk import DeskLimits, RelayDesk
from peerloom.protocol.tunnel import PING, Keep, decode_answer, encode_header
from peerloom.protocol.types import PeerId

FLOOD = 3_000
WITHIN_S = 120.0
EACH_BYTES = 100  # that a refused stream may leave behind at most; one that is let in takes thousands
ROOM_FDS = 8  # handles under way: the two ends of the one being refused, and of the loop


class Flooded:
    """A relay whose streams come from sockets, as hivemind would hand them in."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.desk = RelayDesk(PeerId("relay"), DeskLimits())
        self.tunnels = Tunnels(self.desk, SystemClock(), count=self.count)
        self.tasks: set[asyncio.Task[None]] = set()

    def count(self, metric: str, amount: float) -> None:
        self.counted[metric] += int(amount)

    async def stream_of(self, peer: str) -> Stream:
        return await asyncio.open_connection(sock=await self.socket_of(peer))

    async def socket_of(self, peer: str) -> socket.socket:
        near, far = socket.socketpair()
        info = SimpleNamespace(peer_id=peer)
        task = asyncio.create_task(self.tunnels._take(info, *await asyncio.open_connection(sock=far)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return near

    async def over(self) -> None:
        """Waits until the relay has done with all streams."""
        while self.tasks:
            await asyncio.wait(self.tasks)

    async def refused(self, peer: str) -> int:
        """One mute stream that is not let in; returns the handles open before it is closed."""
        stream = await self.stream_of(peer)
        assert decode_answer(await stream[0].readexactly(1)) in ("busy", "greedy")
        assert await stream[0].read() == b""
        handles = psutil.Process().num_fds()
        await hang_up(stream[1])
        return handles


def held() -> tuple[int, int]:
    gc.collect()
    return psutil.Process().num_fds(), tracemalloc.get_traced_memory()[0]


async def test_thousands_of_half_open_tunnels_of_one_peer_and_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "HEADER_S", 600.0)
    relay = Flooded()
    limits = relay.desk.limits
    one, others = limits.half_open_of_peer, limits.half_open - limits.half_open_of_peer
    waiting = [await relay.stream_of(name) for name in (*["greedy"] * one, *map(str, range(others)))]
    names = [*["greedy"] * (FLOOD // 2), *(f"peer{index}" for index in range(FLOOD // 2))]
    await relay.refused("greedy")  # whatever is made once is made now
    relay.counted.clear()
    tracemalloc.start()
    try:
        async with asyncio.timeout(WITHIN_S):
            before_fds, before_bytes = held()
            most_fds = max([await relay.refused(name) for name in names])
            after_fds, after_bytes = held()
        assert relay.counted == {"tunnels_refused_greedy": FLOOD // 2, "tunnels_refused_busy": FLOOD // 2}
        assert relay.desk.counts()["tunnels_half_open_now"] == limits.half_open
        assert most_fds <= before_fds + ROOM_FDS and after_fds <= before_fds
        assert after_bytes - before_bytes < EACH_BYTES * FLOOD
        await hang_up(*(writer for _, writer in waiting))
        await relay.over()
        assert relay.desk.counts()["tunnels_half_open_now"] == 0
        assert relay.counted["tunnels_refused_malformed"] == limits.half_open
    finally:
        tracemalloc.stop()
        await relay.tunnels.stop()
        await asyncio.gather(*relay.tasks, return_exceptions=True)


async def test_watchers_of_one_peer_are_bounded_and_those_gone_make_room() -> None:
    relay, streams = Flooded(), []

    async def watch() -> str:
        stream = await relay.stream_of("watcher")
        streams.append(stream)
        stream[1].write(encode_header(Keep(place=False)))
        return decode_answer(await stream[0].readexactly(1))

    try:
        async with asyncio.timeout(WITHIN_S):
            most = relay.desk.limits.watchers_of_peer
            assert [await watch() for _ in range(most + 1)] == ["taken"] * most + ["greedy"]
            await hang_up(*(writer for _, writer in streams))
            await relay.over()
            assert await watch() == "taken"
    finally:
        await relay.tunnels.stop()
        await hang_up(*(writer for _, writer in streams))


async def test_a_burst_of_pings_is_answered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "PING_FLOOR_S", 600.0)
    relay = Flooded()
    stream = await relay.stream_of("watcher")
    try:
        async with asyncio.timeout(WITHIN_S):
            stream[1].write(encode_header(Keep(place=False)) + 100 * PING)
            assert decode_answer(await stream[0].readexactly(1)) == "taken"
            assert len(await stream[0].read(100)) == 1, "the first at once, the others each in its time"
    finally:
        await relay.tunnels.stop()
        await hang_up(stream[1])


async def test_one_that_pings_and_never_reads_leaves_no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "PING_FLOOR_S", 0.0)
    monkeypatch.setattr(tunnel, "KEEP_S", 0.1)
    relay, before = Flooded(), psutil.Process().num_fds()
    with await relay.socket_of("mute") as near:
        async with asyncio.timeout(WITHIN_S):
            near.sendall(encode_header(Keep(place=False)) + 4000 * PING)  # more answers than the socket takes
            await relay.over()
            for _ in range(3):
                await asyncio.sleep(0)  # the loop closes what is given up in its next rounds
            assert psutil.Process().num_fds() <= before + 1, "its own end alone is left"
        assert len(near.recv(1 << 16)) < 4000, "some answers were left waiting"
    await relay.tunnels.stop()
