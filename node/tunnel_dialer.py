"""Dials through tunnels: each is joined to a loopback socket that takes one connection of grpc.

One tunnel, one connection: when it breaks, grpc finds nobody at the socket any more, and the link takes its ways anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

from peerloom.node import tunnel_keep
from peerloom.node.dialer import Endpoint, PlainEndpoint
from peerloom.node.p2pd import Stream
from peerloom.node.seams import Clock
from peerloom.node.tunnel import Tunnels
from peerloom.node.tunnel_legs import Count
from peerloom.node.tunnel_pump import Ending, hang_up, join
from peerloom.protocol.dial_order import relay_of, routes
from peerloom.protocol.errors import LimitExceeded, LinkError, MalformedMessage
from peerloom.protocol.relay_choice import RelayBook
from peerloom.protocol.tunnel import OpenTo, TunnelRefused
from peerloom.protocol.types import PeerId, PeerRecord

log = logging.getLogger(__name__)

ACCEPT_S = 10.0  # grpc connects at once; a tunnel that nobody takes is closed
MAX_TUNNELS = 256  # open at once by this node
MAX_REMEMBERED = 4096  # peers whose last way is remembered
SILENT_S = 2.0  # a connection given up after so long without a byte was stalled, not spoilt

RecordOf = Callable[[PeerId], PeerRecord | None]


class TunnelEndpoint:
    """A loopback socket with a tunnel behind it."""

    relayed = True

    def __init__(self, dialer: TunnelDialer, peer: PeerRecord, route: str, relay: PeerId, stream: Stream) -> None:
        self.relay = relay
        self.target = ""
        self._dialer = dialer
        self._peer = peer.peer_id
        self._route = route
        self._stream = stream
        self._proven = False
        self._released = False
        self._scored = False
        self._accepted = asyncio.Event()
        self._ending = Ending(heard_at=asyncio.get_running_loop().time())
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._local: Stream | None = None

    async def listen(self) -> None:
        """Binds the socket and waits for its one connection in the background."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.target = f"{host}:{port}"
        self._task = asyncio.create_task(self._run(), name=f"tunnel-{self._peer[-6:]}")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._local is not None or self._task is None or self._task.done():
            writer.close()
            return
        self._local = (reader, writer)
        self._accepted.set()

    async def _run(self) -> None:
        assert self._server is not None  # listen() made it
        try:
            async with asyncio.timeout(ACCEPT_S):
                await self._accepted.wait()
        except TimeoutError:
            return
        finally:
            self._server.close()
            if self._local is None:
                await hang_up(self._stream[1])
        assert self._local is not None  # the event says so
        counting = self._dialer.counting(self._local, self._stream)
        self._judge(await join(self._local, self._stream, counting, ending=self._ending))

    def _judge(self, ending: Ending) -> None:
        """What the end says of the relay: one in order, asked for by this side, says nothing."""
        if self._released or (self._proven and ending.error is None):
            return
        if isinstance(ending.error, MalformedMessage):
            self.score("corrupt")
        elif ending.error is not None:
            self.score("broken")
        elif ending.by_local:  # grpc gave up on what it read, or did not read
            self.score("stalled" if self._silent() else "corrupt")

    def _silent(self) -> bool:
        return asyncio.get_running_loop().time() - self._ending.heard_at > SILENT_S

    def proven(self) -> None:
        """The peer has answered."""
        self._proven = True
        self._dialer.worked(self._peer, self._route)

    def failed(self) -> None:
        """No proof came in time, or the connection broke under a call."""
        self.score("broken" if self._proven else "stalled" if self._silent() else "corrupt")

    def score(self, fault: str) -> None:
        """Holds one fault of this tunnel against its relay; a libp2p connection straight to the peer has none."""
        if self._scored or self.relay == self._peer:
            return
        self._scored = True
        self._dialer.fault(self.relay, fault)

    def release(self) -> None:
        """Closes the tunnel, unless grpc has the connection: then its end is the tunnel's."""
        self._released = True
        if self._local is None and self._task is not None:
            self._task.cancel()

    def cut(self) -> None:
        """Ends the tunnel now: its relay is lost, and has been judged for it."""
        self._scored = True
        if self._local is not None:
            self._local[1].transport.abort()
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Waits for the end."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        if self._local is not None:
            self._local[1].close()
        self._stream[1].close()

    async def stop(self) -> None:
        """Ends the tunnel."""
        self._released = True
        if self._task is not None:
            self._task.cancel()
        await self.ended()


