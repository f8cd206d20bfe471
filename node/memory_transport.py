"""The Transport within one process: same calls, same errors, messages through the codec, time only by asyncio.sleep.

A hub carries all messages: each link has a latency and a bandwidth, and peers can be killed or parted from each other.
Nothing here reads a clock but the hub's, so under a virtual-time loop a whole swarm runs deterministically.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import TypeVar

from peerloom.node.backoff import Backoff
from peerloom.node.memory_stream import MemoryStream, Pipe
from peerloom.node.seams import Clock, MessageStream, PeerHandler
from peerloom.node.slots import StreamSlots
from peerloom.node.throttle import NO_CAPS, Caps, Traffic
from peerloom.protocol import codec, handshake
from peerloom.protocol.errors import AuthenticationError, LinkError, PeerloomError
from peerloom.protocol.handshake import RunClaim
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.services import Service
from peerloom.protocol.types import PROTOCOL_MAX, PROTOCOL_MIN, NodeStatus, PeerId, PeerRecord, RunId

log = logging.getLogger(__name__)

M = TypeVar("M")

UNREACHABLE_S = 15.0  # what a call into a partition waits before it fails
SILENCE_S = 30.0  # what an open stream waits in a partition before both ends find it broken
NO_RUN = RunId("0" * 16)
Pair = tuple[PeerId, PeerId]


@dataclass(slots=True)
class _Link:
    """One direction between two peers: seconds, bytes per second (None: unlimited), and when it is free again."""

    latency_s: float
    bandwidth: float | None
    free_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Connection:
    """An open stream: its two ends and its two directions."""

    peers: Pair
    pipes: tuple[Pipe, Pipe]
    silence: asyncio.TimerHandle | None = None

    def fail(self, error: LinkError) -> None:
        for pipe in self.pipes:
            pipe.fail(error)


class MemoryHub:
    """The network between MemoryTransports; `bandwidth` is in bytes per second, for each direction of each pair."""

    def __init__(
        self, clock: Clock, rng: random.Random, *, latency_s: float = 0.0, bandwidth: float | None = None
    ) -> None:
        self.clock = clock
        self.rng = rng
        self._latency_s = latency_s
        self._bandwidth = bandwidth
        self._links: dict[Pair, _Link] = {}
        self._parted: set[frozenset[PeerId]] = set()
        self._serving: dict[PeerId, MemoryTransport] = {}
        self._connections: dict[_Connection, None] = {}  # in the order of their opening

    def transport(self, peer_id: PeerId, **arguments: object) -> MemoryTransport:
        """A transport of `peer_id` on this hub; the arguments are MemoryTransport's."""
        return MemoryTransport(peer_id, self, **arguments)  # type: ignore[arg-type]

    def set_link(self, a: PeerId, b: PeerId, *, latency_s: float, bandwidth: float | None = None) -> None:
        """Gives both directions between two peers a latency and a bandwidth of their own."""
        for pair in ((a, b), (b, a)):
            self._links[pair] = _Link(latency_s, bandwidth)

    def partition(self, a: PeerId, b: PeerId) -> None:
        """Lets nothing through between two peers: open streams fall silent and break after SILENCE_S."""
        self._parted.add(frozenset((a, b)))
        for connection in self._between(a, b):
            for pipe in connection.pipes:
                pipe.silence()
            error = LinkError(f"no sign of life for {SILENCE_S:.0f} s")
            connection.silence = asyncio.get_running_loop().call_later(SILENCE_S, connection.fail, error)

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Ends a partition for streams opened from now on."""
        self._parted.discard(frozenset((a, b)))

    def kill(self, peer: PeerId) -> None:
        """What a kill -9 looks like from outside: its streams are reset, and nobody answers until it starts again."""
        if (transport := self._serving.pop(peer, None)) is not None:
            transport.die()
        for connection in [each for each in self._connections if peer in each.peers]:
            connection.fail(LinkError(f"{peer} has reset the stream"))

    def link(self, source: PeerId, target: PeerId) -> _Link:
        """The direction from `source` to `target`."""
        return self._links.setdefault((source, target), _Link(self._latency_s, self._bandwidth))

    async def carry(self, source: PeerId, target: PeerId, size: int) -> None:
        """Takes as long as one message of a unary call does; raises LinkError in a partition."""
        if frozenset((source, target)) in self._parted:
            await asyncio.sleep(UNREACHABLE_S)
            raise LinkError(f"no answer from {target} within {UNREACHABLE_S:.0f} s")
        await asyncio.sleep(max(0.0, self.arrival(source, target, size) - self.clock.monotonic()))

    def arrival(self, source: PeerId, target: PeerId, size: int) -> float:
        """Queues `size` bytes on a link; returns when they are there, on the hub's clock."""
        link, now = self.link(source, target), self.clock.monotonic()
        link.free_at = max(now, link.free_at) + (size / link.bandwidth if link.bandwidth else 0.0)
        return link.free_at + link.latency_s

    async def reach(self, caller: PeerId, target: PeerId) -> MemoryTransport:
        """One way to the target and back; raises LinkError when nobody is there."""
        await self.carry(caller, target, 0)
        await self.carry(target, caller, 0)
        if (found := self._serving.get(target)) is None:
            raise LinkError(f"cannot talk to {target}: connection refused")
        return found

    def join(self, transport: MemoryTransport) -> None:
        """The transport listens."""
        self._serving[transport.peer_id] = transport

    def leave(self, transport: MemoryTransport) -> None:
        """The transport no longer listens; its streams end."""
        if self._serving.get(transport.peer_id) in (transport, None):
            self.kill(transport.peer_id)

    def connect(self, caller: PeerId, target: PeerId) -> _Connection:
        """A new connection's two pipes: from the caller, and to it."""
        pipes = (self._pipe(caller, target), self._pipe(target, caller))
        connection = _Connection((caller, target), pipes)
        self._connections[connection] = None
        return connection

    def disconnect(self, connection: _Connection) -> None:
        """Forgets a connection that is over."""
        self._connections.pop(connection, None)
        if connection.silence is not None:
            connection.silence.cancel()

    def _pipe(self, source: PeerId, target: PeerId) -> Pipe:
        return Pipe(self.clock, lambda size: self.arrival(source, target, size))

    def _between(self, a: PeerId, b: PeerId) -> list[_Connection]:
        return [each for each in self._connections if set(each.peers) == {a, b}]


