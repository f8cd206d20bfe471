"""Moves the bytes of a tunnel: blindly at a relay, and in frames where it ends at a local socket.

Back-pressure is that of the sockets: nothing is read while what was read before cannot be written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from peerloom.node.p2pd import Stream
from peerloom.protocol import tunnel
from peerloom.protocol.errors import LinkError, PeerError

READ_BYTES = 1 << 18
IDLE_S = 120.0  # without a byte either way: grpc's keepalive asks every 10 s while a call is under way
FLUSH_S = 5.0  # what is written last may take so long

Passing = Callable[[int], Awaitable[None]]  # waits until so many bytes may pass, and counts them


@dataclass(slots=True)
class Ending:
    """How a tunnel ended, seen from an end of it: `error` is None when both directions were ended in order."""

    error: PeerError | None = None
    by_local: bool = False  # the local socket was the first to end
    by_far: bool = False  # or the far one
    heard_at: float = 0.0  # when the last byte came from the far end, by the loop's clock


async def relay(
    one: Stream, other: Stream, passing: Passing, idle_s: float = IDLE_S, read_bytes: int = READ_BYTES
) -> None:
    """Copies both ways, in pieces of `read_bytes` at most, until either side is over or nothing has moved for `idle_s`.

    Closes both.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(idle_s) as idle:

            async def moved(size: int) -> None:
                idle.reschedule(loop.time() + idle_s)
                await passing(size)

            there, back = (one[0], other[1]), (other[0], one[1])
            await _first(*(_copy(*way, moved, read_bytes) for way in (there, back)))
    except (OSError, TimeoutError):
        pass  # whichever side is left sees its stream end
    finally:
        await hang_up(one[1], other[1])


async def join(
    local: Stream, stream: Stream, passing: Passing, idle_s: float = IDLE_S, ending: Ending | None = None
) -> Ending:
    """Carries a local connection over a tunnel until both directions have ended, or one breaks; closes both.

    `ending` is filled in as it goes, and returned.
    """
    loop, ending = asyncio.get_running_loop(), ending or Ending()
    try:
        async with asyncio.timeout(idle_s) as idle:

            async def moved(size: int) -> None:
                idle.reschedule(loop.time() + idle_s)
                await passing(size)

            await _both(_outward(local, stream, moved, ending), _inward(local, stream, moved, ending))
    except TimeoutError:
        ending.error = LinkError(f"nothing has moved for {idle_s:.0f} s")
    except OSError as error:
        ending.error = LinkError(f"the tunnel broke: {error.strerror or error}")
    except PeerError as error:
        ending.error = error
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


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: Passing, read_bytes: int) -> None:
    while data := await reader.read(read_bytes):
        await moved(len(data))
        writer.write(data)
        await writer.drain()


async def _outward(local: Stream, stream: Stream, moved: Passing, ending: Ending) -> None:
    reader, writer = local[0], stream[1]
    while data := await reader.read(READ_BYTES):
        await moved(len(data))
        writer.writelines((tunnel.frame_head(len(data)), data))
        await writer.drain()
    ending.by_local = not ending.by_far
    writer.write(tunnel.END)
    await writer.drain()


async def _inward(local: Stream, stream: Stream, moved: Passing, ending: Ending) -> None:
    reader, writer, time = stream[0], local[1], asyncio.get_running_loop().time
    unframer = tunnel.Unframer()
    while not unframer.ended:
        if not (data := await reader.read(READ_BYTES)):
            raise LinkError("the tunnel broke off")
        ending.heard_at = time()
        for piece in unframer.feed(data):
            writer.write(piece)
        await moved(len(data))
        await writer.drain()
    ending.by_far = not ending.by_local
    if writer.can_write_eof():
        writer.write_eof()


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


