"""A node's one HTTP server, by default on 127.0.0.1: the page, its feed, /metrics, /healthz and /readyz; read-only."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from peerloom.node.http_connections import ERRORS, KEPT_S, Connections, listening
from peerloom.node.http_endpoint import Endpoint
from peerloom.node.http_feed import SwarmFeed, TooManyListeners
from peerloom.protocol.errors import ConfigError, PortInUse
from peerloom.protocol.types import NodeState, NodeStatus

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Middleware
    from aiohttp.web_protocol import RequestHandler

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

TRIED: Final = 20  # ports from the default on, when other nodes of this machine have it
READY: frozenset[NodeState] = frozenset({"training", "seeking", "exchanging", "serving", "done"})
ILL: frozenset[NodeState] = frozenset({"stalled", "restarting"})
PAGE: Final = Path(__file__).parent / "page"
FILES: Final = {"/": ("index.html", "text/html"), "/app.js": ("app.js", "text/javascript"),
                "/charts.js": ("charts.js", "text/javascript"), "/style.css": ("style.css", "text/css")}  # fmt: skip
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class HttpServer:
    """Started by `start`; `url` says where."""

    def __init__(
        self, runner: web.AppRunner, feed: SwarmFeed, url: str, connections: Connections, listener: asyncio.Server
    ) -> None:
        self._runner = runner
        self._feed = feed
        self._listener = listener
        self.url = url
        self.connections = connections
        self._looking = asyncio.gather(feed.run(), connections.watch())

    @classmethod
    async def start(
        cls,
        endpoint: Endpoint,
        *,
        feed: SwarmFeed,
        status: Callable[[], NodeStatus],
        metrics: Callable[[str], tuple[bytes, str]],
    ) -> HttpServer:
        """Listens; `metrics` maps an Accept header to body and content type. Raises PortInUse or ConfigError."""
        from aiohttp import web

        app = web.Application(middlewares=[_guard(endpoint, lambda connection: connections.asked(connection))])
        _add_routes(app, feed, status, metrics)
        runner = web.AppRunner(
            app, access_log=None, logger=ERRORS, handle_signals=False, shutdown_timeout=1.0, keepalive_timeout=KEPT_S
        )
        await runner.setup()
        try:
            listening = _bind(endpoint)
            assert runner.server is not None  # ours: it is there once set up
            connections = Connections(runner.server)
            listener = await asyncio.get_running_loop().create_server(connections, sock=listening)
        except BaseException:
            await runner.cleanup()
            raise
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        return cls(runner, feed, f"http://{host}:{listening.getsockname()[1]}/", connections, listener)

    async def stop(self) -> None:
        """Ends every answer under way and frees the port."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        self._feed.close()
        self._listener.close()
        await self._runner.cleanup()


def _bind(endpoint: Endpoint) -> socket.socket:
    ports = range(endpoint.port, endpoint.port + TRIED) if endpoint.moves else (endpoint.port,)
    for port in (*ports, *((0,) if endpoint.moves else ())):
        try:
            return listening(endpoint.host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"--http {endpoint.host}:{port}: cannot listen there ({error.strerror}); use 127.0.0.1, or none"
                ) from error
    raise PortInUse(
        f"--http {endpoint.host}:{endpoint.port}: the port is in use by another program; stop it, choose another "
        "port (0: any free one) or none"
    )


def _guard(endpoint: Endpoint, asked: Callable[[RequestHandler], None]) -> Middleware:
    """Tells of each request and adds the headers.

    On loopback it refuses a foreign Host, with which a web site could read what is only local.
    """
    from aiohttp import web

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked(request.protocol)
        host = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if endpoint.loopback and host not in ("localhost", "127.0.0.1", "[::1]", endpoint.host):
            raise web.HTTPForbidden(text="this page is for this machine: ask for 127.0.0.1 or localhost\n")
        response = await handler(request)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    return guard


def _add_routes(
    app: web.Application,
    feed: SwarmFeed,
    status: Callable[[], NodeStatus],
    metrics: Callable[[str], tuple[bytes, str]],
) -> None:
    from aiohttp import web

    async def scrape(request: web.Request) -> web.Response:
        body, content_type = metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    def health(good: Callable[[NodeState], bool]) -> Handler:
        async def answer(_: web.Request) -> web.Response:
            record = status().record
            text = ": ".join(filter(None, (record.state, record.reason))) + "\n"
            return web.Response(text=text, status=200 if good(record.state) else 503)

        return answer

    async def swarm(_: web.Request) -> web.Response:
        return web.json_response(feed.status())

    for path, (name, content_type) in FILES.items():
        app.router.add_get(path, _file(name, content_type))
    app.router.add_get("/metrics", scrape)
    app.router.add_get("/healthz", health(lambda state: state not in ILL))
    app.router.add_get("/readyz", health(lambda state: state in READY))
    app.router.add_get("/status.json", swarm)
    app.router.add_get("/events", _events(feed))


def _file(name: str, content_type: str) -> Handler:
    from aiohttp import web

    body = (PAGE / name).read_bytes()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return answer


def _events(feed: SwarmFeed) -> Handler:
    from aiohttp import web

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            queue = feed.listen()
        except TooManyListeners:
            raise web.HTTPServiceUnavailable(text="too many pages are open on this node\n") from None
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            while (data := await queue.get()) is not None:
                await response.write(data)
        except ConnectionError:
            log.debug("a page was closed")
        finally:
            feed.leave(queue)
        return response

    return answer
