"""A relay's own TCP port: who shows a good token there gets a connection that takes a libp2p stream's place.

Between p2pd and p2pd each byte is encrypted and multiplexed once more, though what passes is TLS from end to end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peerloom.node.p2pd import STREAM_BUFFER_BYTES, Stream
from peerloom.node.ports import bound
from peerloom.protocol.tunnel import GREETING_BYTES, LEG_ACK, TOKEN_BYTES, Offer

log = logging.getLogger(__name__)

GREETING_S = 3.0
MAX_STRANGERS = 64  # connections that have not shown a token: when one more comes, the oldest goes
BACKLOG = 64
AGAIN_S = 0.1  # after an accept that failed, as when all handles are in use

Count = Callable[[str, float], None]


@dataclass(slots=True)
class Place:
    """An offer, and the connection that was made for it."""

    offer: Offer
    over: bool = False
    _stream: Stream | None = None

    def fill(self, stream: Stream) -> None:
        """By the one connection that showed the token."""
        if self.over:
            stream[1].close()
        else:
            self._stream = stream

    def take(self) -> Stream | None:
        """The connection, which is the caller's now; None while there is none."""
        stream, self._stream = self._stream, None
        return stream


class LegPort:
    """Offers nothing until `listen`; `count` takes cumulative metrics."""

    def __init__(self, count: Count) -> None:
        self.port = 0
        self._count = count
        self._places: dict[bytes, Place] = {}
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, hosts: Sequence[str], port: int) -> int:
        """On each IP address, the port being the same, 0 for a free one; raises PortInUse or ConfigError."""
        listening: list[socket.socket] = []
        try:
            for host in hosts:
                listening.append(bound(host, port))
                port = listening[-1].getsockname()[1]
                listening[-1].listen(BACKLOG)
        except BaseException:
            for each in listening:
                each.close()
            raise
        for each in listening:
            each.setblocking(False)
            self._start(self._accept(each))
        self.port = port
        return port

    def _start(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def offered(self) -> Iterator[Place | None]:
        """An offer that is good once and within; None where nothing is listened on. Closes what was not taken."""
        if not self.port:
            yield None
            return
        place = Place(Offer(self.port, secrets.token_bytes(TOKEN_BYTES)))
        self._places[place.offer.greeting] = place
        try:
            yield place
        finally:
            self._places.pop(place.offer.greeting, None)
            place.over = True
            if (unused := place.take()) is not None:
                unused[1].close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError as error:
                    log.debug("nobody is let in at the relay port: %s", error)
                    await asyncio.sleep(AGAIN_S)
                    continue
                if len(self._strangers) >= MAX_STRANGERS:
                    self._forget(next(iter(self._strangers))).cancel()
                self._strangers[self._start(self._meet(connection))] = None
                await asyncio.sleep(0)  # a flood is accepted without a wait, and others want their turn

    def _forget(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._strangers.pop(task, None)
        return task

    async def _meet(self, connection: socket.socket) -> None:
        """Says nothing to one without a good token."""
        known = False
        try:
            place = await self._place_of(connection)
            if place is not None:
                known = True
                stream = await as_stream(connection)
                place.fill(stream)
                stream[1].write(LEG_ACK)
        except OSError as error:
            log.debug("a leg's connection failed: %s", error)
            connection.close()
        finally:
            if not known:
                connection.close()
                self._count("tunnel_strangers", 1.0)

    async def _place_of(self, connection: socket.socket) -> Place | None:
        task = asyncio.current_task()
        assert task is not None  # we are in one
        try:
            async with asyncio.timeout(GREETING_S):
                greeting = await _exactly(connection, GREETING_BYTES)
        except TimeoutError:
            return None
        finally:
            self._forget(task)
        return self._places.pop(greeting, None)

    async def stop(self) -> None:
        """Closes the port, and what has shown no token; safe to call twice."""
        self.port = 0
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def as_stream(connection: socket.socket) -> Stream:
    """The connection with asyncio's reader and writer, which close it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return await asyncio.open_connection(sock=connection, limit=STREAM_BUFFER_BYTES)


async def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes and not one more, or fewer at the end of the stream."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size and (piece := await loop.sock_recv(connection, size - len(data))):
        data += piece
    return data
