"""One stream of a service over grpc, seen from the client and from the server.

Reads and writes run one at a time each, and beside each other, so two sides that send at once do not block each other.
A cancelled receive() loses nothing; a cancelled send() breaks the stream, since part of the message may be gone.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from peerloom.node.grpc_wire import OWN_FAULT, Call, Context, aio, error_of, grpc, raised, told
from peerloom.node.throttle import ChunkSize, Incoming, Traffic
from peerloom.protocol.errors import LinkError, PeerloomError
from peerloom.protocol.messages import StreamEnd
from peerloom.protocol.services import Service
from peerloom.protocol.types import PeerId

M = TypeVar("M")

LINGER_S = 5.0  # how long the client lets the server end the call after it has said End
DRAIN_S = 2.0  # how long the server takes what a client still sends after the handler's end
Received = bytes | PeerloomError | None  # None: the clean end


class GrpcStream(ABC, Generic[M]):
    """What both ends have in common; `_write` raises LinkError, `_read` returns its error."""

    def __init__(self, service: Service[M], peer: PeerId, traffic: Traffic) -> None:
        self._service = service
        self._peer = peer
        self._traffic = traffic
        self._incoming = Incoming(traffic)
        self._chunk_size = ChunkSize(traffic.caps)
        self._sending = asyncio.Lock()
        self._reading: asyncio.Task[Received] | None = None
        self._outcome: PeerloomError | None = None
        self._ended = False
        self._closed = False

    @property
    def peer(self) -> PeerId:
        """The authenticated peer at the other end."""
        return self._peer

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk to send here."""
        return self._chunk_size.bytes

    async def send(self, message: M) -> None:
        """Waits while the peer takes no more; raises LinkError when the stream is over."""
        data = self._service.encode(self._chunk_size.sending(message))
        async with self._sending:
            await self._traffic.may_send(len(data))
            if self._closed:
                raise LinkError("this side has closed the stream")
            await self._write(data)
        self._traffic.sent += len(data)

    async def receive(self) -> M | None:
        """The next message, None at a clean end; raises LinkError or ProtocolError, and the same one from then on."""
        if self._outcome is not None:
            raise self._outcome
        if self._ended:
            return None
        try:
            data = await self._next()
            message = self._service.decode(data) if data is not None else StreamEnd()
            if isinstance(message, StreamEnd) and message.error:
                raise told(message.error, message.detail)
        except PeerloomError as error:
            self._outcome = error
            raise
        if isinstance(message, StreamEnd):
            self._ended = True
            return None
        self._chunk_size.received(message)
        return message

    async def _next(self) -> bytes | None:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_at_pace())
        reading = self._reading
        try:
            data = await asyncio.shield(reading)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise LinkError("this side has closed the stream") from None
        if self._reading is reading:
            self._reading = None
        if isinstance(data, PeerloomError):
            raise data
        return data

    async def _read_at_pace(self) -> Received:
        data = await self._read()
        if isinstance(data, bytes):
            await self._incoming.took(len(data))
        return data

    @abstractmethod
    async def _write(self, data: bytes) -> None: ...

    @abstractmethod
    async def _read(self) -> Received: ...

    @abstractmethod
    async def close(self) -> None:
        """Ends the stream; safe to call twice."""


class ClientStream(GrpcStream[M]):
    """The end that opened the stream; `background` collects the task that lets the stream run out."""

    def __init__(
        self,
        service: Service[M],
        peer: PeerId,
        traffic: Traffic,
        call: Call,
        background: set[asyncio.Task[None]],
    ) -> None:
        super().__init__(service, peer, traffic)
        self._call = call
        self._background = background

    async def send(self, message: M) -> None:
        """Waits while the server takes no more; raises LinkError when the stream is over."""
        if self._ended or self._outcome is not None:
            raise LinkError("the peer has ended the stream")
        await super().send(message)

    async def close(self) -> None:
        """Says End and lets the server finish for LINGER_S in the background; cuts a stream that is broken."""
        if self._closed:
            return
        self._closed = True
        if self._call.done() or isinstance(self._outcome, LinkError) or self._sending.locked():
            self._cut()
            return
        task = asyncio.create_task(self._run_out(), name="stream-run-out")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _run_out(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                await self._write(self._service.encode(StreamEnd()))
                await self._call.done_writing()
                while await self._next() is not None:
                    pass
        except (TimeoutError, PeerloomError):
            pass  # nobody waits for this stream's outcome any more
        finally:
            self._cut()

    def _cut(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except aio.AioRpcError as error:
            raise LinkError(str(raised(error))) from None
        except (aio.BaseError, asyncio.InvalidStateError):
            raise LinkError("the stream is over") from None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise LinkError("the stream was cut") from None

    async def _read(self) -> Received:
        try:
            data = await self._call.read()
            if data is not aio.EOF:
                return bytes(data)
            code = await self._call.code()
            if code is grpc.StatusCode.OK:
                return None
            return error_of(code, await self._call.details(), await self._call.trailing_metadata())
        except aio.AioRpcError as error:
            return raised(error)
        except (aio.BaseError, asyncio.InvalidStateError):
            return LinkError("the stream is over")
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            return LinkError("the stream was cut")


class ServerStream(GrpcStream[M]):
    """The end that serves the stream; a half-close without End is a broken connection."""

    def __init__(self, service: Service[M], peer: PeerId, traffic: Traffic, context: Context) -> None:
        super().__init__(service, peer, traffic)
        self._context = context

    async def finish(self, error: Exception | None) -> None:
        """Tells the client how the handler ended, and takes what it still sends until it says End, DRAIN_S at most."""
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._write(self._service.encode(_end_of(error)))
                while not self._ended:
                    data = await self._next()
                    self._ended = data is None or isinstance(self._service.decode(data), StreamEnd)
        except (TimeoutError, PeerloomError):
            pass  # it has gone, or goes on talking: either way the call ends now

    async def close(self) -> None:
        """No more is sent; the call itself ends when its handler returns."""
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()

    async def _write(self, data: bytes) -> None:
        try:
            await self._context.write(data)
        except (aio.BaseError, asyncio.InvalidStateError) as error:
            raise LinkError(f"the peer has ended the stream: {error}") from None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise LinkError("the peer has reset the stream") from None

    async def _read(self) -> Received:
        try:
            data = await self._context.read()
        except (aio.BaseError, asyncio.InvalidStateError) as error:
            return LinkError(f"the peer has ended the stream: {error}")
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            return LinkError("the peer has reset the stream")
        return LinkError("the peer has broken off the stream") if data is aio.EOF else bytes(data)


def _end_of(error: Exception | None) -> StreamEnd:
    if error is None:
        return StreamEnd()
    if isinstance(error, PeerloomError):
        return StreamEnd(type(error).__name__, str(error))
    return StreamEnd(LinkError.__name__, OWN_FAULT)


def _is_cancelled() -> bool:
    """Tells our own cancellation from the CancelledError by which grpc reports a call that has been cut."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
