"""Moving bytes: a tunnel's two ends joined back to back, with a relay in between, on loopback sockets.

Everything is asked of both forms, inside the kernel and copied, and on uvloop too, which a node runs on where it can.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest

from peerloom.node.p2pd import Stream
from peerloom.node.tunnel_pump import Ending, _idle, hang_up, join, relay
from peerloom.node.tunnel_taken import taken
from peerloom.node.virtual_time import run_virtual
from peerloom.protocol import tunnel
from peerloom.protocol.errors import LinkError, MalformedMessage

WITHIN_S = 30.0
ON_THE_WAY = 16 << 20  # bytes that sockets, pipes and readers may hold, with much to spare


@pytest.fixture(params=["spliced", "copied"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the bytes are moved."""
    if request.param == "copied":
        monkeypatch.delattr(os, "splice", raising=False)
    elif not hasattr(os, "splice"):
        pytest.skip("splice(2) is Linux's")
    return str(request.param)


pytestmark = pytest.mark.usefixtures("form")


async def pair() -> tuple[Stream, Stream]:
    """Two ends of one connection to p2pd."""
    near, far = socket.socketpair()
    return await asyncio.open_connection(sock=near), await asyncio.open_connection(sock=far)


async def local_pair() -> tuple[Stream, Stream]:
    """Two ends of one loopback connection, as grpc's to the pump."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return await asyncio.open_connection(sock=near), await asyncio.open_connection(sock=far)


def freely(_: int) -> float:
    """No cap."""
    return 0.0


FREELY = (freely, freely)


class Path:
    """client – join – relay – join – server; `endings` are those of the two joins."""

    def __init__(self) -> None:
        self.client: Stream
        self.server: Stream
        self.jobs: list[asyncio.Task[Ending]] = []
        self.relaying: asyncio.Task[None]

    async def build(self, idle_s: float = 60.0) -> None:
        self.client, local_a = await local_pair()
        out, relay_in = await pair()
        relay_out, into = await pair()
        self.server, local_b = await local_pair()
        self.jobs = [
            asyncio.create_task(join(local_a, out, FREELY, idle_s)),
            asyncio.create_task(join(local_b, into, FREELY, idle_s)),
        ]
        self.relaying = asyncio.create_task(relay(relay_in, relay_out, FREELY, idle_s))

    async def endings(self) -> list[Ending]:
        async with asyncio.timeout(WITHIN_S):
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


async def test_the_form_asked_for_is_the_one_tried(form: str) -> None:
    (near, far), (other_near, other_far) = await pair(), await pair()
    async with taken(near, other_near) as sockets:
        assert (sockets is not None) == (form == "spliced")
    await hang_up(near[1], far[1], other_near[1], other_far[1])


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
        assert second.by_far and second.heard_at > 0


async def test_nobody_reads_on_while_the_far_end_takes_nothing() -> None:
    async with path() as made:
        made.server[1].transport.pause_reading()  # type: ignore[attr-defined]  # typeshed: that of a WriteTransport
        before = psutil.Process().memory_info().rss
        piece, sent = bytes(range(256)) * 1024, 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):  # what fits on the way is taken, and then no more
                while sent < 4 * ON_THE_WAY:
                    made.client[1].write(piece)
                    await made.client[1].drain()
                    sent += len(piece)
        assert 0 < sent < ON_THE_WAY
        assert psutil.Process().memory_info().rss - before < 2 * ON_THE_WAY
        made.server[1].transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(sent // len(piece)):
            assert await made.server[0].readexactly(len(piece)) == piece


async def test_a_relay_that_ends_is_told_as_broken_and_ends_both() -> None:
    async with path() as made:
        made.client[1].write(b"x")
        await made.server[0].readexactly(1)
        made.relaying.cancel()
        for ending in await made.endings():
            assert isinstance(ending.error, LinkError)
        assert await made.client[0].read() == b""


async def test_a_relay_that_drops_the_rest_of_a_frame_is_told_as_broken() -> None:
    client, local = await local_pair()
    stream, crook = await pair()
    joined = asyncio.create_task(join(local, stream, FREELY))
    crook[1].write(tunnel.frame_head(100) + bytes(10))
    crook[1].write_eof()
    ending = await joined
    assert isinstance(ending.error, LinkError) and "broke off" in str(ending.error)
    await hang_up(client[1], crook[1])


async def test_a_tunnel_on_which_nothing_moves_ends() -> None:
    async with path(idle_s=0.1) as made:
        for ending in await made.endings():
            assert isinstance(ending.error, LinkError)


@pytest.mark.parametrize("early", [True, False])
async def test_frames_that_are_none_are_noticed(early: bool) -> None:
    client, local = await local_pair()
    stream, crook = await pair()
    joined = None if early else asyncio.create_task(join(local, stream, FREELY))
    crook[1].write(b"!" + (tunnel.MAX_FRAME_BYTES + 1).to_bytes(4, "big") if early else b"\xff" * 4)
    if early:
        await stream[0].readexactly(1)
    ending = await (joined or join(local, stream, FREELY))
    assert isinstance(ending.error, MalformedMessage)
    await hang_up(client[1], crook[1])


KEPT = [0, 2, 4, 5, 1000, 400_000]


@pytest.mark.parametrize("kept", KEPT)
async def test_what_a_reader_holds_when_its_stream_is_joined_comes_first(kept: int) -> None:
    """`kept` bytes follow the header at once: none, half a frame's head, some of a frame, more than a reader takes."""
    client, local = await local_pair()
    stream, far = await pair()
    data = os.urandom(450_000)
    framed = b"".join(tunnel.frame_head(150_000) + data[at : at + 150_000] for at in range(0, 450_000, 150_000))
    far[1].write(b"!" + framed[:kept])
    assert await stream[0].readexactly(1) == b"!"
    client[1].write(b"from here")
    joined = asyncio.create_task(join(local, stream, FREELY))
    far[1].write(framed[kept:] + tunnel.END)
    client[1].write_eof()
    async with asyncio.timeout(WITHIN_S):
        assert await client[0].read() == data
        assert await far[0].readexactly(4 + 9 + 4) == tunnel.frame_head(9) + b"from here" + tunnel.END
        assert (await joined).error is None
    await hang_up(client[1], far[1])


