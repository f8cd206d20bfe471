"""This node's end of `peerloom/tunnel/2`: takes tunnels that are brought, relays others', opens its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from peerloom.node.p2pd import CALL_TIMEOUT_S, P2pDaemon, Stream
from peerloom.node.seams import Clock
from peerloom.node.throttle import Traffic
from peerloom.node.tunnel_leg_dial import LegDialer
from peerloom.node.tunnel_legs import Count, LegPort, Place
from peerloom.node.tunnel_opening import Taken, ask, take, taken_by
from peerloom.node.tunnel_pump import READ_BYTES, Passing, hang_up, join, relay
from peerloom.node.tunnel_splice import Moved
from peerloom.protocol import tunnel
from peerloom.protocol.errors import LinkError, MalformedMessage, PeerError, PeerloomError
from peerloom.protocol.relay_desk import Pair, RelayDesk, RelayShares
from peerloom.protocol.tunnel import DeliverFrom, Header, Keep, Offer, OpenTo, Refusal, TunnelRefused
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

HEADER_S = 3.0  # from a stream's first sign of life to the end of its header
SETUP_S = 6.0  # to open a tunnel, the relay's own step to the target included
FORWARD_S = 4.0  # the relay's step: one that fails is tried again on a connection of its own
LEG_S = 3.0  # for the one who opens, to try the relay's port and say by which way
KEEP_S = 10.0  # a stream that keeps a relay and asks nothing for so long is over
PING_FLOOR_S = 0.1  # after an answer on it: many pings at once would not let the event loop go


class Tunnels:
    """Serves the protocol on each life of p2pd (`attach`), and opens tunnels through peers (`open`).

    `my_relays` are those through which others may bring tunnels; `allowed` says whom this node deals with; `count`
    takes cumulative metrics; `traffic` counts what is relayed, and holds it to the node's caps.
    """

    def __init__(
        self,
        desk: RelayDesk,
        clock: Clock,
        *,
        traffic: Traffic | None = None,
        my_relays: Callable[[], frozenset[PeerId]] = frozenset,
        allowed: Callable[[PeerId], bool] = lambda _: True,
        count: Count = lambda *_: None,
    ) -> None:
        self.desk = desk
        self._clock = clock
        self._traffic = traffic or Traffic(clock)
        self._shares = RelayShares(desk.limits.rate, desk.limits.pair_rate)
        self._my_relays = my_relays
        self._allowed = allowed
        self._count = count
        self._leg_port = LegPort(count)
        self._leg_dialer = LegDialer(clock, count)
        self._daemon: P2pDaemon | None = None
        self._server: tuple[str, int] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._origins: dict[tuple[str, int], str] = {}
        self._stopped = False

    def serve(self, host: str, port: int) -> None:
        """Names the local grpc server, at which tunnels to this node end; until then they are refused."""
        self._server = (host, port)

    def listen(self, hosts: Sequence[str], port: int) -> int:
        """Has a TCP port at which ends may take their legs of the tunnels relayed here, 0 for a free one; returns it.

        Raises PortInUse or ConfigError.
        """
        return self._leg_port.listen(hosts, port)

    async def attach(self, daemon: P2pDaemon) -> None:
        """Takes streams from a life of p2pd, and opens them by it, in place of a former one; raises PeerloomError."""
        self._daemon = daemon
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await daemon.p2p.add_binary_stream_handler(tunnel.TUNNEL, self._take)
        except (OSError, TimeoutError) as error:
            raise PeerloomError("the libp2p daemon does not answer; start the node again") from error

    async def attach_client(self, daemon: P2pDaemon) -> None:
        """Only opens streams by it: for one that listens on nothing."""
        self._daemon = daemon

    def origin_of(self, host: str, port: int) -> str | None:
        """Who speaks from a port of this machine: the tunnel that ends there, None for anybody else."""
        return self._origins.get((host, port))

    async def connected(self) -> frozenset[PeerId]:
        """The peers that libp2p is connected to."""
        if self._daemon is None:
            return frozenset()
        try:
            return frozenset(await self._daemon.contacts())
        except (LinkError, TimeoutError):
            return frozenset()

    # -- opening ------------------------------------------------------------------------------------------------

    async def open(self, via: PeerId, header: Header) -> Stream:
        """A stream to `via` that has taken the header; raises PeerError."""
        if self._daemon is None or self._stopped:
            raise LinkError("the libp2p daemon does not run now")
        try:
            async with asyncio.timeout(SETUP_S):
                stream, taken = await ask(self._daemon, via, header, SETUP_S)
                if isinstance(taken, Offer) and isinstance(header, OpenTo):
                    return await self._leg_dialer.choose(self._daemon, via, stream, taken)
        except TimeoutError:
            raise LinkError(f"no tunnel through {via} within {SETUP_S:.0f} s") from None
        if taken != "taken":
            stream[1].close()
            raise MalformedMessage(f"{via} offers what it may not")
        if isinstance(header, OpenTo):
            self._count("tunnel_legs_libp2p", 1.0)
        return stream

    async def connect(self, peer: PeerId, multiaddrs: tuple[str, ...]) -> None:
        """Has libp2p dial a peer at addresses that it may not know; raises nothing."""
        for multiaddr in multiaddrs:
            if self._daemon is None:
                return
            try:
                return await self._daemon.connect(peer, multiaddr, SETUP_S)
            except (LinkError, TimeoutError) as error:
                log.debug("libp2p does not reach %s at %s: %s", peer, multiaddr, error)

    # -- serving ------------------------------------------------------------------------------------------------

    async def _take(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream that a peer opened; called by hivemind in a task of its own."""
        task = asyncio.current_task()
        assert task is not None  # we are in one
        self._tasks.add(task)
        try:
            await self._serve((reader, writer), PeerId(str(info.peer_id)))
        except (OSError, PeerError, asyncio.IncompleteReadError, TimeoutError) as error:
            log.debug("a tunnel of %s ended: %s", info.peer_id, error)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        except Exception:
            log.exception("a tunnel of %s failed", info.peer_id)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, stream: Stream, source: PeerId) -> None:
        refusal = self.desk.arrived(source)
        if refusal is not None or self._stopped:
            return await self._refuse(stream, refusal or "busy")
        settled = False

        def settle() -> None:
            nonlocal settled
            if not settled:
                self.desk.settled(source)
            settled = True

        try:
            header = await self._header(stream)
            if header is None:
                return await self._refuse(stream, "malformed")
            if not self._allowed(source):
                return await self._refuse(stream, "unwilling")
            match header:
                case OpenTo(target) if target == self.desk.own:
                    await self._end_here(stream, source, source, settle)
                case OpenTo(target):
                    await self._forward(stream, source, target, settle)
                case DeliverFrom(origin, offer):
                    await self._end_here(stream, source, origin, settle, offer)
                case Keep(place):
                    await self._keep(stream, source, place, settle)
        finally:
            settle()

    async def _header(self, stream: Stream) -> Header | None:
        """None when it never comes, or is none."""
        try:
            async with asyncio.timeout(HEADER_S):
                length = (await stream[0].readexactly(1))[0]
                if not 0 < length <= tunnel.MAX_HEADER_BYTES:
                    return None
                return tunnel.decode_header(await stream[0].readexactly(length))
        except (MalformedMessage, TimeoutError, asyncio.IncompleteReadError):
            return None

    async def _refuse(self, stream: Stream, refusal: Refusal) -> None:
        self._count(f"tunnels_refused_{refusal}", 1.0)
        with contextlib.suppress(OSError):
            stream[1].write(tunnel.encode_answer(refusal))
            await hang_up(stream[1])

    async def _end_here(
        self, stream: Stream, bearer: PeerId, origin: PeerId, settle: Callable[[], None], offer: Offer | None = None
    ) -> None:
        if self._server is None or not self._allowed(origin):
            return await self._refuse(stream, "unwilling")
        refusal = self.desk.deliver(bearer, origin, self._my_relays(), self._clock.monotonic())
        if refusal is not None:
            return await self._refuse(stream, refusal)
        try:
            try:
                local = await asyncio.open_connection(*self._server)
            except OSError:
                return await self._refuse(stream, "unreachable")
            host, port = local[1].get_extra_info("sockname")[:2]
            self._origins[host, port] = f"{origin} by {bearer}"
            try:
                stream = await self._leg_dialer.choose(self._daemon, bearer, stream, offer)
                settle()
                self._count("tunnels_delivered", 1.0)
                await join(local, stream, self.counting(local, stream))
            finally:
                self._origins.pop((host, port), None)
                local[1].close()
                stream[1].close()
        finally:
            self.desk.left(origin)

    async def _forward(self, stream: Stream, source: PeerId, target: PeerId, settle: Callable[[], None]) -> None:
        if not self._allowed(target):
            return await self._refuse(stream, "unwilling")
        refusal = self.desk.open_to(source, target, self._clock.monotonic())
        if refusal is not None:
            return await self._refuse(stream, refusal)
        try:
            onward = await self._reach(source, target)
            if isinstance(onward, str):
                return await self._refuse(stream, onward)
            try:
                stream = await self._assent(stream, source)
                settle()
                self._count("tunnels_relayed", 1.0)
                await self._carry(stream, onward, (source, target))
            finally:
                onward[1].close()
                stream[1].close()  # a leg, which nobody else closes when this is cancelled
        finally:
            self.desk.closed(source, target)

    async def _carry(self, one: Stream, other: Stream, pair: Pair) -> None:
        read_bytes = min(READ_BYTES, self._traffic.caps.carried_bytes)
        there, back = self._sharing(pair, one, other), self._sharing(pair, other, one)
        await relay(one, other, (there, back), read_bytes=read_bytes)

    async def _reach(self, source: PeerId, target: PeerId) -> Stream | Refusal:
        """The relay's step to the target.

        A connection may be dead without knowing it, its peer having moved: it is given up, so that the one that the
        peer has made since, or makes when it notices, is taken.
        """
        daemon = self._daemon
        if daemon is None:
            return "unreachable"
        try:
            with self._leg_port.offered() as place:
                async with asyncio.timeout(FORWARD_S):
                    header = DeliverFrom(source, None if place is None else place.offer)
                    stream, taken = await ask(daemon, target, header, FORWARD_S)
                return self._chosen(stream, taken, place, target)
        except TunnelRefused as error:
            return error.refusal
        except TimeoutError:
            with contextlib.suppress(LinkError, TimeoutError):
                await daemon.disconnect(target)
        except PeerError as error:
            log.debug("%s is not reached for %s: %s", target, source, error)
        return "unreachable"

    async def _assent(self, stream: Stream, source: PeerId) -> Stream:
        """Tells the one who asked that the tunnel stands; returns what its leg goes by. Raises PeerError or OSError."""
        with self._leg_port.offered() as place:
            if place is None:
                await take(stream)
                return self._chosen(stream, "taken", None, source)
            stream[1].write(tunnel.encode_answer("offered", place.offer))
            await stream[1].drain()
            async with asyncio.timeout(LEG_S):
                return self._chosen(stream, await taken_by(stream, source), place, source)

    def _chosen(self, stream: Stream, taken: Taken, place: Place | None, end: PeerId) -> Stream:
        if taken == "taken":
            self._count("tunnel_legs_libp2p", 1.0)
            return stream
        stream[1].close()
        leg = place.take() if place is not None and taken == "moved" else None
        if leg is None:
            raise MalformedMessage(f"{end} speaks of a connection that it has not made")
        self._count("tunnel_legs_tcp", 1.0)
        return leg

    async def _keep(self, stream: Stream, source: PeerId, place: bool, settle: Callable[[], None]) -> None:
        refusal = self.desk.keep(source, place, self._my_relays())
        if refusal is not None:
            return await self._refuse(stream, refusal)
        try:
            await take(stream)
            settle()
            while True:
                async with asyncio.timeout(KEEP_S):
                    await stream[0].readexactly(1)
                    stream[1].write(bytes([round(255 * self.desk.load())]))
                    await stream[1].drain()
                await asyncio.sleep(PING_FLOOR_S)
        finally:
            stream[1].transport.abort()  # a close would wait for one that does not read
            self.desk.unkept(source, place)

    def counting(self, local: Stream, stream: Stream) -> Passing:
        """Counts what a tunnel that ends here moves, into it and out of it."""
        into, out = self._crossing(local, stream), self._crossing(stream, local)

        def outward(size: int) -> float:
            self._count("tunnel_sent_bytes", float(size))
            into(size)
            return 0.0

        def inward(size: int) -> float:
            self._count("tunnel_received_bytes", float(size))
            out(size)
            return 0.0

        return outward, inward

    def _sharing(self, pair: Pair, source: Stream, sink: Stream) -> Moved:
        crossing = self._crossing(source, sink)

        def passing(size: int) -> float:
            self._count("relayed_bytes", float(size))
            crossing(size)
            shared_s = self._shares.wait_s(pair, size, self._clock.monotonic())
            return max(shared_s, self._traffic.carry_s(size))

        return passing

    def _crossing(self, source: Stream, sink: Stream) -> Callable[[int], None]:
        """Takes note of what has come, and will go, by way of p2pd, whose connections are counted as a whole."""
        crossed, comes, goes = self._traffic.crossed, _over_libp2p(source), _over_libp2p(sink)

        def crossing(size: int) -> None:
            crossed.received += size * comes
            crossed.sent += size * goes

        return crossing

    async def stop(self) -> None:
        """Ends all tunnels that others opened here; safe to call twice."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leg_dialer.stop()
        await self._leg_port.stop()
        self._daemon = None


def _over_libp2p(stream: Stream) -> bool:
    """Whether it is p2pd that has the connection: all that leads to it is a socket of this machine's."""
    under = stream[1].get_extra_info("socket")
    return under is not None and under.family == socket.AF_UNIX
