"""The node's caps on what it sends and receives, over all calls and all that it relays, and the count of it.

What the libp2p daemon moves beside them, the DHT's traffic, is taken from the caps as `dht_traffic` sees it. Not in it:
the framing of TLS and HTTP/2. deploy/README.md tells how much that is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from peerloom.node.seams import Clock
from peerloom.protocol.beside import Beside
from peerloom.protocol.bucket import Bucket, agreed_bytes, slice_bytes
from peerloom.protocol.limits import LEAST_CHUNK_BYTES
from peerloom.protocol.messages import Accept, FetchRequest, Offer

M = TypeVar("M")

WINDOW_BYTES = 65_535  # that a sender may be ahead of a reader under a download cap; HTTP/2's own default


@dataclass(frozen=True, slots=True)
class Caps:
    """Bytes a second, 0 for none."""

    upload: int = 0
    download: int = 0

    @property
    def send_bytes(self) -> int:
        """The largest chunk or piece that this node sends."""
        return slice_bytes(self.upload)

    @property
    def carried_bytes(self) -> int:
        """The largest piece that this node passes on for others at once: one of its own calls may wait behind it."""
        return min(self.send_bytes, self.receive_bytes)

    @property
    def receive_bytes(self) -> int:
        """The largest one that it asks others to send."""
        return slice_bytes(self.download)

    @property
    def ahead_bytes(self) -> int:
        """What has come of a payload before its first message is read: a window, and the message after the first."""
        return WINDOW_BYTES + self.receive_bytes if self.download else 0

    def asking(self, request: FetchRequest) -> FetchRequest:
        """A request of ours, with the wish for small pieces where there is a download cap."""
        return replace(request, max_piece_bytes=self.receive_bytes) if self.download else request

    def asked(self, request: FetchRequest) -> FetchRequest:
        """A peer's request, held to pieces that this node sends."""
        return replace(request, max_piece_bytes=agreed_bytes(self.send_bytes, request.max_piece_bytes))


NO_CAPS = Caps()


class ChunkSize:
    """What the two ends of an exchange agree on: each says in its Offer or Accept what it would rather get."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self.bytes = caps.send_bytes

    def sending(self, message: M) -> M:
        """The message, with our wish."""
        if self._caps.download and isinstance(message, (Offer, Accept)):
            return cast(M, replace(message, max_chunk_bytes=self._caps.receive_bytes))
        return message

    def received(self, message: object) -> None:
        """Takes note of the peer's wish."""
        if isinstance(message, (Offer, Accept)):
            self.bytes = agreed_bytes(self._caps.send_bytes, message.max_chunk_bytes)


@dataclass(slots=True)
class Crossed:
    """Bytes of tunnels that have gone through the libp2p daemon, and are counted as calls or as relayed."""

    sent: int = 0
    received: int = 0


class Traffic:
    """Bytes of all messages and of what is relayed so far, and the waits that hold them to the caps.

    `beside_up` and `beside_down` take from the caps what moves beside those.
    """

    def __init__(self, clock: Clock, caps: Caps = NO_CAPS) -> None:
        self.sent = 0
        self.received = 0
        self.caps = caps
        self._clock = clock
        self._up = Bucket(caps.upload) if caps.upload else None
        self._down = Bucket(caps.download) if caps.download else None
        self.beside_up, self.beside_down = Beside(self._up), Beside(self._down)
        self.crossed = Crossed()

    async def save(self, size: int) -> None:
        """Waits until the download cap has room for `size` bytes that this node will have others send beside calls."""
        if (seconds := self.beside_down.saved(size, self._clock.monotonic())) > 0:
            await asyncio.sleep(seconds)

    async def may_send(self, size: int) -> None:
        """Waits until `size` bytes may leave; count them in `sent` when they have."""
        await self._wait(self._up, size)

    async def took(self, size: int, ahead: int = 0) -> None:
        """Counts `size` bytes that came, and waits for as long as they should have taken: nobody reads on meanwhile.

        The sender is held by HTTP/2's flow control, whose window is soon full; `ahead` bytes more of the cap are taken
        for what it has let through unread.
        """
        await self._wait(self._down, size + ahead)
        self.received += size

    def note(self, *, sent: int = 0, received: int = 0) -> None:
        """Counts a message that does not wait, a handshake's, whose time is taken; others wait for it all the same."""
        now = self._clock.monotonic()
        for bucket, size in ((self._up, sent), (self._down, received)):
            if bucket is not None and size:
                bucket.wait_s(size, now)
        self.sent += sent
        self.received += received

    def carry_s(self, size: int) -> float:
        """Counts `size` bytes that came for somebody else and leave again; in how many seconds both caps let them."""
        self.received += size
        self.sent += size
        if self._up is None and self._down is None:
            return 0.0
        now = self._clock.monotonic()
        caps = [bucket for bucket in (self._up, self._down) if bucket is not None]
        return max((cap.wait_s(size, now) for cap in caps), default=0.0)

    async def _wait(self, bucket: Bucket | None, size: int) -> None:
        if bucket is not None and (seconds := bucket.wait_s(size, self._clock.monotonic())) > 0:
            await asyncio.sleep(seconds)


class Incoming:
    """One stream's messages as they are read: the first of a payload pays for what came ahead of the reader."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._ahead = traffic.caps.ahead_bytes

    async def took(self, size: int) -> None:
        """As Traffic.took; small messages come alone, nothing behind them."""
        ahead, self._ahead = (self._ahead, 0) if size >= LEAST_CHUNK_BYTES else (0, self._ahead)
        await self._traffic.took(size, ahead)
