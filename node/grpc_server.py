"""The serving half of the grpc transport: authenticates each call, bounds it, and hands it to the PeerHandler.

Unary calls are served as streams of one message, since only so the wait for a request can have a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from peerloom.node.addresses import WILDCARDS, join
from peerloom.node.grpc_session import HelloBudget, Sessions
from peerloom.node.grpc_stream import ServerStream
from peerloom.node.grpc_wire import (
    CAPPED_OPTIONS,
    FETCH,
    HELLO,
    OWN_FAULT,
    PROVE,
    SERVER_OPTIONS,
    STATUS,
    TAKEN,
    TOKEN_KEY,
    Context,
    abort,
    aio,
    grpc,
)
from peerloom.node.seams import Clock, PeerHandler
from peerloom.node.slots import StreamSlots
from peerloom.node.throttle import Traffic
from peerloom.node.tls import Certificate
from peerloom.protocol import codec
from peerloom.protocol.errors import LinkError, MalformedMessage, PeerloomError, PortInUse
from peerloom.protocol.messages import StateMessage
from peerloom.protocol.services import SERVICES, Service
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

M = TypeVar("M")

REQUEST_S = 5.0  # a client that opens a call has this long to send its request
ANSWER_S = 10.0  # and the handler this long to answer a Status
UNWIND_S = 5.0  # a handler whose peer has gone may take this long to notice, then it is cancelled
MAX_UNPROVEN = 256  # calls at once from clients that have not proven who they are
MAX_CALLS = 1024  # calls of any kind at once

Method = Callable[[Context], Awaitable[None]]


class _Logged(Exception):
    """A bug of ours, in the log already."""


class GrpcServer:
    """Serves all calls of one node."""

    def __init__(self, sessions: Sessions, handler: PeerHandler, clock: Clock, traffic: Traffic) -> None:
        self._sessions = sessions
        self._handler = handler
        self._traffic = traffic
        self._budget = HelloBudget(clock)
        self._slots = StreamSlots()
        self._unproven = 0
        self._jobs: set[asyncio.Task[None]] = set()
        self._server: Any = None

    async def start(self, certificate: Certificate, listen: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Listens on each (host, port), 0 for any port; returns what is bound. Raises PortInUse."""
        options = (*SERVER_OPTIONS, *(CAPPED_OPTIONS if self._traffic.caps.download else ()))
        server = aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        server.add_generic_rpc_handlers(self._handlers())
        credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.certificate_pem)])
        try:
            bound = [(host, _bind(server, host, port, credentials)) for host, port in _without_twins(listen)]
        except PortInUse:
            await server.stop(None)
            raise
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        """Ends every call and frees the ports."""
        if self._server is None:
            return
        server, self._server = self._server, None
        for job in list(self._jobs):
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await server.stop(None)

    def _handlers(self) -> tuple[Any, ...]:
        methods: dict[str, Method] = {
            HELLO: self._hello,
            PROVE: self._prove,
            STATUS: self._status,
            **{service.path: self._stream(service) for service in SERVICES},
            FETCH: self._fetch,
        }
        services: dict[str, dict[str, Any]] = {}
        for path, method in methods.items():
            _, service, name = path.split("/")
            services.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(_guarded(method))
        return tuple(grpc.method_handlers_generic_handler(name, each) for name, each in services.items())

    async def _hello(self, context: Context) -> None:
        self._budget.spend(context.peer())
        with self._unproven_call():
            hello = codec.decode_hello(await self._request(context))
            await self._answer(context, codec.encode_hello_reply(self._sessions.hello(hello)))

    async def _prove(self, context: Context) -> None:
        self._budget.spend(context.peer())
        with self._unproven_call():
            prove = codec.decode_prove(await self._request(context))
            await self._answer(context, codec.encode_token(self._sessions.prove(prove)))

    async def _status(self, context: Context) -> None:
        self._peer(context)
        codec.decode_status_request(await self._request(context))
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await self._handler.status()
        except TimeoutError:
            raise LinkError(f"no status within {ANSWER_S:.0f} s") from None
        await self._answer(context, codec.encode_status(status))

    def _stream(self, service: Service[Any]) -> Method:
        async def serve(context: Context) -> None:
            await self._serve_stream(service, context)

        return serve

    async def _serve_stream(self, service: Service[M], context: Context) -> None:
        peer = self._peer(context)
        with self._slots.hold(peer):
            await context.send_initial_metadata(TAKEN)
            stream = ServerStream(service, peer, self._traffic, context)
            try:
                await self._run(self._handler.serve(service, stream), f"serve-{service.name}-{peer[-6:]}")
                await stream.finish(None)
            except PeerloomError as error:
                await stream.finish(error)
                raise
            except Exception as error:
                log.exception("%s with %s failed", service.name, peer)
                await stream.finish(error)
                raise _Logged from error
            finally:
                await stream.close()

    async def _fetch(self, context: Context) -> None:
        peer = self._peer(context)
        with self._slots.hold(peer):
            await context.send_initial_metadata(TAKEN)
            request = codec.decode_fetch_request(await self._request(context))
            pieces = self._handler.fetch(peer, self._traffic.caps.asked(request))
            await self._run(self._send_all(context, pieces), f"serve-fetch-{peer[-6:]}")

    async def _send_all(self, context: Context, pieces: AsyncGenerator[StateMessage, None]) -> None:
        async with aclosing(pieces):
            async for message in pieces:
                await self._answer(context, codec.encode_state(message))

    async def _run(self, work: Coroutine[None, None, None], name: str) -> None:
        """Runs a handler in a task of its own, so that a reset reaches it as LinkError on its stream."""
        job = asyncio.create_task(work, name=name)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        try:
            await asyncio.shield(job)
        except asyncio.CancelledError:
            if not job.done():
                await asyncio.wait((job,), timeout=UNWIND_S)
                job.cancel()
                await asyncio.wait((job,))
            if not job.cancelled() and isinstance(error := job.exception(), Exception):
                _log_unless_known(error)
            raise

    def _peer(self, context: Context) -> PeerId:
        token = dict(context.invocation_metadata() or ()).get(TOKEN_KEY)
        return self._sessions.peer(token if isinstance(token, bytes) else None)

    @contextmanager
    def _unproven_call(self) -> Iterator[None]:
        if self._unproven >= MAX_UNPROVEN:
            raise LinkError(f"busy: {MAX_UNPROVEN} clients are just saying Hello")
        self._unproven += 1
        try:
            yield
        finally:
            self._unproven -= 1

    async def _request(self, context: Context) -> bytes:
        try:
            async with asyncio.timeout(REQUEST_S):
                data = await context.read()
        except TimeoutError:
            raise LinkError(f"no request within {REQUEST_S:.0f} s") from None
        if data is aio.EOF:
            raise MalformedMessage("the call carries no request")
        await self._traffic.took(len(data))
        return bytes(data)

    async def _answer(self, context: Context, data: bytes) -> None:
        await self._traffic.may_send(len(data))
        try:
            await context.write(data)
        except aio.BaseError as error:
            raise LinkError(f"the peer has ended the call: {error}") from None
        self._traffic.sent += len(data)


