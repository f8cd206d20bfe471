"""Performs a stage machine's effects on a worker and on links to the neighbouring stages; it decides nothing.

One command at a time runs in the worker. The driver holds the bytes that travel: what came and waits to be computed,
what was sent and has no answer yet, and the last answers, which may be asked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peerloom.node.logs import short
from peerloom.node.seams import Clock
from peerloom.node.stage_link import StageLink, Stream, TensorForm
from peerloom.node.worker import messages
from peerloom.node.worker_seams import Taken, WorkerPort
from peerloom.protocol import stage_effects as effects
from peerloom.protocol import stage_events as events
from peerloom.protocol.errors import LinkError, MalformedMessage, ProtocolError, StorageError
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.replicas import MixingStep
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.stage_effects import StageEffect
from peerloom.protocol.stage_events import StageEvent
from peerloom.protocol.stage_messages import Activation, Credit, Gradient, Score, StageOpened
from peerloom.protocol.stage_moves import MAX_UPSTREAM
from peerloom.protocol.stages import StageMachine
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

BAD_FRAME = "bad_stage_frame"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReports:
    """Who is told what the stage did."""

    count: Callable[[str, float], None]
    score: Callable[[PeerId, str], None]
    trained: Callable[[int, float], None]  # update, mean loss of its microbatches
    evaluated: Callable[[float], None]
    saved: Callable[[Path | StorageError], None]


class StageDriver:
    """Drives one StageMachine; `lane` stands in the checkpoints of a first stage."""

    def __init__(
        self,
        machine: StageMachine,
        worker: WorkerPort,
        clock: Clock,
        spec: RunSpec,
        form: TensorForm,
        reports: StageReports,
        lane: int = 0,
    ) -> None:
        self.machine = machine
        self.answered: Counter[PeerId] = Counter()  # microbatches exchanged with each neighbour
        self._worker, self._clock, self._spec, self._form = worker, clock, spec, form
        self._reports, self._lane = reports, lane
        self._first, self._last = machine.stage == 0, machine.stage == spec.pipeline.stages - 1
        self._up: dict[PeerId, StageLink] = {}
        self._down: dict[PeerId, StageLink] = {}
        self._given: dict[Microbatch, bytearray] = {}
        self._made: dict[Microbatch, bytes] = {}
        self._gradients: dict[Microbatch, bytearray] = {}
        self._answers: dict[Microbatch, bytes] = {}
        self._computing_since: float | None = None
        self._work: asyncio.Queue[tuple[StageEffect, bytearray | None]] = asyncio.Queue()
        self._pending: deque[tuple[StageEvent, bytearray | None]] = deque()
        self._handling = False
        self._mixed: asyncio.Future[Taken] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def computing_s(self) -> float:
        """For how long the pass or update under way has been under way; 0 when none is."""
        return 0.0 if self._computing_since is None else self._clock.monotonic() - self._computing_since

    @property
    def downstream(self) -> frozenset[PeerId]:
        """The nodes of the next stage that are linked."""
        return frozenset(self._down)

    async def run(self) -> None:
        """Works until cancelled; raises WorkerDied, or what a bug of ours raised elsewhere."""
        self.feed(events.Ticked())
        working = asyncio.create_task(self._working(), name="stage-work")
        try:
            await asyncio.wait((working, self._failed), return_when=asyncio.FIRST_COMPLETED)
            for ended in (working, self._failed):
                if ended.done():
                    ended.result()
        finally:
            working.cancel()
            self._failed.cancel()
            await asyncio.gather(working, self._failed, return_exceptions=True)
            for link in (*self._up.values(), *self._down.values()):
                link.cut(LinkError("this node no longer hosts the stage"))

    def feed(self, event: StageEvent, data: bytearray | None = None) -> None:
        """Gives the machine an event, with the bytes that came with it, and performs what it asks for, in order."""
        self._pending.append((event, data))
        if self._handling:
            return
        self._handling = True
        try:
            while self._pending:
                following, came = self._pending.popleft()
                for effect in self.machine.handle(following, self._clock.monotonic()):
                    self._perform(effect, came)
        except Exception as error:  # a bug of ours, in a link's task: the stage must not stand still over it
            if not self._failed.done():
                self._failed.set_exception(error)
            raise
        finally:
            self._handling = False

    async def mixing(self, step: MixingStep, round: int) -> Taken:
        """Has the worker take one step of an exchange with another host of the stage; one at a time."""
        self._mixed = asyncio.get_running_loop().create_future()
        self.feed(events.MixingWanted(step, round))
        return await self._mixed

    # links

    async def serve_upstream(self, stream: Stream) -> None:
        """Runs the link that a node of the stage before opened, to its end; raises what ended it."""
        if len(self._up) >= MAX_UPSTREAM and stream.peer not in self._up:
            raise LinkError(f"busy: {MAX_UPSTREAM} nodes send to this stage")
        await stream.send(StageOpened())
        await self._live(stream, self._up, events.UpstreamOpened(stream.peer), events.UpstreamLost(stream.peer))

    async def serve_downstream(self, stream: Stream) -> None:
        """Runs a link to a node of the next stage that has taken it, to its end; raises what ended it."""
        peer = stream.peer
        await self._live(stream, self._down, events.DownstreamOpened(peer, 0), events.DownstreamLost(peer))

    async def _live(
        self, stream: Stream, links: dict[PeerId, StageLink], opened: StageEvent, lost: StageEvent
    ) -> None:
        pipeline, peer = self._spec.pipeline, stream.peer
        link = StageLink(
            stream,
            self._form,
            self._clock,
            self._arrived,
            lambda: self.machine.waits_downstream,
            upstream=links is self._up,
            heartbeat_s=pipeline.heartbeat_s,
            dead_after_s=pipeline.dead_after_s,
        )
        if (old := links.get(peer)) is not None:
            old.over = True
            old.cut(LinkError("the peer opened another link"))
            self.feed(lost)
        links[peer] = link
        self.feed(opened)
        try:
            await link.run()
        except ProtocolError as error:
            log.warning("stage %d: the link with %s ended: %s", self.machine.stage, short(peer), error)
            self._reports.score(peer, BAD_FRAME)
            raise
        finally:
            if links.get(peer) is link:
                del links[peer]
                self.feed(lost)

    def _arrived(self, link: StageLink, event: StageEvent, data: bytearray | None) -> None:
        if not link.over:
            self.feed(event, data)

    # effects

    def _perform(self, effect: StageEffect, came: bytearray | None) -> None:
        match effect:
            case effects.KeepActivation(microbatch) if came is not None:
                self._given[microbatch] = came
            case effects.KeepGradient(peer, microbatch) if came is not None:
                self.answered[peer] += 1
                self._gradients[microbatch] = came
            case effects.RunForward(microbatch):
                self._work.put_nowait((effect, None if self._first else self._given.pop(microbatch)))
            case effects.RunBackward(microbatch):
                self._made.pop(microbatch, None)
                self._work.put_nowait((effect, self._gradients.pop(microbatch)))
            case effects.RunUpdate() | effects.RunSave() | effects.RunMixing():
                self._work.put_nowait((effect, None))
            case effects.SendActivation(peer, microbatch, version):
                header = Activation(microbatch, version, self._form.shape, self._form.encoding)
                self._down[peer].send_tensor(header, self._made[microbatch])
            case effects.SendGradient(peer, microbatch, version, loss):
                gradient = Gradient(microbatch, version, self._form.shape, self._form.encoding, loss)
                self.answered[peer] += 1
                self._up[peer].send_tensor(gradient, self._answers[microbatch])
            case effects.SendScore(peer, microbatch, version, loss):
                self._made.pop(microbatch, None)
                self._up[peer].send(Score(microbatch, version, loss))
            case effects.SendCredit(peer, count):
                self._up[peer].send(Credit(count))
            case effects.Forget(microbatch):
                for kept in (self._given, self._made, self._gradients, self._answers):
                    kept.pop(microbatch, None)
            case effects.Blame(peer, fault, detail):
                self._blame(peer, fault, detail)
            case effects.ReportTrained(update, loss):
                self._reports.trained(update, loss)
            case effects.ReportHeldOut(loss):
                self._reports.evaluated(loss)

    def _blame(self, peer: PeerId, fault: str, detail: str) -> None:
        for link in (self._up.get(peer), self._down.get(peer)):
            if link is not None:
                link.cut(MalformedMessage(detail) if fault == BAD_FRAME else LinkError(detail))
        if fault != BAD_FRAME:  # which the link's end scores
            log.warning("stage %d: %s: %s", self.machine.stage, short(peer), detail)
            self._reports.score(peer, fault)

    async def _working(self) -> None:
        while True:
            effect, data = await self._work.get()
            match effect:
                case effects.RunForward(microbatch, version, update):
                    ran = await self._ask(messages.Forward(microbatch, version, update), data)
                    self._keep_forward(microbatch)
                    self.feed(events.ForwardDone(microbatch, ran.loss))
                case effects.RunBackward(microbatch):
                    await self._ask(messages.Backward(microbatch), data)
                    if not self._first:
                        self._answers[microbatch] = bytes(self._worker.outbox())
                    self.feed(events.BackwardDone(microbatch))
                case effects.RunUpdate(update, oldest):
                    await self._ask(messages.Update(update, oldest), None)
                    self.feed(events.UpdateDone(update))
                case effects.RunSave(ledger):
                    await self._save(ledger)
                    self.feed(events.SaveDone())
                case effects.RunMixing(step, round):
                    taken = await self._worker.ask(messages.Mixing(step, round), Taken)
                    if not self._mixed.done():
                        self._mixed.set_result(taken)
                    self.feed(events.MixingDone())

    def _keep_forward(self, microbatch: Microbatch) -> None:
        if not self._last:
            self._made[microbatch] = bytes(self._worker.outbox())
        elif not (self._first or microbatch.held_out):
            self._answers[microbatch] = bytes(self._worker.outbox())

    async def _ask(self, command: messages.Command, data: bytearray | None) -> messages.Ran:
        if data is not None:
            self._worker.inbox()[:] = data
        self._computing_since = self._clock.monotonic()
        ran = await self._worker.ask(command, messages.Ran)
        self._computing_since = None
        self._reports.count("stage_busy_seconds", ran.seconds)
        self._reports.count("stage_cpu_seconds", ran.cpu_seconds)
        return ran

    async def _save(self, ledger: dict[int, tuple[int, list[int]]]) -> None:
        try:
            self._reports.saved(await self._worker.ask(messages.SaveStage(ledger, self._lane), Path))
        except StorageError as error:
            self._reports.saved(error)
