"""Performs the flood machine's effects: links, log and timers; what is the worker's share waits for the trainer."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peerloom.node.flood_asking import Asking
from peerloom.node.flood_log import FloodLog
from peerloom.node.logs import short
from peerloom.node.seams import Clock, MessageStream, Transport
from peerloom.protocol.codec_flood import FloodFrame, FloodReader, FloodWriter
from peerloom.protocol.effects import Count, ScorePeer, SetTimer
from peerloom.protocol.errors import LinkError, MalformedMessage, PeerloomError, ProtocolError, StorageError
from peerloom.protocol.events import TimerFired
from peerloom.protocol.flood import FRAME_SEGMENTS, FloodMachine
from peerloom.protocol.flood_events import (
    Apply,
    Drop,
    Exiled,
    FloodEffect,
    FloodEvent,
    Keep,
    LinkDown,
    Links,
    LinkUp,
    Question,
    Received,
    Resync,
    Retract,
    Send,
    StepsDone,
)
from peerloom.protocol.flood_links import Outgoing
from peerloom.protocol.flood_messages import (
    FrameBody,
    HashQuery,
    HashReply,
    Head,
    Proof,
    Segment,
    Segments,
    Versions,
)
from peerloom.protocol.limits import MAX_PAGE
from peerloom.protocol.services import FLOOD
from peerloom.protocol.types import PeerId, PeerRecord

log = logging.getLogger(__name__)

RETRY_S = 5.0  # before a link that did not come about, or broke, is tried again
MAX_LINKS = 64  # links at once, those that others opened among them
SHUT_S = 60.0  # a peer whose link was closed for what it sent gets no other one for so long
MAX_SHUT = 4096  # such peers remembered; the longest closed goes first
GATHER_S = 0.01  # batches that come over a link within so long are judged together: under load a signature covers many
MAX_BODIES = 1024  # messages other than batches that wait for one link; past it, it is too slow to be of use

Change = Apply | Retract | Resync


@dataclass(eq=False, slots=True)
class _Link:
    """One stream with a neighbour, its two codecs, and what waits for it."""

    peer: PeerId
    stream: MessageStream[FloodFrame]
    opened_here: bool
    writer: FloodWriter = field(default_factory=FloodWriter)
    reader: FloodReader = field(default_factory=FloodReader)
    bodies: deque[FrameBody] = field(default_factory=deque)
    segments: Outgoing = field(default_factory=Outgoing)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    gathered: list[Segment] = field(default_factory=list)  # came in, not yet judged
    waiting: int = 0  # messages in them
    gathering: asyncio.TimerHandle | None = None
    tasks: tuple[asyncio.Task[None], ...] = ()
    error: ProtocolError | None = None

    def next(self) -> FrameBody | None:
        """What goes next."""
        if self.bodies:
            return self.bodies.popleft()
        segments = self.segments.take(FRAME_SEGMENTS, MAX_PAGE)
        return Segments(segments) if segments else None


class FloodDriver:
    """One node's links. `changes` and `questions` are for the trainer, which `changed` wakes; `exiled` is final.

    `failed` is what a bug of ours raised in a link's task or a timer: the trainer raises it.
    """

    def __init__(
        self,
        machine: FloodMachine,
        own: PeerId,
        transport: Transport,
        clock: Clock,
        flood_log: FloodLog,
        *,
        records: Callable[[PeerId], PeerRecord | None],
        count: Callable[[str, float], None],
        score: Callable[[PeerId, str], None],
    ) -> None:
        self.machine = machine
        self.changes: deque[Change] = deque()
        self.questions: dict[PeerId, HashQuery] = {}  # one a peer: the newest
        self.changed = asyncio.Event()
        self.exiled = False
        self.mute = False  # no hash can be told now: its state is being replaced
        self.failed: Exception | None = None
        self._own, self._transport, self._clock, self._log = own, transport, clock, flood_log
        self._records, self._count, self._score = records, count, score
        self._links: dict[PeerId, _Link] = {}
        self._keepers: dict[PeerId, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._asking = Asking()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._shut: dict[PeerId, float] = {}  # until when
        self._closed = False
        self._held: deque[FloodEvent] | None = None  # what came while another's effects were performed

    # the trainer's side

    def feed(self, event: FloodEvent) -> None:
        """Lets the machine handle an event, and performs what it asks for."""
        if self._closed:
            return
        if self._held is not None:
            return self._held.append(event)
        self._held = deque([event])
        try:
            while self._held:
                for effect in self.machine.handle(self._held.popleft(), self._clock.monotonic()):
                    self._perform(effect)
        except Exception as error:  # links come anew: without this the same would happen for ever, unseen
            self.failed = self.failed or error
            self.changed.set()
            raise
        finally:
            self._held = None

    async def own_steps(self, step: int, sequence: int, scalars: tuple[int, ...]) -> None:
        """Floods this node's own steps once they are durable; raises StorageError when they cannot be made so."""
        effects = self.machine.handle(StepsDone(step, sequence, scalars), self._clock.monotonic())
        self._held = deque()  # or a neighbour that asks meanwhile would be given what a power cut may still take back
        try:
            for effect in effects:
                if isinstance(effect, Keep):
                    self._log.append(effect.item)
            await asyncio.to_thread(self._log.sync)
            for effect in effects:
                if not isinstance(effect, Keep):
                    self._perform(effect)
        finally:
            held, self._held = self._held, None
            for event in held:
                self.feed(event)

    def answer(self, peer: PeerId, number: int, digest: bytes) -> None:
        """Answers a question, if the peer is still there."""
        self._put(peer, HashReply(number, digest))

    def linked(self, peer: PeerId) -> bool:
        """Whether a link with the peer stands."""
        return peer in self._links

    async def ask(self, peer: PeerId, heads: Sequence[Head]) -> bytes:
        """A neighbour's word for the hash of the state that counts exactly these messages, as `ask_hash`."""
        if peer not in self._links:
            raise LinkError("there is no link with it")
        return await self._asking.ask(peer, heads, lambda query: self._put(peer, query))

    async def flush(self, timeout_s: float) -> None:
        """Waits until all that is queued has been handed to the streams."""
        try:
            async with asyncio.timeout(timeout_s):
                for link in list(self._links.values()):
                    await link.idle.wait()
        except TimeoutError:
            log.info("not all messages could be sent in time; neighbours ask others for them")

    async def close(self) -> None:
        """Ends all links."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        jobs = [*self._keepers.values(), *(task for link in self._links.values() for task in link.tasks)]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, *self._closing, return_exceptions=True)
        for link in list(self._links.values()):
            self._forget(link)
        await asyncio.gather(*self._closing, return_exceptions=True)

    # effects

    def _perform(self, effect: FloodEffect) -> None:
        match effect:
            case Send(peer, body):
                self._put(peer, body)
            case Count(metric, amount):
                self._count(metric, amount)
            case Keep(item):
                self._keep_item(item)
            case Apply() | Retract() | Resync():
                self.changes.append(effect)
                self.changed.set()
            case Links(peers):
                self._relink(peers)
            case SetTimer(name, at):
                self._set_timer(name, at)
            case ScorePeer(peer, fault):
                self._score(peer, fault)
            case Question(peer, query) if self.mute:
                self.answer(peer, query.number, b"")
            case Question(peer, query):
                self.questions[peer] = query
                self.changed.set()
            case Drop(peer, reason):
                self._drop(peer, reason)
            case Exiled():
                self.exiled = True
                self.changed.set()

    def _keep_item(self, item: Segment | Proof) -> None:
        """What others sent can be asked for again: a full disk does not stop the flood."""
        try:
            self._log.append(item)
        except StorageError as error:
            self._count("flood_log_failed", 1.0)
            log.error("%s; after a restart these messages are asked for again", error)

    def _put(self, peer: PeerId, body: FrameBody) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        if isinstance(body, Segments):
            if left_out := link.segments.put(body.segments):
                self._count("flood_left_out", left_out)
        else:
            if isinstance(body, Versions):
                link.bodies = deque(each for each in link.bodies if not isinstance(each, Versions))
            link.bodies.append(body)
            if len(link.bodies) > MAX_BODIES:
                return self._forget(link)
        link.idle.clear()
        link.ready.set()

    def _set_timer(self, name: str, at: float) -> None:
        if (old := self._timers.pop(name, None)) is not None:
            old.cancel()
        loop = asyncio.get_running_loop()
        delay = max(0.0, at - self._clock.monotonic())
        self._timers[name] = loop.call_later(delay, lambda: self.feed(TimerFired(name)))

    def _drop(self, peer: PeerId, reason: str) -> None:
        if (link := self._links.get(peer)) is not None:
            log.warning("the link with %s is closed: %s", short(peer), reason)
            link.error = MalformedMessage(f"refused: {reason}")
            self._shut_out(peer)
            self._forget(link)

    def _shut_out(self, peer: PeerId) -> None:
        """Without it a peer could begin anew at once, and cost a link each time."""
        self._shut.pop(peer, None)
        while len(self._shut) >= MAX_SHUT:
            del self._shut[next(iter(self._shut))]
        self._shut[peer] = self._clock.monotonic() + SHUT_S

    def _is_shut(self, peer: PeerId) -> bool:
        return self._clock.monotonic() < self._shut.get(peer, float("-inf"))

    # links

    def _relink(self, peers: tuple[PeerId, ...]) -> None:
        for peer in [peer for peer in self._keepers if peer not in peers]:
            self._keepers.pop(peer).cancel()
        for peer in peers:
            if peer not in self._keepers:
                name = f"flood-{peer[-6:]}"
                self._keepers[peer] = asyncio.create_task(self._keep(peer), name=name)

    async def _keep(self, peer: PeerId) -> None:
        """Keeps a link with a peer, whoever opens it, until cancelled."""
        while True:
            if peer not in self._links and not self._is_shut(peer) and (record := self._records(peer)) is not None:
                try:
                    stream = await self._transport.open(record, FLOOD)
                    await self._meet(stream, opened_here=True)
                except PeerloomError as error:
                    log.debug("no link with %s: %s", short(peer), error)
                    self._count("flood_links_failed", 1.0)
            await asyncio.sleep(RETRY_S)

    async def serve(self, stream: MessageStream[FloodFrame]) -> None:
        """Runs a link that a peer opened, to its end; raises LinkError when it is not wanted."""
        if self._closed:
            raise LinkError("this node is stopping")
        await self._meet(stream, opened_here=False)

    async def _meet(self, stream: MessageStream[FloodFrame], *, opened_here: bool) -> None:
        """Both sides may open one at once: the one that the smaller peer id opened stays."""
        peer = stream.peer
        if self._is_shut(peer):
            await stream.close()
            raise LinkError("refused: its last link was closed for what it sent")
        old = self._links.get(peer)
        if old is not None:
            ours_stays = self._own < peer
            if old.opened_here != opened_here and opened_here != ours_stays:
                await stream.close()
                raise LinkError("there is a link already")
            self._forget(old)
        if len(self._links) >= MAX_LINKS:
            await stream.close()
            raise LinkError(f"busy: {MAX_LINKS} links")
        await self._run(_Link(peer, stream, opened_here))

    async def _run(self, link: _Link) -> None:
        self._links[link.peer] = link
        name = link.peer[-6:]
        link.tasks = (
            asyncio.create_task(self._send(link), name=f"flood-send-{name}"),
            asyncio.create_task(self._receive(link), name=f"flood-receive-{name}"),
        )
        self._count("flood_links", 1.0)
        self.feed(LinkUp(link.peer))
        try:
            await asyncio.wait(link.tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._forget(link)
            ended = await asyncio.gather(*link.tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        if link.error is not None:
            raise link.error

    def _forget(self, link: _Link) -> None:
        """Ends a link, once what came over it is judged; the peer may get another one at once."""
        self._hand_on(link)
        if self._links.get(link.peer) is not link:
            return  # what it brought closed it
        del self._links[link.peer]
        self.questions.pop(link.peer, None)
        self._asking.ended(link.peer)
        link.idle.set()
        self.feed(LinkDown(link.peer))
        for task in link.tasks:
            task.cancel()
        closing = asyncio.create_task(link.stream.close(), name="flood-close")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _send(self, link: _Link) -> None:
        try:
            while True:
                body = link.next()
                if body is None:
                    link.idle.set()
                    link.ready.clear()
                    await link.ready.wait()
                    continue
                before = link.writer.payload
                frame = link.writer.write(body)
                self._count("flood_payload_bytes", link.writer.payload - before)
                await link.stream.send(frame)
        except LinkError as error:
            log.debug("the link with %s ended: %s", short(link.peer), error)

    async def _receive(self, link: _Link) -> None:
        try:
            while (frame := await link.stream.receive()) is not None:
                self._gather(link, link.reader.read(frame))
            self._hand_on(link)
        except LinkError as error:
            self._hand_on(link)
            log.debug("the link with %s ended: %s", short(link.peer), error)
        except ProtocolError as error:
            self._hand_on(link)
            log.warning("the link with %s is closed: %s", short(link.peer), error)
            self._count("flood_refused_malformed", 1.0)
            self._score(link.peer, "flood_malformed")
            self._shut_out(link.peer)
            link.error = error

    def _gather(self, link: _Link, body: FrameBody) -> None:
        """Lets batches wait for those right behind them; whatever else comes goes on after them, at once."""
        if self._links.get(link.peer) is not link:
            return  # frames that were at hand when it was closed
        if isinstance(body, HashReply) and self._asking.answered(link.peer, body):
            return
        if not isinstance(body, Segments):
            self._hand_on(link)
            return self.feed(Received(link.peer, body))
        link.gathered += body.segments
        link.waiting += sum(len(segment.batch.scalars) for segment in body.segments)
        if link.waiting >= MAX_PAGE:
            self._hand_on(link)
        elif link.gathering is None:
            link.gathering = asyncio.get_running_loop().call_later(GATHER_S, self._hand_on, link)

    def _hand_on(self, link: _Link) -> None:
        """Lets the machine judge what was gathered."""
        if link.gathering is not None:
            link.gathering.cancel()
            link.gathering = None
        if link.gathered and self._links.get(link.peer) is link:
            segments, link.gathered, link.waiting = tuple(link.gathered), [], 0
            self.feed(Received(link.peer, Segments(segments)))