class MemoryTransport:
    """Implements seams.Transport on a hub; see there for the calls.

    A record is dialled by its peer id; its certificate must be the other transport's `cert_der`, pinned as on the wire.
    """

    def __init__(
        self,
        peer_id: PeerId,
        hub: MemoryHub,
        *,
        run_id: RunId = NO_RUN,
        spec_hash: str = "",
        version: str = "0",
        protocol_range: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX),
        cert_der: bytes = b"memory",
        allow: Callable[[PeerId], bool] | None = None,
        caps: Caps = NO_CAPS,
    ) -> None:
        self.peer_id = peer_id
        self.cert_der = cert_der
        self.claim = RunClaim(
            peer_id=peer_id,
            run_id=run_id,
            spec_hash=spec_hash,
            version=version,
            protocol_min=protocol_range[0],
            protocol_max=protocol_range[1],
        )
        self._hub = hub
        self._allow = allow
        self._handler: PeerHandler | None = None
        self._slots = StreamSlots()
        self._backoffs: dict[PeerId, Backoff] = {}
        self._jobs: dict[asyncio.Task[None], None] = {}  # in order: a set would end them at random
        self._traffic = Traffic(hub.clock, caps)
        self._stopped = False

    async def start(self, handler: PeerHandler) -> tuple[str, ...]:
        """Listens on the hub."""
        self._handler = handler
        self._hub.join(self)
        return (f"{self.peer_id}.memory.invalid:1",)

    async def open(self, peer: PeerRecord, service: Service[M]) -> MessageStream[M]:
        """Opens a stream; returns once the peer has taken it."""
        server = await self._dial(peer)
        slot = ExitStack()
        slot.enter_context(server._slots.hold(self.peer_id))
        connection = self._hub.connect(self.peer_id, server.peer_id)
        out, back = connection.pipes
        near = MemoryStream(service, peer.peer_id, out, back, self._traffic, is_client=True)
        far = MemoryStream(service, self.peer_id, back, out, server._traffic, is_client=False)
        job = asyncio.create_task(server._serve(service, far), name=f"serve-{service.name}-{self.peer_id[-6:]}")
        server._jobs[job] = None

        def over(_: asyncio.Task[None]) -> None:
            server._jobs.pop(job, None)
            self._hub.disconnect(connection)
            slot.close()

        job.add_done_callback(over)
        return near

    async def status(self, peer: PeerRecord) -> NodeStatus:
        """Asks one node for its state."""
        server = await self._dial(peer)
        data = codec.encode_status(await server._own_handler().status())
        await server._traffic.may_send(len(data))
        server._traffic.sent += len(data)
        await self._hub.carry(server.peer_id, self.peer_id, len(data))
        await self._traffic.took(len(data))
        return codec.decode_status(data)

    async def fetch(self, peer: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Streams a donor's state."""
        server = await self._dial(peer)
        asked = codec.encode_fetch_request(self._traffic.caps.asking(request))
        self._traffic.note(sent=len(asked))
        with server._slots.hold(self.peer_id):
            connection = self._hub.connect(self.peer_id, server.peer_id)
            pipe = connection.pipes[1]
            job = asyncio.create_task(server._give(self.peer_id, asked, pipe), name=f"serve-fetch-{self.peer_id[-6:]}")
            server._jobs[job] = None
            job.add_done_callback(lambda done: server._jobs.pop(done, None))
            try:
                while (data := await pipe.get()) is not None:
                    await self._traffic.took(len(data))
                    yield codec.decode_state(data)
            finally:
                job.cancel()
                await asyncio.wait((job,))
                self._hub.disconnect(connection)

    def bytes_moved(self) -> tuple[int, int]:
        """(sent, received) over all calls so far, served ones included."""
        return self._traffic.sent, self._traffic.received

    async def stop(self) -> None:
        """Stops listening and ends all calls; safe to call twice."""
        self._stopped = True
        jobs = list(self._jobs)
        self._hub.leave(self)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    def die(self) -> None:
        """Stops at once: what the hub does to a killed peer."""
        self._stopped = True
        for job in list(self._jobs):
            job.cancel()

    async def _dial(self, peer: PeerRecord) -> MemoryTransport:
        if self._stopped:
            raise LinkError("this node is stopping")
        backoff = self._backoffs.setdefault(peer.peer_id, Backoff(self._hub.rng))
        backoff.check(self._hub.clock.monotonic())
        try:
            server = await self._hub.reach(self.peer_id, peer.peer_id)
            if server.cert_der != peer.cert_der:
                raise LinkError("another certificate answers there than the one in its record")
            handshake.common_version(server.claim, self.claim)
            handshake.check_same_run(server.claim, self.claim)
            if server._allow is not None and not server._allow(self.peer_id):
                raise AuthenticationError(f"{self.peer_id} is not allowed here")
        except PeerloomError as error:
            backoff.failed(self._hub.clock.monotonic(), str(error))
            raise
        backoff.reset()
        return server

    async def _serve(self, service: Service[M], stream: MemoryStream[M]) -> None:
        try:
            await self._own_handler().serve(service, stream)
        except asyncio.CancelledError:
            stream.reset()
            raise
        except PeerloomError as error:
            stream.end(error)
        except Exception:
            log.exception("%s with %s failed", service.name, stream.peer)
            stream.end(LinkError("internal: the peer met an error of its own"))
        else:
            stream.end(None)
        finally:
            await stream.close()

    async def _give(self, peer: PeerId, asked: bytes, pipe: Pipe) -> None:
        try:
            request = self._traffic.caps.asked(codec.decode_fetch_request(asked))
            async with aclosing(self._own_handler().fetch(peer, request)) as pieces:
                async for message in pieces:
                    data = codec.encode_state(message)
                    await self._traffic.may_send(len(data))
                    await pipe.put(data)
                    self._traffic.sent += len(data)
        except asyncio.CancelledError:
            pipe.fail(LinkError("the peer has reset the stream"))
            raise
        except PeerloomError as error:
            pipe.end(error)
        except Exception:
            log.exception("a fetch by %s failed", peer)
            pipe.end(LinkError("internal: the peer met an error of its own"))
        else:
            pipe.end(None)

    def _own_handler(self) -> PeerHandler:
        if self._handler is None:
            raise LinkError(f"{self.peer_id} serves nothing yet")
        return self._handler
