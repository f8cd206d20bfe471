"""Performs the gossip machine's effects on real or in-memory streams; what happens comes back as events.

One `_Exchange` a stream: a reader that turns messages into events, a writer that sends in the order of the effects,
and a watchdog that ends a transfer in which no byte moves. The driver decides nothing. Once our last word on a stream
is queued it is over: what the peer still sends is read and dropped, for the inbox may belong to another exchange.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable

from peerloom.node.payload import IncomingPayload, Pace, outgoing
from peerloom.node.seams import Clock, ExchangeStream, Transport, WorkerPort
from peerloom.protocol import effects, events
from peerloom.protocol.errors import (
    BadPayload,
    LimitExceeded,
    LinkError,
    MalformedMessage,
    PeerError,
    PeerloomError,
    ProtocolError,
)
from peerloom.protocol.gossip import GossipMachine
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
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.types import Encoding, PeerId, PeerRecord, Span

log = logging.getLogger(__name__)

FIRST_MESSAGE_S = 10.0  # a peer that opens a stream and says nothing for this long is cut off
EARLY_S = 1e-3  # a loop may fire a timer a little early: sleeping for the rest would spin
LAST_WORD_S = 1.0  # what an acknowledgement or a refusal gets to leave before close() ends its stream


class _Exchange:
    """One stream and what is still to be sent on it."""

    def __init__(self, exchange_id: ExchangeId, peer: PeerId) -> None:
        self.id = exchange_id
        self.peer = peer
        self.to_send: asyncio.Queue[ExchangeMessage | effects.Transfer] = asyncio.Queue()
        self.stream: ExchangeStream | None = None
        self.writer: asyncio.Task[None] | None = None
        self.incoming: IncomingPayload | None = None
        self.stall_s = 0.0
        self.moved_at = 0.0
        self.ends_at = math.inf
        self.sent = False
        self.verified = False
        self.over = False
        self.watched = asyncio.Event()

    def watch(self, stall_s: float, now: float) -> None:
        """From now on the stream ends when no byte moves for `stall_s`."""
        self.stall_s, self.moved_at = stall_s, now
        self.watched.set()


class GossipDriver:
    """Drives one GossipMachine; `records` finds a peer's newest record by id, `count` and `score` take its effects.

    `moved` is called after events, for whoever shows the machine's state.
    """

    def __init__(
        self,
        machine: GossipMachine,
        transport: Transport,
        worker: WorkerPort,
        clock: Clock,
        *,
        layout: str,
        encoding: Encoding,
        records: Callable[[PeerId], PeerRecord | None],
        count: Callable[[str, float], None],
        score: Callable[[PeerId, str], None],
        moved: Callable[[GossipMachine], None] = lambda machine: None,
    ) -> None:
        self._machine = machine
        self._transport = transport
        self._worker = worker
        self._clock = clock
        self._layout = layout
        self._encoding = encoding
        self._records = records
        self._count = count
        self._score = score
        self._moved = moved
        self._exchanges: dict[ExchangeId, _Exchange] = {}
        # dicts, not sets: what close() cancels, it cancels in order
        self._tasks: dict[asyncio.Task[None], None] = {}  # one an exchange that we opened
        self._jobs: dict[asyncio.Task[None], None] = {}  # readers, writers and watchdogs of all exchanges
        self._closed = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._pending: deque[events.Event] = deque()
        self._handling = False
        self._finished: asyncio.Future[effects.FinishRound] | None = None

    @property
    def machine(self) -> GossipMachine:
        """The machine, for its read-only properties."""
        return self._machine

    async def exchange_round(self, round: int, fragment: int = 0, leg: int = 0) -> effects.FinishRound:
        """Stands at an exchange point of `round` until the machine ends the round, or this turn of it."""
        self._finished = asyncio.get_running_loop().create_future()
        self.feed(events.ProposalReady(round, fragment, leg))
        return await self._finished

    def feed(self, event: events.Event) -> None:
        """Gives the machine an event and performs what it asks for, in order; nothing once closed."""
        if self._closed:
            return
        self._pending.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._pending:
                for effect in self._machine.handle(self._pending.popleft(), self._clock.monotonic()):
                    self._perform(effect)
        except Exception as error:  # a bug of ours, in a reader or a timer: the round must not wait for ever
            self._pending.clear()
            if self._finished is not None and not self._finished.done():
                self._finished.set_exception(error)
            raise
        finally:
            self._handling = False
        self._moved(self._machine)

    async def serve(self, stream: ExchangeStream) -> None:
        """Runs one exchange that a peer opened, to its end; raises ProtocolError for a bad opening, which is scored."""
        try:
            offer = await self._opening(stream)
        except ProtocolError:
            self._score(stream.peer, "bad_exchange")
            raise
        if offer is None:
            return
        if self._closed:
            raise LinkError("this node does not train now")
        exchange = _Exchange(offer.exchange_id, stream.peer)
        exchange.stream = stream
        self._exchanges[exchange.id] = exchange
        self.feed(events.OfferReceived(stream.peer, offer))
        await self._run(exchange)

    async def _opening(self, stream: ExchangeStream) -> Offer | None:
        """The offer a stream begins with; None when the peer thought better of it."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                offer = await stream.receive()
        except TimeoutError:
            raise LinkError(f"nothing came for {FIRST_MESSAGE_S:.0f} s") from None
        if offer is not None and not isinstance(offer, Offer):
            raise MalformedMessage("an exchange opens with an offer")
        if offer is not None and offer.exchange_id in self._exchanges:
            raise MalformedMessage("this exchange id is in use")
        return offer

    async def close(self) -> None:
        """Ends every exchange and timer; last words that are queued get LAST_WORD_S to leave. Safe to call twice."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        leaving = [exchange.writer for exchange in self._exchanges.values() if exchange.over and exchange.writer]
        if leaving:
            await asyncio.wait(leaving, timeout=LAST_WORD_S)
        jobs = [*self._tasks, *self._jobs]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        if self._finished is not None and not self._finished.done():
            self._finished.cancel()

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SendOffer():
                self._open(effect)
            case effects.SendHold(exchange_id):
                self._send(exchange_id, Hold())
            case effects.SendAccept(exchange_id, round):
                self._send(exchange_id, Accept(round))
            case effects.SendDecline(exchange_id, reason, detail):
                self._send(exchange_id, Decline(reason, detail))
            case effects.SendCommit(exchange_id):
                self._send(exchange_id, Commit())
            case effects.SendAck(exchange_id):
                self._send(exchange_id, Ack())
            case effects.SendWithdraw(exchange_id, reason):
                self._send(exchange_id, Withdraw(reason))
            case effects.Transfer():
                self._transfer(effect)
            case effects.FinishRound():
                if self._finished is not None and not self._finished.done():
                    self._finished.set_result(effect)
            case effects.CutShort():
                self._cut_short()
            case effects.SetTimer(name, at):
                self._set_timer(name, at)
            case effects.CancelTimer(name):
                if (timer := self._timers.pop(name, None)) is not None:
                    timer.cancel()
            case effects.ScorePeer(peer, fault):
                self._score(peer, fault)
            case effects.Count(metric, amount):
                self._count(metric, amount)

    def _set_timer(self, name: str, at: float) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        delay = max(0.0, at - self._clock.monotonic())
        self._timers[name] = asyncio.get_running_loop().call_later(delay, self._timer_due, name)

    def _timer_due(self, name: str) -> None:
        self._timers.pop(name, None)
        self.feed(events.TimerFired(name))

    def _cut_short(self) -> None:
        task = asyncio.create_task(self._worker.interrupt(), name="cut-short")
        self._tasks[task] = None
        task.add_done_callback(self._dialled)

    def _spawn(self, exchange: _Exchange) -> None:
        task = asyncio.create_task(self._dial(exchange), name=f"exchange-{exchange.id[:8]}")
        self._tasks[task] = None
        task.add_done_callback(self._dialled)

    def _dialled(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an exchange ended in an error of this node's own", exc_info=error)

    def _open(self, effect: effects.SendOffer) -> None:
        exchange = _Exchange(effect.exchange_id, effect.peer)
        self._exchanges[exchange.id] = exchange
        total_bytes = len(self._worker.outbox(effect.send))
        offer = Offer(
            effect.exchange_id,
            effect.round,
            self._layout,
            self._encoding,
            total_bytes,
            fragment=effect.fragment,
            leg=effect.leg,
            weight=effect.weight,
        )
        exchange.to_send.put_nowait(offer)
        self._spawn(exchange)

    def _send(self, exchange_id: ExchangeId, message: ExchangeMessage) -> None:
        if (exchange := self._exchanges.get(exchange_id)) is None:
            return
        exchange.to_send.put_nowait(message)
        if isinstance(message, (Decline, Ack, Withdraw)):
            exchange.over = True
            exchange.watch(exchange.stall_s or FIRST_MESSAGE_S, self._clock.monotonic())

    def _transfer(self, effect: effects.Transfer) -> None:
        if (exchange := self._exchanges.get(effect.exchange_id)) is None:
            return
        exchange.incoming = IncomingPayload(
            self._worker.inbox(effect.receive), self._encoding, self._machine.piece_bytes(effect.receive)
        )
        now = self._clock.monotonic()
        exchange.watch(effect.stall_s, now)
        exchange.ends_at = now + effect.stall_s + len(self._worker.outbox(effect.send)) / LEAST_RATE
        exchange.to_send.put_nowait(effect)

    async def _dial(self, exchange: _Exchange) -> None:
        record = self._records(exchange.peer)
        try:
            if record is None:
                raise LinkError("its record has expired")
            exchange.stream = await self._transport.open(record, EXCHANGE)
        except PeerloomError as error:
            self._exchanges.pop(exchange.id, None)
            self.feed(events.ExchangeBroken(exchange.id, str(error), isinstance(error, ProtocolError)))
            return
        try:
            if exchange.over:  # withdrawn before the peer heard of it
                self._exchanges.pop(exchange.id, None)
            else:
                await self._run(exchange)
        except PeerError as error:
            log.debug("exchange with %s ended: %s", exchange.peer, error)
        finally:
            await exchange.stream.close()

    async def _run(self, exchange: _Exchange) -> None:
        """Reads, writes and watches until one of the three ends; what breaks is fed to the machine, then raised."""
        jobs = [
            asyncio.create_task(job(exchange), name=f"{job.__name__[1:]}-{exchange.id[:8]}")
            for job in (self._write, self._read, self._watch)
        ]
        exchange.writer = jobs[0]
        self._jobs.update(dict.fromkeys(jobs))
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in jobs:  # in this order, whichever ended first
                if job.done() and not job.cancelled():
                    job.result()
        except PeerError as error:
            if isinstance(error, BadPayload):
                self._count("gossip_bad_payloads", 1.0)
            self._break(exchange, str(error), isinstance(error, ProtocolError))
            raise
        finally:
            self._exchanges.pop(exchange.id, None)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            for job in jobs:
                self._jobs.pop(job, None)
            self._break(exchange, "the stream ended")

    def _break(self, exchange: _Exchange, reason: str, at_fault: bool = False) -> None:
        if self._machine.is_open(exchange.id):
            self.feed(events.ExchangeBroken(exchange.id, reason, at_fault))

    async def _read(self, exchange: _Exchange) -> None:
        assert exchange.stream is not None  # ours: set before _run
        while (message := await exchange.stream.receive()) is not None:
            if exchange.over:
                continue
            exchange.moved_at = self._clock.monotonic()
            if self._take(exchange, message):
                return
        if exchange.over:  # the peer has ended its half: ours still has a last word
            await asyncio.get_running_loop().create_future()

    def _take(self, exchange: _Exchange, message: ExchangeMessage) -> bool:
        """Turns one message into an event; True when nothing may follow it."""
        match message:
            case Hold():
                self.feed(events.OfferHeld(exchange.id))
            case Accept(round):
                self.feed(events.OfferAccepted(exchange.id, round))
            case Decline(reason):
                self.feed(events.OfferDeclined(exchange.id, reason))
                return True
            case Chunk():
                self._incoming(exchange).add(message)
            case PayloadEnd():
                self._incoming(exchange).end(message)
                exchange.verified = True
                self._payloads_done(exchange)
            case Commit():
                if not exchange.verified:
                    raise MalformedMessage("a commit came before the parameters had")
                self.feed(events.CommitReceived(exchange.id))
            case Ack():
                self.feed(events.AckReceived(exchange.id))
                return True
            case Withdraw(reason):
                self.feed(events.ExchangeBroken(exchange.id, reason))
                return True
            case Offer():
                raise MalformedMessage("a second offer in one exchange")
        return False

    def _incoming(self, exchange: _Exchange) -> IncomingPayload:
        if exchange.incoming is None:
            raise MalformedMessage("parameters came before the offer was taken")
        return exchange.incoming

    def _payloads_done(self, exchange: _Exchange) -> None:
        if exchange.sent and exchange.verified:
            self.feed(events.PayloadsVerified(exchange.id))

    async def _write(self, exchange: _Exchange) -> None:
        assert exchange.stream is not None  # ours: set before _run
        while True:
            item = await exchange.to_send.get()
            if isinstance(item, effects.Transfer):
                await self._write_payload(exchange, exchange.stream, item.send)
                continue
            await exchange.stream.send(item)
            if isinstance(item, (Decline, Ack, Withdraw)):
                return

    async def _write_payload(self, exchange: _Exchange, stream: ExchangeStream, pieces: Span) -> None:
        pace = Pace(stream.chunk_bytes)
        for message in outgoing(self._worker.outbox(pieces), pace):
            if exchange.over:
                return
            began = self._clock.monotonic()
            await stream.send(message)
            exchange.moved_at = self._clock.monotonic()
            pace.sent(exchange.moved_at - began)
        exchange.sent = True
        self._payloads_done(exchange)

    async def _watch(self, exchange: _Exchange) -> None:
        """Ends a transfer, or a stream that is over, in which no byte has moved for stall_s."""
        await exchange.watched.wait()
        left = exchange.stall_s
        while left > EARLY_S:
            await asyncio.sleep(left)
            now = self._clock.monotonic()
            if now >= exchange.ends_at - EARLY_S:
                raise LimitExceeded(f"slower than {LEAST_RATE // 1024} KiB/s over the whole transfer")
            left = min(exchange.moved_at + exchange.stall_s, exchange.ends_at) - now
        raise LinkError(f"no byte moved for {exchange.stall_s:.1f} s")
