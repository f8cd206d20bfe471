"""A relay's own TCP port: who shows a good token there gets a connection that takes a libp2p stream's place.

Between p2pd and p2pd each byte is encrypted and multiplexed once more, though what passes is TLS from end to end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from peerloom.node.p2pd import STREAM_BUFFER_BYTES, Stream
from peerloom.node.ports import bound
from peerloom.protocol.tunnel import GREETING_BYTES, LEG_ACK, TOKEN_BYTES, Offer

log = logging.getLogger(__name__)

GREETING_S = 3.0
MAX_STRANGERS = 64  # connections that have not shown a token: when one more comes, one of the most crowded host goes
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
        self._strangers: dict[asyncio.Task[bool], str] = {}  # with their hosts, oldest first
        self._tasks: set[asyncio.Task[bool]] = set()

    def listen(self, hosts: Sequence[str], port: int) -> int:
        """On each IP address, the port being the same, 0 for a free one; raises PortInUse or ConfigError."""
        listening: list[socket.socket] = []
        try:
            for host in dict.fromkeys(hosts):
                listening.append(bound(host, port, backlog=BACKLOG))
                port = listening[-1].getsockname()[1]
        except BaseException:
            for each in listening:
                each.close()
            raise
        for each in listening:
            each.setblocking(False)
            self._start(self._accept(each), each)
        self.port = port
        return port

    def _start(self, job: Coroutine[Any, Any, bool], its: socket.socket) -> asyncio.Task[bool]:
        """The job says whether it has given its socket away; it may also be cancelled before it begins."""
        task = asyncio.create_task(job)
        self._tasks.add(task)

        def ended(task: asyncio.Task[bool]) -> None:
            self._tasks.discard(task)
            if task.cancelled() or not task.result():
                its.close()

        task.add_done_callback(ended)
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

    async def _accept(self, listening: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(listening)
            except OSError as error:
                log.debug("nobody is let in at the relay port: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                self._turn_away()
            self._strangers[self._start(self._meet(connection), connection)] = host
            await asyncio.sleep(0)  # a flood is accepted without a wait, and others want their turn

    def _turn_away(self) -> None:
        """The oldest of the host that has the most: a flood turns its own away."""
        crowded = Counter(self._strangers.values()).most_common(1)[0][0]
        stranger = next(task for task, host in self._strangers.items() if host == crowded)
        del self._strangers[stranger]
        self._count("tunnel_strangers", 1.0)
        stranger.cancel()

    async def _meet(self, connection: socket.socket) -> bool:
        """Says nothing to one without a good token."""
        task = asyncio.current_task()
        assert task is not None  # we are in one
        place = None
        try:
            async with asyncio.timeout(GREETING_S):
                place = self._places.pop(await _exactly(connection, GREETING_BYTES), None)
        except (OSError, TimeoutError) as error:
            log.debug("no greeting at the relay port: %s", error)
        if task in self._strangers:  # not turned away just now
            del self._strangers[task]
            if place is None:
                self._count("tunnel_strangers", 1.0)
        return place is not None and await self._let_in(connection, place)

    async def _let_in(self, connection: socket.socket, place: Place) -> bool:
        try:
            stream = await as_stream(connection)
        except OSError as error:  # it is gone already
            log.debug("a leg's connection failed: %s", error)
            return False
        place.fill(stream)
        stream[1].write(LEG_ACK)
        return True

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
