"""An end's way to the TCP port that a relay offers for a leg of a tunnel."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from peerloom.node.p2pd import STREAM_BUFFER_BYTES, Stream
from peerloom.node.seams import Clock
from peerloom.protocol.tunnel import LEG_ACK, Offer
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

DIRECT_S = 1.0  # to connect, show the token and be let in, over all hosts
AGAIN_S = 600.0  # a relay whose port was not reached is not tried before, so that it costs no tunnel's setup time
MAX_REMEMBERED = 1024
MAX_HOSTS = 3


class LegDialer:
    """Dials relays' ports, and leaves alone those that it did not reach."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: OrderedDict[PeerId, float] = OrderedDict()

    def left_alone(self, relay: PeerId) -> bool:
        """Whether an offer of its is not worth an attempt now."""
        at = self._failed.get(relay)
        return at is not None and self._clock.monotonic() - at < AGAIN_S

    async def dial(self, relay: PeerId, hosts: Sequence[str], offer: Offer) -> Stream | None:
        """A connection that the relay has let in, at the first of `hosts` (IP addresses) that has one; or None."""
        if not hosts:
            return None
        hosts = hosts[:MAX_HOSTS]
        for host in hosts:
            try:
                async with asyncio.timeout(DIRECT_S / len(hosts)):
                    return await _connect(host, offer)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                log.debug("port %d of relay %s is not reached at %s: %s", offer.port, relay, host, error)
        self._failed[relay] = self._clock.monotonic()
        self._failed.move_to_end(relay)
        if len(self._failed) > MAX_REMEMBERED:
            self._failed.popitem(last=False)
        return None


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
