"""One exchange's stream: what is sent in order, what comes as events, an end to one in which nothing moves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from peerloom.node.digest import link_digest
from peerloom.node.payload import IncomingPayload, Pace, outgoing
from peerloom.node.repeats import Repeats
from peerloom.node.seams import Clock, ExchangeStream
from peerloom.node.worker_seams import ExchangePort, RoundTrained
from peerloom.protocol import effects, events
from peerloom.protocol.errors import (
    LimitExceeded,
    LinkError,
    MalformedMessage,
    NoDonor,
    PeerError,
    PeerloomError,
    RunMismatch,
    VersionMismatch,
)
from peerloom.protocol.limits import LEAST_RATE
from peerloom.protocol.messages import (
    Accept,
    Ack,
    Chunk,
    Commit,
    Decline,
    ExchangeId,
    ExchangeMessage,
    Hold,
    Offer,
    PayloadEnd,
    Withdraw,
)
from peerloom.protocol.types import Encoding, PeerId, Span

FIRST_MESSAGE_S = 10.0  # a peer that opens a stream and says nothing for this long is cut off
FROM_PEER = (PeerError, NoDonor, RunMismatch, VersionMismatch)  # a peer's faults, and the errors that it may name
EARLY_S = 1e-3  # a loop may fire a timer a little early: sleeping for the rest would spin


class Exchange:
    """A reader that turns messages into events, a writer that sends in the order of the effects, and a watchdog.

    Once our last word is queued it is `over`: what the peer still sends is read and dropped, for the inbox may belong
    to another exchange.
    """

    def __init__(
        self,
        exchange_id: ExchangeId,
        peer: PeerId,
        *,
        feed: Callable[[events.Event], None],
        worker: ExchangePort,
        clock: Clock,
        stream: ExchangeStream | None = None,
        round: int = 0,
        repeats: Repeats | None = None,
    ) -> None:
        self.id = exchange_id
        self.peer = peer
        self.stream = stream
        self.writer: asyncio.Task[None] | None = None
        self.over = False
        self._feed, self._worker, self._clock = feed, worker, clock
        self._round, self._repeats = round, repeats  # the peer's
        self._to_send: asyncio.Queue[ExchangeMessage | effects.Transfer] = asyncio.Queue()
        self._incoming: IncomingPayload | None = None
        self._stall_s = 0.0
        self._moved_at = 0.0
        self._ends_at = math.inf
        self._sent = False
        self._verified = False
        self._digest = b""  # of what came
        self._own_round = 0
        self._receive: Span = (0, 1)
        self._watched = asyncio.Event()
        self._proposal: asyncio.Future[RoundTrained] | None = None

    def send(self, message: ExchangeMessage) -> None:
        """Queues a message; after a last word the stream is over, and ends when nothing moves."""
        self._to_send.put_nowait(message)
        if isinstance(message, (Decline, Ack, Withdraw)):
            self.over = True
            self._watch_for(self._stall_s or FIRST_MESSAGE_S)

    def transfer(
        self,
        effect: effects.Transfer,
        encoding: Encoding,
        piece_bytes: tuple[int, ...],
        proposal: asyncio.Future[RoundTrained] | None = None,
        own_round: int = 0,
    ) -> None:
        """Sends the outbox after what is queued and after `proposal`, and takes the peer's payload into the inbox."""
        self._proposal, self._own_round, self._receive = proposal, own_round, effect.receive
        self._incoming = IncomingPayload(self._worker.inbox(effect.receive), encoding, piece_bytes)
        self._watch_for(effect.stall_s)
        self._ends_at = self._moved_at + effect.stall_s + len(self._worker.outbox(effect.send)) / LEAST_RATE
        self._to_send.put_nowait(effect)

    async def run(self, jobs: dict[asyncio.Task[None], None], broken: Callable[[PeerloomError], None]) -> None:
        """Reads, writes and watches until one of the three ends, which stand in `jobs` meanwhile.

        What breaks is told to `broken`, then raised.
        """
        own = [
            asyncio.create_task(job(), name=f"{job.__name__[1:]}-{self.id[:8]}")
            for job in (self._write, self._read, self._watch)
        ]
        self.writer = own[0]
        jobs.update(dict.fromkeys(own))
        try:
            await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
            for job in own:  # in this order, whichever ended first
                if job.done() and not job.cancelled():
                    job.result()
        except FROM_PEER as error:
            broken(error)
            raise
        finally:
            for job in own:
                job.cancel()
            await asyncio.gather(*own, return_exceptions=True)
            for job in own:
                jobs.pop(job, None)

    def _watch_for(self, stall_s: float) -> None:
        """From now on the stream ends when no byte moves for `stall_s`."""
        self._stall_s, self._moved_at = stall_s, self._clock.monotonic()
        self._watched.set()

    async def _read(self) -> None:
        assert self.stream is not None  # ours: set before run()
        while (message := await self.stream.receive()) is not None:
            if self.over:
                continue
            self._moved_at = self._clock.monotonic()
            if self._take(message):
                return
        if self.over:  # the peer has ended its half: ours still has a last word
            await asyncio.get_running_loop().create_future()

    def _take(self, message: ExchangeMessage) -> bool:
        """Turns one message into an event; True when nothing may follow it."""
        match message:
            case Hold():
                self._feed(events.OfferHeld(self.id))
            case Accept(round):
                self._round = round
                self._feed(events.OfferAccepted(self.id, round))
            case Decline(reason):
                self._feed(events.OfferDeclined(self.id, reason))
                return True
            case Chunk():
                self._payload().add(message)
            case PayloadEnd():
                self._payload().end(message)
                self._verified, self._digest = True, message.digest
                self._payloads_done()
            case Commit():
                if not self._verified:
                    raise MalformedMessage("a commit came before the parameters had")
                self._feed(events.CommitReceived(self.id))
            case Ack():
                self._feed(events.AckReceived(self.id))
                return True
            case Withdraw(reason):
                self._feed(events.ExchangeBroken(self.id, reason))
                return True
            case Offer():
                raise MalformedMessage("a second offer in one exchange")
        return False

    def _payload(self) -> IncomingPayload:
        if self._incoming is None:
            raise MalformedMessage("parameters came before the offer was taken")
        return self._incoming

    def _payloads_done(self) -> None:
        if self._sent and self._verified:
            self._check_repeat()
            self._feed(events.PayloadsVerified(self.id))

    def _check_repeat(self) -> None:
        """Raises BadPayload; only once this node has proposed, for its own bytes say whether these move at all."""
        if self._repeats is None:
            return
        own = link_digest()
        own.update(self._worker.outbox(self._receive))
        self._repeats.check(
            self.peer,
            self._round,
            self._digest,
            pieces=self._receive,
            own_round=self._own_round,
            own=own.digest(),
        )

    async def _write(self) -> None:
        assert self.stream is not None  # ours: set before run()
        while True:
            item = await self._to_send.get()
            if isinstance(item, effects.Transfer):
                await self._write_payload(self.stream, item.send)
                continue
            await self.stream.send(item)
            if isinstance(item, (Decline, Ack, Withdraw)):
                return

    async def _write_payload(self, stream: ExchangeStream, pieces: Span) -> None:
        if self._proposal is not None:
            await asyncio.wait((self._proposal,))
            if self._proposal.cancelled() or self._proposal.exception() is not None:
                raise LinkError("the local steps ended without a proposal")
        pace = Pace(stream.chunk_bytes)
        for message in outgoing(self._worker.outbox(pieces), pace):
            if self.over:
                return
            began = self._clock.monotonic()
            await stream.send(message)
            self._moved_at = self._clock.monotonic()
            pace.sent(self._moved_at - began)
        self._sent = True
        self._payloads_done()

    async def _watch(self) -> None:
        """Ends a transfer, or a stream that is over, in which no byte has moved for stall_s."""
        await self._watched.wait()
        left = self._stall_s
        while left > EARLY_S:
            await asyncio.sleep(left)
            now = self._clock.monotonic()
            if now >= self._ends_at - EARLY_S:
                raise LimitExceeded(f"slower than {LEAST_RATE // 1024} KiB/s over the whole transfer")
            left = min(self._moved_at + self._stall_s, self._ends_at) - now
        raise LinkError(f"no byte moved for {self._stall_s:.1f} s")