def _guarded(method: Method) -> Callable[[object, Context], Awaitable[None]]:
    """Turns what a call raises into its status; what is no PeerloomError is a bug of ours, logged and not told."""

    async def serve(_: object, context: Context) -> None:
        try:
            await method(context)
        except PeerloomError as error:
            log.debug("a call from %s ended: %s", context.peer(), error)
            await abort(context, error)
        except _Logged:
            await context.abort(grpc.StatusCode.INTERNAL, OWN_FAULT)
        except Exception:
            log.exception("a call from %s failed", context.peer())
            await context.abort(grpc.StatusCode.INTERNAL, OWN_FAULT)

    return serve


def _log_unless_known(error: Exception) -> None:
    if not isinstance(error, PeerloomError):
        log.error("a call failed after its peer had gone", exc_info=error)


def _bind(server: Any, host: str, port: int, credentials: Any) -> int:
    address = join(host, port)
    try:
        bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        bound = 0
    if not bound:
        raise PortInUse(
            f"cannot listen on {address}: the port is taken or the address not this machine's; name another"
        )
    return int(bound)


def _without_twins(listen: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """grpc takes a wildcard of either family for both, so a second one on the same port would find it taken."""
    kept: dict[tuple[str, int], tuple[str, int]] = {}
    for host, port in listen:
        kept.setdefault(("*" if host in WILDCARDS else host, port), (host or "0.0.0.0", port))
    return list(kept.values())
