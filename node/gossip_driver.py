"""Performs the gossip machine's effects on real or in-memory streams; what happens comes back as events.

One `Exchange` a stream. The driver decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from peerloom.node.exchange import FIRST_MESSAGE_S, FROM_PEER, Exchange
from peerloom.node.repeats import Repeats
from peerloom.node.seams import Clock, ExchangeStream, Transport
from peerloom.node.worker_seams import ExchangePort, RoundTrained
from peerloom.protocol import effects, events
from peerloom.protocol.errors import (
    BadPayload,
    LinkError,
    MalformedMessage,
    PeerloomError,
    ProtocolError,
)
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import (
    Accept,
    Ack,
    Commit,
    Decline,
    ExchangeId,
    ExchangeMessage,
    Hold,
    Offer,
    Withdraw,
)
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.types import Encoding, PeerId, PeerRecord

log = logging.getLogger(__name__)

LAST_WORD_S = 1.0  # what an acknowledgement or a refusal gets to leave before close() ends its stream


class GossipDriver:
    """Drives one GossipMachine; `records` finds a peer's newest record by id, `count` and `score` take its effects.

    `moved` is called after events, for whoever shows the machine's state; `repeats` judges what peers send.
    """

    def __init__(
        self,
        machine: GossipMachine,
        transport: Transport,
        worker: ExchangePort,
        clock: Clock,
        *,
        layout: str,
        encoding: Encoding,
        records: Callable[[PeerId], PeerRecord | None],
        count: Callable[[str, float], None],
        score: Callable[[PeerId, str], None],
        moved: Callable[[GossipMachine], None] = lambda machine: None,
        repeats: Repeats | None = None,
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
        self._repeats = repeats
        self._exchanges: dict[ExchangeId, Exchange] = {}
        # dicts, not sets: what close() cancels, it cancels in order
        self._tasks: dict[asyncio.Task[None], None] = {}  # one an exchange that we opened
        self._jobs: dict[asyncio.Task[None], None] = {}  # readers, writers and watchdogs of all exchanges
        self._closed = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._pending: deque[events.Event] = deque()
        self._handling = False
        self._finished: asyncio.Future[effects.FinishRound] | None = None
        self._proposal: asyncio.Future[RoundTrained] | None = None

    @property
    def machine(self) -> GossipMachine:
        """The machine, for its read-only properties."""
        return self._machine

    async def exchange_round(
        self, round: int, fragment: int = 0, leg: int = 0, proposal: asyncio.Future[RoundTrained] | None = None
    ) -> effects.FinishRound:
        """Stands at an exchange point of `round` until the machine ends the round, or this turn of it.

        While there is a `proposal` to come, the worker trains on: it is interrupted once a partner is found, and
        nothing leaves the outbox before it has proposed.
        """
        self._finished = asyncio.get_running_loop().create_future()
        self._proposal = proposal
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
        exchange = self._exchange(offer.exchange_id, stream.peer, stream, offer.round)
        self.feed(events.OfferReceived(stream.peer, offer))
        await self._run(exchange)

    def _exchange(
        self, exchange_id: ExchangeId, peer: PeerId, stream: ExchangeStream | None = None, round: int = 0
    ) -> Exchange:
        exchange = self._exchanges[exchange_id] = Exchange(
            exchange_id,
            peer,
            feed=self.feed,
            worker=self._worker,
            clock=self._clock,
            stream=stream,
            round=round,
            repeats=self._repeats,
        )
        return exchange

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

    def _spawn(self, exchange: Exchange) -> None:
        task = asyncio.create_task(self._dial(exchange), name=f"exchange-{exchange.id[:8]}")
        self._tasks[task] = None
        task.add_done_callback(self._dialled)

    def _dialled(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an exchange ended in an error of this node's own", exc_info=error)

    def _open(self, effect: effects.SendOffer) -> None:
        exchange = self._exchange(effect.exchange_id, effect.peer)
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
        exchange.send(offer)
        self._spawn(exchange)

    def _send(self, exchange_id: ExchangeId, message: ExchangeMessage) -> None:
        if (exchange := self._exchanges.get(exchange_id)) is not None:
            exchange.send(message)

    def _transfer(self, effect: effects.Transfer) -> None:
        if (exchange := self._exchanges.get(effect.exchange_id)) is not None:
            if self._proposal is not None and not self._proposal.done():
                self._cut_short()
            piece_bytes = self._machine.piece_bytes(effect.receive)
            exchange.transfer(effect, self._encoding, piece_bytes, self._proposal, self._machine.round)

    async def _dial(self, exchange: Exchange) -> None:
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
        except FROM_PEER as error:
            log.debug("exchange with %s ended: %s", exchange.peer, error)
        finally:
            await exchange.stream.close()

    async def _run(self, exchange: Exchange) -> None:
        """Runs it to its end; what breaks is fed to the machine, then raised."""
        try:
            await exchange.run(self._jobs, lambda error: self._broken(exchange, error))
        finally:
            self._exchanges.pop(exchange.id, None)
            self._break(exchange, "the stream ended")

    def _broken(self, exchange: Exchange, error: PeerloomError) -> None:
        if isinstance(error, BadPayload):
            self._count("gossip_bad_payloads", 1.0)
        self._break(exchange, str(error), isinstance(error, ProtocolError))

    def _break(self, exchange: Exchange, reason: str, at_fault: bool = False) -> None:
        if self._machine.is_open(exchange.id):
            self.feed(events.ExchangeBroken(exchange.id, reason, at_fault))
