"""The sockets of a node's HTTP server: how many there may be, and which are closed without being asked.

A page that is closed says so. A laptop that falls asleep does not, and a reader that never reads does not either: what
is written to them would pile up, and the socket stay for a quarter of an hour or for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.web_protocol import RequestHandler

log = logging.getLogger(__name__)
ERRORS: Final = logging.getLogger(f"{__name__}.errors")  # what the server is given to log to

MAX_CONNECTIONS: Final = 128
ASK_WITHIN_S: Final = 10.0  # of connecting
BEHIND_S: Final = 30.0  # that a reader may leave written bytes unread
KEPT_S: Final = 30.0  # that a connection is kept for another request
LOOK_S: Final = 5.0
SEND_BUFFER: Final = 256 << 10  # of the kernel: what does not fit is seen to be behind


def _is_ours(record: logging.LogRecord) -> bool:
    """Keeps out faults of what came: aiohttp logs each with a trace, and in it all that a stranger has sent."""
    from aiohttp.http_exceptions import HttpProcessingError

    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        log.debug("what came is no request: %s", type(error).__name__)
        return False
    return True


ERRORS.addFilter(_is_ours)


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Connections:
    """Makes the protocol of each new connection, and in `look` closes those that are good for nothing."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._asked: set[RequestHandler] = set()
        self._silent: dict[RequestHandler, float] = {}  # since when
        self._behind: dict[RequestHandler, float] = {}

    def __len__(self) -> int:
        return len(self._server.connections)

    def __call__(self) -> asyncio.BaseProtocol:
        return self._server() if len(self) < MAX_CONNECTIONS else _Refused()

    def asked(self, connection: RequestHandler) -> None:
        """A whole request has come by it."""
        self._asked.add(connection)

    def look(self, now: float) -> None:
        """Closes who asks nothing for ASK_WITHIN_S, and who has been behind with reading for BEHIND_S."""
        here = set(self._server.connections)
        self._asked &= here
        self._silent = {each: self._silent.get(each, now) for each in here - self._asked}
        self._behind = {each: self._behind.get(each, now) for each in here if _unsent(each)}
        late = [each for each, since in self._silent.items() if now - since > ASK_WITHIN_S]
        late += [each for each, since in self._behind.items() if now - since > BEHIND_S]
        for connection in late:
            if connection.transport is not None:
                connection.transport.abort()

    async def watch(self) -> None:
        """Looks every LOOK_S; until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(clock())


def _unsent(connection: RequestHandler) -> int:
    """Bytes that wait for the other end to read."""
    return connection.transport.get_write_buffer_size() if connection.transport is not None else 0


def listening(host: str, port: int) -> socket.socket:
    """A socket for connections that inherit its limits; raises OSError where it cannot listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.create_server((host, port), family=family, backlog=64)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: also ends connections whose other end answers no more
            with contextlib.suppress(OSError):
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(BEHIND_S * 1000))
    except BaseException:
        made.close()
        raise
    return made
