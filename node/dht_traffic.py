"""Takes from the caps what the libp2p daemon moves for the DHT, and counts it.

Its connections carry tunnels too, whose bytes are counted as calls or as relayed: those are left out
(`Traffic.crossed`), but for libp2p's own framing of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from peerloom.node.seams import Clock
from peerloom.node.tcp_bytes import Moved, TcpBytes
from peerloom.node.throttle import NO_CAPS, Traffic
from peerloom.node.tunnel_legs import Count
from peerloom.protocol.beside import Beside, Rest

log = logging.getLogger(__name__)

LOOK_S = 0.2  # under a cap; Beside's lag is made of it
SELDOM_S = 2.0  # where there is none, and it is only counted
LEAST_IDLE = 100  # times what a look took, 2 ms where the kernel keeps a table for 100,000 connections


class DhtTraffic:
    """A node's background job; `pid` tells the daemon's, which changes with its lives, and is None while it is down."""

    def __init__(
        self,
        traffic: Traffic,
        pid: Callable[[], int | None],
        clock: Clock,
        count: Count,
        meter: Callable[[int], TcpBytes] = TcpBytes,
    ) -> None:
        self._traffic = traffic
        self._pid = pid
        self._clock = clock
        self._count = count
        self._meter = meter
        self._meters: dict[int, TcpBytes] = {}  # of the life under way
        self._before = self._last = Moved(0, 0)  # of lives that are over, and of this one
        self._rests = Rest(), Rest()
        self._told: set[str] = set()
        self._works = False

    async def run(self) -> None:
        """Looks until it is cancelled, or learns that this machine does not tell."""
        every_s = SELDOM_S if self._traffic.caps == NO_CAPS else LOOK_S
        while True:
            began = self._clock.monotonic()
            try:
                self.look()
            except OSError as error:
                if self._traffic.caps != NO_CAPS:
                    log.warning("what the DHT moves is not held against the caps: %s", error.strerror or error)
                return
            await asyncio.sleep(max(every_s, LEAST_IDLE * (self._clock.monotonic() - began)))

    def look(self) -> None:
        """Counts what has moved since the last look; raises OSError where this machine does not tell at all."""
        moved, now = self._moved(), self._clock.monotonic()
        traffic, (sending, receiving) = self._traffic, self._rests
        sent = sending.more(moved.sent, traffic.crossed.sent, now)
        received = receiving.more(moved.received, traffic.crossed.received, now)
        traffic.beside_up.seen(sent, now)
        traffic.beside_down.seen(received, now)
        self._count("dht_sent_bytes", float(sent))
        self._count("dht_received_bytes", float(received))
        self._tell(traffic.beside_up, "sends", "--max-upload")
        self._tell(traffic.beside_down, "receives", "--max-download")

    def _tell(self, beside: Beside, does: str, cap: str) -> None:
        if beside.is_too_much and cap not in self._told:
            self._told.add(cap)
            log.warning("the DHT alone %s more than %s allows, and nothing can hold it back: raise the cap", does, cap)

    def _moved(self) -> Moved:
        pid = self._pid()
        if pid is not None:
            if pid not in self._meters:
                self._before, self._last = self._so_far(), Moved(0, 0)
                self._meters.clear()
            self._last = self._read(pid)
        return self._so_far()

    def _so_far(self) -> Moved:
        return Moved(self._before.sent + self._last.sent, self._before.received + self._last.received)

    def _read(self, pid: int) -> Moved:
        try:
            if pid not in self._meters:
                self._meters[pid] = self._meter(pid)
            self._last = self._meters[pid].read()
        except OSError as error:
            if not self._works:
                raise
            log.debug("the libp2p daemon's connections are not to be seen: %s", error)  # as of one that just ends
        self._works = True
        return self._last
