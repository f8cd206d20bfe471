"""An end's side of a leg: over the TCP port that the relay offers where that is reached, else over libp2p."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from peerloom.node.p2pd import STREAM_BUFFER_BYTES, P2pDaemon, Stream
from peerloom.node.seams import Clock
from peerloom.node.tunnel_legs import Count
from peerloom.protocol.errors import LinkError
from peerloom.protocol.tunnel import LEG_ACK, Offer, encode_answer
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

DIRECT_S = 1.0  # to connect, show the token and be let in, over all hosts
HOSTS_S = 0.5  # for p2pd to say where the relay is
CLOSE_S = 2.0  # for the relay to close a stream that is of no more use
AGAIN_S = 600.0  # a relay whose port was not reached is not tried before, so that it costs no tunnel's setup time
CROWDED_S = 20.0  # nor is one before this that was reached and hung up: others had taken all its room
MAX_REMEMBERED = 1024
MAX_HOSTS = 3


class LegDialer:
    """Dials relays' ports, and leaves alone those that it did not reach; `count` takes cumulative metrics."""

    def __init__(self, clock: Clock, count: Count = lambda *_: None) -> None:
        self._clock = clock
        self._count = count
        self._failed: OrderedDict[PeerId, float] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    async def choose(self, daemon: P2pDaemon | None, relay: PeerId, stream: Stream, offer: Offer | None) -> Stream:
        """What the leg goes by, of which the relay is told: the connection that it offers, or else the stream.

        Raises LinkError.
        """
        leg = None
        try:
            if daemon is not None and offer is not None and not self.left_alone(relay):
                leg = await self.dial(relay, await _hosts_of(daemon, relay), offer)
            stream[1].write(encode_answer("taken" if leg is None else "moved"))
            await stream[1].drain()
        except BaseException as error:
            for each in (stream, leg):
                if each is not None:
                    each[1].close()
            if isinstance(error, OSError):
                raise LinkError(f"{relay} broke the tunnel off before it stood") from None
            raise
        self._count("tunnel_legs_libp2p" if leg is None else "tunnel_legs_tcp", 1.0)
        if leg is None:
            return stream
        self._see_off(stream)
        return leg

    def _see_off(self, stream: Stream) -> None:
        """Closes the stream once the relay has: p2pd may drop what was written last, if this end is the first."""

        def ended(task: asyncio.Task[None]) -> None:
            """Also of one that was cancelled before it began."""
            self._closing.discard(task)
            stream[1].close()

        task = asyncio.create_task(_until_closed(stream), name="moved-tunnel")
        self._closing.add(task)
        task.add_done_callback(ended)

    async def stop(self) -> None:
        """Closes what waits to be closed."""
        closing = list(self._closing)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)

    def left_alone(self, relay: PeerId) -> bool:
        """Whether an offer of its is not worth an attempt now."""
        return self._clock.monotonic() < self._failed.get(relay, 0.0)

    async def dial(self, relay: PeerId, hosts: Sequence[str], offer: Offer) -> Stream | None:
        """A connection that the relay has let in, at the first of `hosts` (IP addresses) that has one; or None."""
        if not hosts:
            return None
        hosts, again_s = hosts[:MAX_HOSTS], AGAIN_S
        for host in hosts:
            try:
                async with asyncio.timeout(DIRECT_S / len(hosts)):
                    return await _connect(host, offer)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                log.debug("port %d of relay %s is not reached at %s: %s", offer.port, relay, host, error)
                if isinstance(error, asyncio.IncompleteReadError | ConnectionResetError):
                    again_s = CROWDED_S  # it can be reached, and had no room
        self._failed[relay] = self._clock.monotonic() + again_s
        self._failed.move_to_end(relay)
        if len(self._failed) > MAX_REMEMBERED:
            self._failed.popitem(last=False)
        return None


async def _hosts_of(daemon: P2pDaemon, relay: PeerId) -> tuple[str, ...]:
    """Where libp2p has the very relay at the other end, whatever anybody says of it."""
    try:
        async with asyncio.timeout(HOSTS_S):
            return await daemon.hosts_of(relay)
    except (LinkError, TimeoutError):
        return ()


async def _until_closed(stream: Stream) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await stream[0].read(1)
    except (OSError, TimeoutError):
        pass  # it is closed either way


async def _connect(host: str, offer: Offer) -> Stream:
    stream = await asyncio.open_connection(host, offer.port, limit=STREAM_BUFFER_BYTES)
    try:
        stream[1].write(offer.greeting)
        if await stream[0].readexactly(len(LEG_ACK)) != LEG_ACK:
            raise ConnectionRefusedError("it is not the relay that answers")
    except BaseException:
        stream[1].transport.abort()
        raise
    return stream