async def test_what_a_relay_holds_and_has_yet_to_write_comes_first() -> None:
    asker, one = await pair()
    other, target = await pair()
    asker[1].write(b"!" + b"early" * 1000)
    assert await one[0].readexactly(1) == b"!"
    answer = os.urandom(2 << 20)
    one[1].write(answer)  # more than the socket takes
    relaying = asyncio.create_task(relay(one, other, FREELY))
    target[1].write(b"late")
    asker[1].write_eof()
    async with asyncio.timeout(WITHIN_S):
        assert await asker[0].readexactly(len(answer)) == answer
        assert await target[0].read() == b"early" * 1000
        await relaying
    await hang_up(asker[1], target[1])


async def test_pieces_are_as_small_as_asked_and_wait_as_long_as_told() -> None:
    asker, one = await pair()
    other, target = await pair()
    passed: list[int] = []

    def passing(size: int) -> float:
        passed.append(size)
        return 0.001 * (len(passed) % 2)

    data = os.urandom(1 << 20)
    relaying = asyncio.create_task(relay(one, other, (passing, passing), read_bytes=1 << 14))
    asker[1].write(data)
    asker[1].write_eof()
    async with asyncio.timeout(WITHIN_S):
        assert await target[0].read() == data
        await relaying
    assert sum(passed) == len(data) and max(passed) <= 1 << 14
    await hang_up(asker[1], target[1])


async def in_order(made: Path) -> None:
    for end in (made.client, made.server):
        end[1].write_eof()
    await made.endings()


async def by_the_relay(made: Path) -> None:
    made.relaying.cancel()
    await made.endings()


