"""Moves the bytes of a tunnel from socket to socket inside the kernel: splice(2), which Linux has, through a pipe.

No byte passes through Python but the heads of frames. Back-pressure is that of the sockets: nothing is read while what
is in the pipe cannot be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from peerloom.node.tunnel_taken import Pipe
from peerloom.protocol import tunnel
from peerloom.protocol.errors import LinkError

Moved = Callable[[int], float]  # counts so many bytes, and says in how many seconds they may pass


class Way:
    """One direction of a relay: everything, in pieces of `piece_bytes` at most, until the source ends."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, pipe: Pipe, early: bytes, moved: Moved, piece_bytes: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source, self._sink = source, sink
        self._from, self._to = source.fileno(), sink.fileno()
        self._out_of, self._into = pipe
        self._early = early
        self._moved = moved
        self._piece_bytes = piece_bytes
        self._head = b""  # to be written before what is in the pipe
        self._held = 0  # bytes in the pipe
        self._last = False  # no more than that
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._error: Exception | None = None
        self._reads = self._writes = False  # what is waited for
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Returns once all is written; raises OSError or PeerError."""
        try:
            await self._pass_early()
            self._write()
            await self._over
            if self._error is not None:
                raise self._error
        finally:
            self._wait_for()
            if self._timer is not None:
                self._timer.cancel()

    async def _pass_early(self) -> None:
        for at in range(0, len(self._early), self._piece_bytes):
            piece = self._early[at : at + self._piece_bytes]
            if (seconds := self._moved(len(piece))) > 0:
                await asyncio.sleep(seconds)
            await self._loop.sock_sendall(self._sink, self._framed(piece))
        self._early = b""

    def _framed(self, early: bytes) -> bytes:
        return early

    def _fill(self) -> int:
        """Takes what is there; returns how much it is. BlockingIOError says that it is nothing yet."""
        size = self._splice_in(self._piece_bytes)
        self._last = not size
        return size

    def _splice_in(self, most: int) -> int:
        self._held = os.splice(self._from, self._into, most)
        return self._held

    def _readable(self) -> None:
        try:
            self._pass(self._fill())
        except BlockingIOError:
            return
        except Exception as error:  # whatever it is, run() raises it
            self._end(error)

    def _pass(self, size: int) -> None:
        if size and (seconds := self._moved(size)) > 0:
            self._wait_for()
            self._timer = self._loop.call_later(seconds, self._write)
        else:
            self._write()

    def _write(self) -> None:
        try:
            while self._head:
                self._head = self._head[self._sink.send(self._head) :]
            while self._held:
                self._held -= os.splice(self._out_of, self._to, self._held)
            if self._last:
                self._close_sink()
                self._end(None)
            elif not self._reads:
                self._wait_for(source=True)
        except BlockingIOError:
            self._wait_for(sink=True)
        except Exception as error:
            self._end(error)

    def _close_sink(self) -> None:
        """The direction has ended."""

    def _end(self, error: Exception | None) -> None:
        self._wait_for()
        self._error = error
        if not self._over.done():  # the one who waits may have been cancelled just now
            self._over.set_result(None)

    def _wait_for(self, *, source: bool = False, sink: bool = False) -> None:
        if source != self._reads:
            self._reads = source
            if source:
                self._loop.add_reader(self._from, self._readable)
            else:
                self._loop.remove_reader(self._from)
        if sink != self._writes:
            self._writes = sink
            if sink:
                self._loop.add_writer(self._to, self._write)
            else:
                self._loop.remove_writer(self._to)


class Outward(Way):
    """From a local socket into a tunnel: each piece a frame, and the frame that ends the direction last."""

    def _framed(self, early: bytes) -> bytes:
        return tunnel.frame_head(len(early)) + early

    def _fill(self) -> int:
        size = super()._fill()
        self._head = tunnel.frame_head(size) if size else tunnel.END
        return size


class Inward(Way):
    """Out of a tunnel to a local socket; raises LinkError when it breaks off, MalformedMessage for a wrong frame."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, pipe: Pipe, early: bytes, moved: Moved, piece_bytes: int
    ) -> None:
        super().__init__(source, sink, pipe, early, moved, piece_bytes)
        self._unframer = tunnel.Unframer()

    def _framed(self, early: bytes) -> bytes:
        payload = b"".join(self._unframer.feed(early))
        self._last = self._unframer.ended
        return payload

    def _fill(self) -> int:
        if not self._unframer.left:
            self._begin_frame()
        if self._last:
            return 0
        size = self._splice_in(min(self._piece_bytes, self._unframer.left))
        if not size:
            raise LinkError("the tunnel broke off")
        self._unframer.skip(size)
        return size

    def _begin_frame(self) -> None:
        while not (self._unframer.left or self._last):
            if not (data := self._source.recv(self._unframer.head_left)):
                raise LinkError("the tunnel broke off")
            self._unframer.feed(data)
            self._last = self._unframer.ended

    def _close_sink(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already, which the other direction tells
            self._sink.shutdown(socket.SHUT_WR)
