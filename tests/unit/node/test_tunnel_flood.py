"""Thousands of tunnels whose header never comes: bounded, refused, counted, and no memory or handles for them."""

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
from peerloom.protocol.tunnel import decode_answer
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
        near, far = socket.socketpair()
        info = SimpleNamespace(peer_id=peer)
        task = asyncio.create_task(self.tunnels._take(info, *await asyncio.open_connection(sock=far)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return await asyncio.open_connection(sock=near)

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
        while relay.tasks:
            await asyncio.wait(relay.tasks)
        assert relay.desk.counts()["tunnels_half_open_now"] == 0
        assert relay.counted["tunnels_refused_malformed"] == limits.half_open
    finally:
        tracemalloc.stop()
        await relay.tunnels.stop()
        await asyncio.gather(*relay.tasks, return_exceptions=True)
