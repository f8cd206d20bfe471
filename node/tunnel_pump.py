"""Moves the bytes of a tunnel: blindly at a relay, and in frames where it ends at a local socket.

Inside the kernel where that can be (node/tunnel_splice.py), and as here otherwise. Back-pressure is that of the
sockets: nothing is read while what was read before cannot be written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from peerloom.node.p2pd import Stream
from peerloom.node.tunnel_splice import Inward, Moved, Outward, Way
from peerloom.node.tunnel_taken import taken
from peerloom.protocol import tunnel
from peerloom.protocol.errors import LinkError, PeerError

READ_BYTES = 1 << 18
IDLE_S = 120.0  # without a byte either way: grpc's keepalive asks every 10 s while a call is under way
FLUSH_S = 5.0  # what is written last may take so long

Copying = Callable[[], Coroutine[None, None, None]]
Passing = tuple[Moved, Moved]  # there, and back


@dataclass(slots=True)
class Ending:
    """How a tunnel ended, seen from an end of it: `error` is None when both directions were ended in order."""

    error: PeerError | None = None
    by_local: bool = False  # the local socket was the first to end
    by_far: bool = False  # or the far one
    heard_at: float = 0.0  # when the last byte came from the far end, by the loop's clock

    def local_ended(self) -> None:
        """All that the local socket had to say has gone into the tunnel."""
        self.by_local = not self.by_far

    def far_ended(self) -> None:
        """All that the far end had to say has come."""
        self.by_far = not self.by_local


async def relay(
    one: Stream, other: Stream, passing: Passing, idle_s: float = IDLE_S, read_bytes: int = READ_BYTES
) -> None:
    """Copies both ways, in pieces of `read_bytes` at most, until either side is over or nothing has moved for `idle_s`.

    `passing` counts what goes from `one` to `other`, and what comes back. Closes both.
    """
    try:
        async with _idle(passing, idle_s) as (going, coming), taken(one, other) as sockets:
            if sockets is None:
                await _first(_copy(one[0], other[1], going, read_bytes), _copy(other[0], one[1], coming, read_bytes))
            else:
                there = Way(sockets.one, sockets.other, sockets.there, sockets.early_one, going, read_bytes)
                back = Way(sockets.other, sockets.one, sockets.back, sockets.early_other, coming, read_bytes)
                await _first(there.run(), back.run())
    except (OSError, TimeoutError):
        pass  # whichever side is left sees its stream end
    finally:
        await hang_up(one[1], other[1])


async def join(
    local: Stream, stream: Stream, passing: Passing, idle_s: float = IDLE_S, ending: Ending | None = None
) -> Ending:
    """Carries a local connection over a tunnel until both directions have ended, or one breaks; closes both.

    `passing` counts what goes into the tunnel, and what comes out of it. `ending` is filled in as it goes, and
    returned. Who cancels it gives up what still waits to be written.
    """
    ending = ending or Ending()
    try:
        async with _idle(passing, idle_s) as (moved, coming), taken(local, stream) as sockets:
            heard = _hearing(coming, ending)
            outward: Copying
            inward: Copying
            if sockets is None:
                outward = partial(_outward, local[0], stream[1], moved)
                inward = partial(_inward, stream[0], local[1], heard)
            else:
                outward = Outward(sockets.one, sockets.other, sockets.there, sockets.early_one, moved, READ_BYTES).run
                inward = Inward(sockets.other, sockets.one, sockets.back, sockets.early_other, heard, READ_BYTES).run
            await _both(_then(outward, ending.local_ended), _then(inward, ending.far_ended))
    except TimeoutError:
        ending.error = LinkError(f"nothing has moved for {idle_s:.0f} s")
    except OSError as error:
        ending.error = LinkError(f"the tunnel broke: {error.strerror or error}")
    except PeerError as error:
        ending.error = error
    except asyncio.CancelledError:
        local[1].transport.abort()
        raise
    finally:
        if ending.error is not None:
            local[1].transport.abort()  # what still waits to be written is no use: TLS misses the rest
        await hang_up(local[1], stream[1])
    return ending


async def hang_up(*writers: asyncio.StreamWriter) -> None:
    """Closes them once what was written is through, for FLUSH_S at most."""
    for writer in writers:
        writer.close()
    try:
        async with asyncio.timeout(FLUSH_S):
            for writer in writers:
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def _idle(passing: Passing, idle_s: float) -> AsyncIterator[Passing]:
    """`passing`, without which what is enclosed ends with a TimeoutError after `idle_s`."""
    loop = asyncio.get_running_loop()
    time, moved_at = loop.time, loop.time()
    timer: asyncio.TimerHandle

    def noting(way: Moved) -> Moved:
        def moved(size: int) -> float:
            nonlocal moved_at
            moved_at = time()
            return way(size)

        return moved

    def look() -> None:
        """A timer moved for each piece would cost more than the piece."""
        nonlocal timer
        if moved_at + idle_s > time():
            timer = loop.call_at(moved_at + idle_s, look)
        else:
            idle.reschedule(time())

    timer = loop.call_later(idle_s, look)
    try:
        async with asyncio.timeout(None) as idle:
            yield noting(passing[0]), noting(passing[1])
    finally:
        timer.cancel()


def _hearing(moved: Moved, ending: Ending) -> Moved:
    time = asyncio.get_running_loop().time

    def heard(size: int) -> float:
        ending.heard_at = time()
        return moved(size)

    return heard


async def _then(way: Copying, note: Callable[[], None]) -> None:
    await way()
    note()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: Moved, read_bytes: int) -> None:
    while data := await reader.read(read_bytes):
        await _pass(moved(len(data)))
        writer.write(data)
        await writer.drain()


async def _outward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: Moved) -> None:
    while data := await reader.read(READ_BYTES):
        await _pass(moved(len(data)))
        writer.writelines((tunnel.frame_head(len(data)), data))
        await writer.drain()
    writer.write(tunnel.END)
    await writer.drain()


async def _inward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Moved) -> None:
    unframer = tunnel.Unframer()
    while not unframer.ended:
        if not (data := await reader.read(READ_BYTES)):
            raise LinkError("the tunnel broke off")
        await _pass(heard(len(data)))
        for piece in unframer.feed(data):
            writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _pass(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


async def _both(*copies: Coroutine[None, None, None]) -> None:
    """Runs them side by side; the first error ends the other."""
    tasks = [asyncio.create_task(copy) for copy in copies]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _first(*copies: Coroutine[None, None, None]) -> None:
    """Runs them side by side until one is over."""
    tasks = [asyncio.create_task(copy) for copy in copies]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _end(tasks)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