async def by_cancelling_an_end(made: Path) -> None:
    made.jobs[0].cancel()
    await made.jobs[1]


async def by_a_reset(made: Path) -> None:
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    made.client[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    made.client[1].transport.abort()
    first, second = await made.endings()
    assert isinstance(first.error, LinkError) and isinstance(second.error, LinkError)


async def by_a_client_that_is_not_read_from(made: Path) -> None:
    made.client[1].write(bytes(4 << 20))
    made.client[1].transport.abort()
    made.server[1].transport.abort()
    await made.endings()


HOW = [in_order, by_the_relay, by_cancelling_an_end, by_a_reset, by_a_client_that_is_not_read_from]


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
async def test_no_handle_is_left_however_it_ends(how: Callable[[Path], Awaitable[None]]) -> None:
    async with path():
        pass  # what is made once is made now
    before = psutil.Process().num_fds()
    for under_way in (False, True):  # while it begins, and once bytes have passed
        async with path() as made, asyncio.timeout(WITHIN_S):
            await asyncio.sleep(0)
            if under_way:
                made.client[1].write(b"x")
                await made.server[0].readexactly(1)
            await how(made)
        await asyncio.sleep(0)
        assert psutil.Process().num_fds() <= before, under_way


async def test_an_idle_tunnel_leaves_no_handle_either() -> None:
    before = psutil.Process().num_fds()
    async with path(idle_s=0.05) as made:
        await made.endings()
    await asyncio.sleep(0)
    assert psutil.Process().num_fds() <= before


async def test_without_a_pipe_to_be_had_the_bytes_are_copied(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    if form == "copied":
        pytest.skip("no pipe is asked for")
    before = psutil.Process().num_fds()
    made_pipes = 0

    def pipe2(flags: int) -> tuple[int, int]:
        nonlocal made_pipes
        made_pipes += 1
        if made_pipes % 2 == 0:
            raise OSError(24, "Too many open files")
        return real(flags)

    real = os.pipe2
    monkeypatch.setattr(os, "pipe2", pipe2)
    async with path() as made:
        made.client[1].write(b"x" * 1000)
        assert await made.server[0].readexactly(1000) == b"x" * 1000
        assert made_pipes == 6
        await in_order(made)
    await asyncio.sleep(0)
    assert psutil.Process().num_fds() <= before


def test_what_moves_puts_the_idle_end_off() -> None:
    """Moved at 0, 100 and 150 s of a timeout of 120 s: over at 270 s, whatever the timer saw on its way."""

    async def trial() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with _idle(FREELY, 120.0) as (moved, _):
                for pause_s in (100.0, 50.0, 1000.0):
                    await asyncio.sleep(pause_s)
                    moved(1)
        return loop.time()

    assert run_virtual(trial) == pytest.approx(270.0)


ON_UVLOOP: dict[str, Callable[[], Coroutine[None, None, None]]] = {
    **{
        test.__name__: test
        for test in (
            test_what_goes_in_comes_out_both_ways_at_once,
            test_a_direction_that_ended_leaves_the_other_open,
            test_nobody_reads_on_while_the_far_end_takes_nothing,
            test_a_relay_that_ends_is_told_as_broken_and_ends_both,
            test_a_tunnel_on_which_nothing_moves_ends,
            test_what_a_relay_holds_and_has_yet_to_write_comes_first,
            test_pieces_are_as_small_as_asked_and_wait_as_long_as_told,
        )
    },
    **{f"holds {kept}": partial(test_what_a_reader_holds_when_its_stream_is_joined_comes_first, kept) for kept in KEPT},
    **{f"ends {how.__name__}": partial(test_no_handle_is_left_however_it_ends, how) for how in HOW},
}


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop has no Windows")
@pytest.mark.parametrize("test", ON_UVLOOP.values(), ids=ON_UVLOOP)
def test_the_same_on_uvloop(test: Callable[[], Coroutine[None, None, None]]) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
