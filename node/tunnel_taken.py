"""Takes two sockets from asyncio's transports, so that the kernel can move their bytes (node/tunnel_splice.py)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from typing import cast

from peerloom.node.p2pd import Stream

EARLY_BYTES = 1 << 20  # more than a reader holds
BUFFER_BYTES = 1 << 19  # waiting in a socket, for fewer wake-ups: Linux makes it twice that, wmem_max allowing

Pipe = tuple[int, int]  # its reading and its writing end


@dataclass(frozen=True, slots=True)
class Taken:
    """Two sockets without their transports, what each had sent by then, and a pipe each way."""

    one: socket.socket
    other: socket.socket
    early_one: bytes
    early_other: bytes
    there: Pipe
    back: Pipe


@asynccontextmanager
async def taken(one: Stream, other: Stream) -> AsyncIterator[Taken | None]:
    """Takes both sockets over, whose streams are of no more use then; None, with nothing done, where it cannot be.

    Waits until all that was written to them is through; raises OSError when one is broken. Closes the sockets.
    """
    with ExitStack() as held:
        found = _handles(one, other, held)
        if found is None:
            yield None
            return
        sockets, (there, back) = found
        early = await _emptied(one), await _emptied(other)
        for _, writer in (one, other):
            writer.transport.abort()  # ends the transport, not the connection, which our own handle keeps
        yield Taken(*sockets, *early, there, back)


def _handles(
    one: Stream, other: Stream, held: ExitStack
) -> tuple[tuple[socket.socket, socket.socket], tuple[Pipe, Pipe]] | None:
    """The sockets and two pipes; None on another platform, for no socket, for too many files: they are copied then."""
    try:
        return (held.enter_context(_again(one)), held.enter_context(_again(other))), (_pipe(held), _pipe(held))
    except (OSError, NotImplementedError):
        held.close()
        return None


def _again(stream: Stream) -> socket.socket:
    """The stream's socket by a handle of our own: a loop lets nobody watch a handle that a transport has."""
    under = stream[1].get_extra_info("socket")
    if under is None or not hasattr(os, "splice") or not _kernel_splices():
        raise NotImplementedError
    made = socket.socket(fileno=os.dup(under.fileno()))
    try:
        made.setblocking(False)
        if not _leads_far(made):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    except OSError:  # its far end is gone already
        made.close()
        raise
    return made


def _leads_far(connection: socket.socket) -> bool:
    """Over a network, for which the kernel finds the size itself, beyond wmem_max, unless one was set."""
    return connection.family != socket.AF_UNIX and not ip_address(connection.getpeername()[0]).is_loopback


@cache
def _kernel_splices() -> bool:
    """Whether it does so with sockets; that of a sandbox may not."""
    with ExitStack() as held:
        one, other = (held.enter_context(end) for end in socket.socketpair())
        out_of, into = _pipe(held)
        one.send(b"?")
        try:
            return os.splice(other.fileno(), into, 1) == os.splice(out_of, other.fileno(), 1)
        except OSError:
            return False


def _pipe(held: ExitStack) -> Pipe:
    pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for end in pipe:
        held.callback(os.close, end)
    return pipe


async def _emptied(stream: Stream) -> bytes:
    """Waits until what was written is through, and stops the reading; returns what was read by then."""
    reader, writer = stream
    transport = cast(asyncio.Transport, writer.transport)
    transport.set_write_buffer_limits(0)
    await writer.drain()
    early = b""
    while True:
        if writer.is_closing():
            raise ConnectionResetError("the connection is closed")
        if transport.is_reading():
            transport.pause_reading()
        if not (data := await _at_once(reader)):
            return early
        early += data  # a full reader that was emptied has its transport read on: it is stopped anew


async def _at_once(reader: asyncio.StreamReader) -> bytes:
    """What the reader holds: asyncio has no call for it that does not wait."""
    reading = asyncio.create_task(reader.read(EARLY_BYTES))
    await asyncio.sleep(0)  # it has run until it must wait
    if reading.done():
        return reading.result()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return b""
