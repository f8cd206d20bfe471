"""Moving bytes: a tunnel's two ends joined back to back, with a relay in between, on loopback sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from peerloom.node.p2pd import Stream
from peerloom.node.tunnel_pump import Ending, hang_up, join, relay
from peerloom.protocol import tunnel
from peerloom.protocol.errors import LinkError, MalformedMessage


async def pair() -> tuple[Stream, Stream]:
    """Two ends of one connection."""
    near, far = socket.socketpair()
    return await asyncio.open_connection(sock=near), await asyncio.open_connection(sock=far)


def freely(_: int) -> float:
    """No cap."""
    return 0.0


class Path:
    """client – join – relay – join – server; `endings` are those of the two joins."""

    def __init__(self) -> None:
        self.client: Stream
        self.server: Stream
        self.jobs: list[asyncio.Task[Ending]] = []
        self.relaying: asyncio.Task[None]
        self.stops: list[Stream] = []

    async def build(self, idle_s: float = 60.0) -> None:
        self.client, local_a = await pair()
        out, relay_in = await pair()
        relay_out, into = await pair()
        self.server, local_b = await pair()
        self.stops = [relay_in, relay_out]
        self.jobs = [
            asyncio.create_task(join(local_a, out, freely, idle_s)),
            asyncio.create_task(join(local_b, into, freely, idle_s)),
        ]
        self.relaying = asyncio.create_task(relay(relay_in, relay_out, freely, idle_s))

    async def endings(self) -> list[Ending]:
        return list(await asyncio.gather(*self.jobs))


@asynccontextmanager
async def path(idle_s: float = 60.0) -> AsyncIterator[Path]:
    made = Path()
    await made.build(idle_s)
    try:
        yield made
    finally:
        await hang_up(made.client[1], made.server[1])
        for job in (*made.jobs, made.relaying):
            job.cancel()
        await asyncio.gather(*made.jobs, made.relaying, return_exceptions=True)


async def test_what_goes_in_comes_out_both_ways_at_once() -> None:
    there, back = bytes(range(256)) * 8192, bytes(reversed(range(256))) * 8192
    async with path() as made:
        for end, data in ((made.client, there), (made.server, back)):
            end[1].write(data)
            end[1].write_eof()
        got = await asyncio.gather(made.server[0].read(), made.client[0].read())
        assert got == [there, back]
        assert [ending.error for ending in await made.endings()] == [None, None]
        await made.relaying


async def test_a_direction_that_ended_leaves_the_other_open() -> None:
    async with path() as made:
        made.client[1].write(b"question")
        made.client[1].write_eof()
        assert await made.server[0].read() == b"question"
        made.server[1].write(b"answer")
        assert await made.client[0].readexactly(6) == b"answer"
        made.server[1].write_eof()
        assert await made.client[0].read() == b""
        first, second = await made.endings()
        assert (first.error, first.by_local, second.error, second.by_local) == (None, True, None, False)


async def test_nobody_reads_on_while_the_far_end_takes_nothing() -> None:
    async with path() as made:
        sent = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):  # what fits on the way is taken, and then no more
                while True:
                    made.client[1].write(bytes(1 << 18))
                    await made.client[1].drain()
                    sent += 1 << 18
        assert sent < 64 << 20
        assert len(await made.server[0].readexactly(sent)) == sent


async def test_a_relay_that_ends_is_told_as_broken_and_ends_both() -> None:
    async with path() as made:
        made.client[1].write(b"x")
        await made.server[0].readexactly(1)
        made.relaying.cancel()
        for ending in await made.endings():
            assert isinstance(ending.error, LinkError)
        assert await made.client[0].read() == b""


async def test_a_tunnel_on_which_nothing_moves_ends() -> None:
    async with path(idle_s=0.1) as made:
        for ending in await made.endings():
            assert isinstance(ending.error, LinkError)


async def test_frames_that_are_none_are_noticed() -> None:
    client, local = await pair()
    stream, crook = await pair()
    crook[1].write((tunnel.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    ending = await join(local, stream, freely)
    assert isinstance(ending.error, MalformedMessage)
    await hang_up(client[1], crook[1])
