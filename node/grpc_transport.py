"""The Transport over grpc.aio: TLS pinned by the peer's record, both sides' identity proven once a connection."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TypeVar

from peerloom.node import addresses
from peerloom.node.dial_back import DialBacks
from peerloom.node.dialer import Dialer, PlainDialer
from peerloom.node.grpc_client import Metadata, PeerLink, ask
from peerloom.node.grpc_server import GrpcServer, OriginOf
from peerloom.node.grpc_session import Sessions
from peerloom.node.grpc_stream import ClientStream
from peerloom.node.grpc_wire import (
    DIAL_BACK,
    FETCH,
    STATUS,
    TAKEN,
    Call,
    Channel,
    Unreachable,
    aio,
    error_of,
    grpc,
    raised,
)
from peerloom.node.identity import Identity
from peerloom.node.seams import Clock, MessageStream, PeerHandler
from peerloom.node.throttle import NO_CAPS, Caps, Incoming, Traffic
from peerloom.node.tls import Certificate, fingerprint
from peerloom.protocol import checks, codec, limits
from peerloom.protocol.errors import ConfigError, LinkError, MalformedMessage, PeerloomError
from peerloom.protocol.handshake import RunClaim
from peerloom.protocol.messages import DialBack, FetchRequest, StateMessage
from peerloom.protocol.services import Service
from peerloom.protocol.types import PROTOCOL_MAX, PROTOCOL_MIN, NodeStatus, PeerId, PeerRecord, RunId

M = TypeVar("M")

CALL_S = 15.0  # a unary call once connected
SETUP_S = 15.0  # until a stream's first sign of life from the server
MAX_LINKS = 512  # connections kept; the least recently used idle one is closed first

Listen = tuple[str, int] | Sequence[tuple[str, int]]


class GrpcTransport:
    """Implements seams.Transport; see there for the calls.

    `listen` is one (host, port) or several, port 0 for any. `announce` replaces the addresses found by itself; an
    entry without a port gets the bound one. `caps` hold over all calls; `traffic`, if given, has caps of its own and
    is shared with what this node relays. `allow` says which peers may call; None: all of
    the run. Without start() it only calls, as `peer status` does with an identity of its own. `dialer` knows the ways
    to a peer; `origin_of` says whose tunnel ends at an address of this machine.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        certificate: Certificate,
        run_id: RunId,
        spec_hash: str,
        clock: Clock,
        rng: random.Random,
        listen: Listen = ("127.0.0.1", 0),
        announce: Sequence[str] = (),
        allow: Callable[[PeerId], bool] | None = None,
        protocol_range: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX),
        caps: Caps = NO_CAPS,
        traffic: Traffic | None = None,
        dialer: Dialer | None = None,
        origin_of: OriginOf = lambda *_: None,
    ) -> None:
        self._dialer = dialer or PlainDialer()
        self._origin_of = origin_of
        self._bound: list[tuple[str, int]] = []
        self._identity = identity
        self._certificate = certificate
        self._listen = _listen_list(listen)
        self._announce = tuple(announce)
        self._clock = clock
        self._rng = rng
        self._allow = allow
        self._claim = RunClaim(
            peer_id=identity.peer_id,
            run_id=run_id,
            spec_hash=spec_hash,
            version=version("peerloom"),
            protocol_min=protocol_range[0],
            protocol_max=protocol_range[1],
        )
        self._traffic = traffic or Traffic(clock, caps)
        self._links: OrderedDict[PeerId, PeerLink] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()
        self._server: GrpcServer | None = None
        self._stopped = False

    async def start(self, handler: PeerHandler) -> tuple[str, ...]:
        """Listens; raises PortInUse, and ConfigError for an address to announce that is none."""
        pin = fingerprint(self._certificate.der)
        sessions = Sessions(self._identity, self._claim, pin, self._clock, self._allow)
        dial_backs = DialBacks(self._clock, self._probe)
        server = GrpcServer(sessions, handler, self._clock, self._traffic, dial_backs, self._origin_of)
        self._bound = await server.start(self._certificate, self._listen)
        self._server = server
        try:
            return self.addresses()
        except ConfigError:
            await self.stop()
            raise

    def addresses(self) -> tuple[str, ...]:
        """Where peers should dial this node, as of now: its interfaces may come and go. Empty before start()."""
        if not (self._announce and self._bound):
            return addresses.dialable(self._bound)
        announced = tuple(addresses.announced(entry, self._bound[0][1]) for entry in self._announce)
        try:
            return tuple(checks.address(address) for address in announced)
        except MalformedMessage as error:
            raise ConfigError(f"announce: {error}; write HOST:PORT, [IPV6]:PORT or HOST") from None

    def local(self) -> tuple[str, int]:
        """Where this machine itself dials the server."""
        host, port = self._bound[0]
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host), port

    async def open(self, peer: PeerRecord, service: Service[M]) -> MessageStream[M]:
        """Opens a stream; returns once the peer has taken the call."""

        async def attempt(channel: Channel, metadata: Metadata) -> Call:
            return await _set_up(lambda: channel.stream_stream(service.path)(metadata=metadata))

        with self._link(peer) as link:
            call = await link.call(attempt)
        return ClientStream(service, peer.peer_id, self._traffic, call, self._background)

    async def status(self, peer: PeerRecord) -> NodeStatus:
        """Asks one node for its state; raises MalformedMessage for another's, beside what any call raises."""

        async def attempt(channel: Channel, metadata: Metadata) -> bytes:
            return await ask(channel, STATUS, codec.encode_status_request(), metadata, CALL_S, self._traffic)

        with self._link(peer) as link:
            status = codec.decode_status(await link.call(attempt))
        if status.record.peer_id != peer.peer_id:  # which would stand in place of that node's own
            raise MalformedMessage(f"{peer.peer_id} answers with the state of {status.record.peer_id}")
        return status

    async def dial_back(self, peer: PeerRecord, dialled: tuple[str, ...]) -> tuple[str, ...]:
        """Has a peer dial this node at these addresses; returns those that it reached."""
        asked = DialBack(dialled[: limits.MAX_DIAL_BACK_ADDRESSES], self._certificate.der)

        async def attempt(channel: Channel, metadata: Metadata) -> bytes:
            return await ask(channel, DIAL_BACK, codec.encode_dial_back(asked), metadata, CALL_S, self._traffic)

        with self._link(peer) as link:
            reached = codec.decode_dialled_back(await link.call(attempt))
        return tuple(address for address in reached if address in asked.addresses)

    async def _probe(self, peer: PeerId, request: DialBack, addresses: tuple[str, ...]) -> None:
        """Dials a peer anew at one of these, and has it prove itself."""
        record = PeerRecord(
            peer_id=peer,
            name="",
            role="trainer",
            addresses=addresses,
            cert_der=request.cert_der,
            version="",
            instance="",
            started_at=0.0,
            issued_at=0.0,
        )
        link = self._new_link(record, PlainDialer())
        try:
            await link.prove()
        finally:
            await link.close()

    async def fetch(self, peer: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Streams a donor's state; leaving the iteration cancels the call."""
        data = codec.encode_fetch_request(self._traffic.caps.asking(request))

        async def attempt(channel: Channel, metadata: Metadata) -> Call:
            return await _set_up(lambda: channel.unary_stream(FETCH)(data, metadata=metadata))

        with self._link(peer) as link:
            call = await link.call(attempt)
            self._traffic.note(sent=len(data))
            incoming = Incoming(self._traffic)
            try:
                while (piece := await _read(call)) is not None:
                    await incoming.took(len(piece))
                    yield codec.decode_state(piece)
            finally:
                call.cancel()

    def bytes_moved(self) -> tuple[int, int]:
        """(sent, received) over all calls so far, served ones included, without the framing of TLS and HTTP/2.

        What this node relays is in it too, as far as it shares its Traffic.
        """
        return self._traffic.sent, self._traffic.received

    def clock_offset_s(self, peer: PeerId) -> float | None:
        """The peer's clock minus ours, in seconds, as measured at the last Hello to it; None before the first."""
        link = self._links.get(peer)
        return link.clock_offset_s if link is not None else None

    async def stop(self) -> None:
        """Stops listening, ends all calls, frees every socket; safe to call twice."""
        self._stopped = True
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close() for link in links))
        await self._dialer.stop()

    @contextmanager
    def _link(self, peer: PeerRecord) -> Iterator[PeerLink]:
        if self._stopped:
            raise LinkError("this node is stopping")
        link = self._links.get(peer.peer_id)
        if link is None or link.record.cert_der != peer.cert_der:
            if link is not None:
                self._close_later(link)
            link = self._new_link(peer, self._dialer)
            self._links[peer.peer_id] = link
        link.record = peer  # its addresses may have changed
        self._links.move_to_end(peer.peer_id)
        link.calls += 1
        try:
            self._evict()
            yield link
        finally:
            link.calls -= 1

    def _new_link(self, peer: PeerRecord, dialer: Dialer) -> PeerLink:
        shared = (self._identity, self._claim, self._clock, self._rng, self._traffic, self._background)
        return PeerLink(peer, *shared, dialer)

    def _evict(self) -> None:
        idle = [peer for peer, link in self._links.items() if not link.calls]
        for peer in idle[: max(0, len(self._links) - MAX_LINKS)]:
            self._close_later(self._links.pop(peer))

    def _close_later(self, link: PeerLink) -> None:
        task = asyncio.create_task(link.close(), name="link-close")
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _listen_list(listen: Listen) -> list[tuple[str, int]]:
    match listen:
        case (str() as host, int() as port):
            return [(host, port)]
    return [(host, port) for host, port in listen]


async def _set_up(start: Callable[[], Call]) -> Call:
    """Starts a streaming call and waits for the server to take it, SETUP_S at most."""
    try:
        call = start()
    except aio.UsageError:
        raise Unreachable("the channel has been closed") from None
    try:
        async with asyncio.timeout(SETUP_S):
            metadata = await call.initial_metadata()
            taken = any(tuple(item) == TAKEN[0] for item in metadata)
            error = None if taken else await _error(call)  # an abort: its status is on its way
    except TimeoutError:
        call.cancel()
        raise LinkError(f"the peer has not taken the call within {SETUP_S:.0f} s") from None
    except BaseException:
        call.cancel()
        raise
    if error is not None:
        raise error
    return call


async def _error(call: Call) -> PeerloomError | None:
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return None
    return error_of(code, await call.details(), await call.trailing_metadata())


async def _read(call: Call) -> bytes | None:
    """The next message of a server stream, None at its end."""
    try:
        data = await call.read()
    except aio.AioRpcError as error:
        raise raised(error) from None
    if data is not aio.EOF:
        return bytes(data)
    if (told := await _error(call)) is not None:
        raise told
    return None
