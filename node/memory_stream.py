"""One stream within the process: two pipes that carry encoded messages, each with a short queue for back-pressure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from peerloom.node.seams import Clock
from peerloom.node.throttle import ChunkSize, Traffic
from peerloom.protocol.errors import LinkError, PeerloomError
from peerloom.protocol.messages import StreamEnd
from peerloom.protocol.services import Service
from peerloom.protocol.types import PeerId

M = TypeVar("M")

EARLY_S = 1e-6  # a loop may fire a timer this much early: waiting for the rest would spin
CAPACITY = 4  # messages under way before the sender waits, as with grpc's windows and 1 MiB chunks


class Pipe:
    """One direction: messages in order, each there at its own time; ended, or failed at once."""

    def __init__(self, clock: Clock, arrival: Callable[[int], float]) -> None:
        self._clock = clock
        self._arrival = arrival
        self._under_way: deque[tuple[float, bytes | PeerloomError | None]] = deque()
        self._wakers: dict[asyncio.Future[None], None] = {}  # in order: a set would wake at random
        self._failure: LinkError | None = None
        self._ended = False
        self._silent = False

    async def put(self, data: bytes) -> None:
        """Waits while the queue is full; raises LinkError when the pipe is over."""
        while len(self._under_way) >= CAPACITY and self._failure is None and not self._ended:
            await self._change()
        if self._failure is not None:
            raise LinkError(str(self._failure))
        if self._ended:
            raise LinkError("the stream is over")
        self._under_way.append((self._arrival(len(data)), data))
        self._wake()

    async def get(self) -> bytes | None:
        """The next message, None at the end, again and again; raises what the pipe ended or failed with."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._under_way and not self._silent:
                at, item = self._under_way[0]
                if (left := at - self._clock.monotonic()) <= EARLY_S:
                    return self._take(item)
                await self._change(left)
            else:
                await self._change()

    def end(self, outcome: PeerloomError | None) -> None:
        """No more comes after what is under way: a clean end, or an error that the other side is told."""
        if not self._ended and self._failure is None:
            self._ended = True
            self._under_way.append((self._arrival(0), outcome))
            self._wake()

    def fail(self, error: LinkError) -> None:
        """Breaks the pipe: what is under way is lost."""
        if self._failure is None:
            self._failure = error
            self._wake()

    def silence(self) -> None:
        """Nothing arrives any more."""
        self._silent = True

    def _take(self, item: bytes | PeerloomError | None) -> bytes | None:
        if isinstance(item, bytes):
            self._under_way.popleft()
            self._wake()
            return item
        if item is not None:
            raise item
        return None

    async def _change(self, timeout_s: float | None = None) -> None:
        """Waits for a change, or for `timeout_s` to pass."""
        loop = asyncio.get_running_loop()
        waker: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(timeout_s, _set, waker) if timeout_s is not None else None
        self._wakers[waker] = None
        try:
            await waker
        finally:
            self._wakers.pop(waker, None)
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        for waker in self._wakers:
            _set(waker)


def _set(waker: asyncio.Future[None]) -> None:
    if not waker.done():
        waker.set_result(None)


class MemoryStream(Generic[M]):
    """One end of a stream."""

    def __init__(
        self, service: Service[M], peer: PeerId, out: Pipe, back: Pipe, traffic: Traffic, *, is_client: bool
    ) -> None:
        self._service = service
        self._peer = peer
        self._out = out
        self._back = back
        self._traffic = traffic
        self._chunk_size = ChunkSize(traffic.caps)
        self._sending = asyncio.Lock()
        self._at_hand: bytes | None = None  # taken from the pipe by a receive() that was cancelled
        self._is_client = is_client
        self._outcome: PeerloomError | None = None
        self._ended = False
        self._closed = False

    @property
    def peer(self) -> PeerId:
        """The peer at the other end."""
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
            await self._out.put(data)
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
        except PeerloomError as error:
            self._outcome = error
            raise
        if isinstance(message, StreamEnd):
            self._ended = True
            return None
        self._chunk_size.received(message)
        return message

    async def _next(self) -> bytes | None:
        """The next message once the cap lets it through; a cancelled wait loses neither it nor its place."""
        if self._at_hand is None:
            self._at_hand = await self._back.get()
        if self._at_hand is not None:
            await self._traffic.took(len(self._at_hand))
        data, self._at_hand = self._at_hand, None
        return data

    async def close(self) -> None:
        """Ends this side's half, or breaks both when the stream is broken already; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._outcome is not None:
            self.reset()
        elif self._is_client:
            self._out.end(None)

    def end(self, error: PeerloomError | None) -> None:
        """The serving side is done: the caller reads what is under way, then a clean end or the error."""
        self._back.fail(LinkError("the peer has ended the stream"))
        self._out.end(error)

    def reset(self) -> None:
        """Breaks both directions at once."""
        error = LinkError("the peer has reset the stream")
        self._back.fail(error)
        self._out.fail(error)