class TunnelDialer:
    """Implements dialer.Dialer with addresses and relays; `record_of` finds the records of relays."""

    def __init__(self, tunnels: Tunnels, book: RelayBook, clock: Clock, record_of: RecordOf, count: Count) -> None:
        self.clock = clock
        self.count = count
        self.counting = tunnels.counting
        self._tunnels = tunnels
        self._book = book
        self._record_of = record_of
        self._last: OrderedDict[PeerId, str] = OrderedDict()
        self._open: set[TunnelEndpoint] = set()
        self._in_use: Counter[PeerId] = Counter()  # tunnels by relay
        self._watches: dict[PeerId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def routes(self, peer: PeerRecord) -> tuple[str, ...]:
        """All ways: what worked last, then addresses and relays by turns."""
        connected = peer.reach != "direct" and peer.peer_id in await self._tunnels.connected()
        relays = self._book.order(peer.via, self.clock.monotonic())
        return routes(peer, relays, connected=connected, last=self._last.get(peer.peer_id))

    async def endpoint(self, peer: PeerRecord, route: str) -> Endpoint:
        """The address itself, or a loopback socket that leads through a tunnel; raises PeerError."""
        relay = relay_of(route)
        if relay is None:
            return PlainEndpoint(route)
        if peer.peer_id == self._tunnels.desk.own or relay == self._tunnels.desk.own:
            raise LinkError("a tunnel may not lead back to its own peer")
        if len(self._open) >= MAX_TUNNELS:
            raise LimitExceeded(f"more than {MAX_TUNNELS} tunnels at once by this node")
        stream = await self._stream(peer, relay)
        endpoint = TunnelEndpoint(self, peer, route, relay, stream)
        try:
            await endpoint.listen()
        except OSError as error:
            stream[1].close()
            raise LinkError(f"no loopback socket for a tunnel: {error.strerror}") from None
        except BaseException:
            stream[1].close()
            raise
        self._note(endpoint)
        return endpoint

    async def _stream(self, peer: PeerRecord, relay: PeerId) -> Stream:
        record = peer if relay == peer.peer_id else self._record_of(relay)
        if record is not None and record.libp2p and relay not in await self._tunnels.connected():
            await self._tunnels.connect(relay, record.libp2p)
        try:
            return await self._tunnels.open(relay, OpenTo(peer.peer_id))
        except LinkError as error:
            if relay != peer.peer_id:
                self.fault(relay, "refused" if isinstance(error, TunnelRefused) else "gone")
            raise
        except MalformedMessage as error:
            if relay == peer.peer_id:
                raise
            self.fault(relay, "corrupt")  # the relay's own words: the peer it leads to shall not be blamed for them
            raise LinkError(f"relay {relay} does not keep to the protocol: {error}") from error

    def _note(self, endpoint: TunnelEndpoint) -> None:
        self._open.add(endpoint)
        self.count("tunnels_opened", 1.0)
        if endpoint.relay not in self._watches and endpoint.relay != endpoint._peer:
            self._watches[endpoint.relay] = asyncio.create_task(self._watch(endpoint.relay), name="relay-watch")
        self._in_use[endpoint.relay] += 1
        task = asyncio.create_task(self._forget(endpoint), name="tunnel-end")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self, endpoint: TunnelEndpoint) -> None:
        await endpoint.ended()
        self._open.discard(endpoint)
        self._in_use[endpoint.relay] -= 1
        if self._in_use[endpoint.relay] <= 0:
            del self._in_use[endpoint.relay]
            if (watch := self._watches.pop(endpoint.relay, None)) is not None:
                watch.cancel()

    async def _watch(self, relay: PeerId) -> None:
        """Cuts the tunnels through a relay that shows no sign of life: grpc alone would wait for long."""

        def measured(latency_s: float, load: float) -> None:
            self._book.measured(relay, latency_s, load)

        fault = await tunnel_keep.keep(self._tunnels, relay, self.clock, measured, place=False)
        self._watches.pop(relay, None)
        if fault == "refused":  # it is too full to be watched, not dead
            return
        log.info("relay %s is lost", relay)
        self.fault(relay, fault)
        for endpoint in [each for each in self._open if each.relay == relay]:
            endpoint.cut()

    def worked(self, peer: PeerId, route: str) -> None:
        """Remembers the way to a peer."""
        self._last[peer] = route
        self._last.move_to_end(peer)
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def fault(self, relay: PeerId, fault: str) -> None:
        """Holds a fault against a relay, which is no longer the remembered way to anybody."""
        self.count(f"relay_faults_{fault}", 1.0)
        for peer in [peer for peer, route in self._last.items() if relay_of(route) == relay]:
            del self._last[peer]
        if self._book.fault(relay, fault, self.clock.monotonic()):
            log.warning("relay %s is left alone for its faults, the last: %s", relay, fault)
            self.count("relays_left_alone", 1.0)

    async def stop(self) -> None:
        """Ends every tunnel that this node opened."""
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await asyncio.gather(*(endpoint.stop() for endpoint in list(self._open)))
        await asyncio.gather(*self._tasks, return_exceptions=True)
