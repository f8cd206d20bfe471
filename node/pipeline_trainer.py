"""One life of a pipeline's node: find a stage, get its state, host it between its neighbours; or stand by for one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TypeVar, cast

from peerloom.node.context import Context
from peerloom.node.place import unless_draining
from peerloom.node.seams import ExchangeStream, MessageStream
from peerloom.node.stage_driver import StageDriver, StageReports
from peerloom.node.stage_keeping import StageKeeping
from peerloom.node.stage_link import Stream, TensorForm
from peerloom.node.stage_moving import Moved, StageMoving
from peerloom.node.stage_neighbours import OPENING_S, StageNeighbours
from peerloom.node.stage_replicas import StageReplicas
from peerloom.node.stage_seeking import TICK_S, StageSeeker
from peerloom.node.stage_view import WAITS_FOR, StageView
from peerloom.node.worker_seams import FIRST_STEP, StagePort, WorkerReady
from peerloom.protocol import stage_events as events
from peerloom.protocol.errors import (
    DataError,
    LinkError,
    MalformedMessage,
    ProtocolError,
    StorageError,
)
from peerloom.protocol.ledger import Ledger
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.services import EXCHANGE, STAGE, Service
from peerloom.protocol.stage_messages import StageOpen
from peerloom.protocol.stages import StageMachine
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

M = TypeVar("M")

DRAIN_SAVE_S = 7.0  # of the 10 s that a stop may take
TEXT_FROM = 32  # where in an init digest the text's begins
LINGER_S = 30.0  # how long a stage that is done answers those that are not


def lane_of(peer: PeerId) -> int:
    """The lane of a first-stage node that starts afresh: its own, so that no two draw the same microbatches."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:6], "big")


class PipelineTrainer:
    """Drives one worker from its start to its end; raises WorkerDied, Drained or Moved."""

    def __init__(self, context: Context, worker: StagePort) -> None:
        self._context, self._worker = context, worker
        self._facts, self._clock = context.facts, context.clock
        self._spec = context.spec.pipeline
        self._view = StageView(context)
        self._keeping = StageKeeping(context, self._view)
        self._driver: StageDriver | None = None
        self._replicas: StageReplicas | None = None
        self._seeker = StageSeeker(context, self._view, self._keeping)
        self._neighbours = StageNeighbours(context, self._view, self._seeker)
        self._moving = StageMoving(context, self._view)
        self._saved = asyncio.Event()
        self._save_at = 0.0
        self._rate_from = (0.0, 0)
        self.rounds = 0  # updates made in this life

    # what the node calls

    async def serve(self, service: Service[M], stream: MessageStream[M]) -> None:
        """Runs a stream that a peer opened; raises LinkError while it cannot."""
        if service is STAGE:
            await self._serve(cast(Stream, stream))
        elif service is EXCHANGE and self._replicas is not None:
            await self._replicas.serve(cast(ExchangeStream, stream))
        else:
            raise LinkError("this node hosts no stage now" if service is EXCHANGE else "this run serves no such stream")

    def fetch(self, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Raises LinkError: no node of a pipeline holds the model."""
        raise LinkError("no node of a pipeline holds the model; its stages are fetched over Stage.Run")

    async def interrupt(self) -> None:
        """Begins no more microbatches, and saves."""
        if self._replicas is not None:
            self._replicas.drain()
        if self._driver is not None:
            self._driver.feed(events.DrainStarted())
            self._driver.feed(events.SaveWanted())
        self._seeker.wake()

    def kill(self) -> None:
        """Ends the worker by force: run() raises WorkerDied."""
        self._worker.kill()

    def peers_changed(self) -> None:
        """The live view is another one."""
        if self._replicas is not None:
            self._replicas.look()
        self._seeker.wake()

    async def run(self) -> None:
        """The whole life: returns when drained, or when the run's updates are made, with a checkpoint written."""
        draining = self._context.draining
        try:
            stage = await unless_draining(draining, self._seeker.find())
            await unless_draining(draining, self._seeker.obtain_state(stage))
            starting = self._worker.start(self._context.worker_setup(stage), self._progress)
            ready = await unless_draining(draining, starting)
            self._context.phases.mark("worker")
            await self._host(stage, ready)
        finally:
            self._driver = self._replicas = None
            await self._neighbours.close()
            if self._facts.stage_role == "hosts":
                self._seeker.take("", -1)
            await self._worker.stop()

    def _progress(self, what: str, share: float) -> None:
        if what == FIRST_STEP:
            self._context.phases.mark(FIRST_STEP)
            self._context.journal.write("first_step")
        else:
            self._context.progress(what, share)

    # hosting it

    def _new_driver(self, stage: int, ready: WorkerReady) -> StageDriver:
        spec, state = self._context.spec, ready.pipeline or {}
        lane = int(state.get("lane", lane_of(self._facts.peer_id)))
        ledger = Ledger({lane: (below, ahead) for lane, below, ahead in state.get("ledger", [])})
        machine = StageMachine(
            self._spec,
            stage,
            first_version=ready.step,
            ledger=ledger,
            lane=lane,
            held_out=spec.train.eval_batches * self._spec.microbatches,
            limit=self._limit(),
            updates=self._updates(),
        )
        reports = StageReports(
            count=self._facts.count,
            score=self._context.view.score,
            trained=self._trained,
            evaluated=self._evaluated,
            saved=self._note_save,
        )
        form = TensorForm.of(spec, ready.payload_bytes)
        return StageDriver(machine, self._worker, self._clock, spec, form, reports, lane)

    def _updates(self) -> int | None:
        """Those of the run's budget."""
        budget = self._context.spec.token_budget
        return -(-budget // self._tokens_an_update) if budget else None

    def _limit(self) -> int | None:
        """The updates after which the run is done here."""
        ends = [each for each in (self._updates(), self._context.settings.max_rounds) if each is not None]
        return min(ends, default=None)

    async def _host(self, stage: int, ready: WorkerReady) -> None:
        facts, context = self._facts, self._context
        if ready.note:
            log.warning("%s", ready.note)
        facts.init_digest = ready.init_digest
        facts.round = facts.step = ready.step
        facts.tokens, facts.loss = ready.tokens, ready.held_out_loss
        self._save_at = self._clock.monotonic() + context.settings.checkpoint_every_s
        self._rate_from = (self._clock.monotonic(), ready.step)
        driver = self._driver = self._new_driver(stage, ready)
        replicas = self._replicas = StageReplicas(context, self._view, driver, self._worker, ready)
        context.journal.write("hosting", stage=stage, update=ready.step, resumed=ready.resumed)
        context.phases.mark("place in the swarm")
        jobs = [
            asyncio.create_task(job, name=f"stage-{name}")
            for name, job in (
                ("driver", driver.run()),
                ("keeping", self._keeping.run(stage)),
                ("replicas", replicas.run()),
                ("life", self._live(driver)),
            )
        ]
        try:
            ended, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in jobs:
                if job in ended:
                    job.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _live(self, driver: StageDriver) -> None:
        """Looks after neighbours, checkpoints and the end; returns at the end, with all saved.

        Raises Moved, with all saved too, when another stage needs this node more.
        """
        limit, draining, moves = self._limit(), self._context.draining, False
        while not moves and not draining.is_set() and not self._is_done(driver, limit):
            driver.feed(events.Ticked())
            await self._look_after(driver)
            await self._seeker.wait(TICK_S)
            moves = await self._moving.is_due(driver.machine.applied)
        if moves:
            self._seeker.take("claims", self._view.missing()[0])  # at once, or the next one would think it is its turn
        await self._save_last(driver, ends=moves or draining.is_set())
        if draining.is_set():
            return
        if moves:
            self._facts.count("stages_left")
            raise Moved
        await self._linger(driver, limit or 0)

    async def _save_last(self, driver: StageDriver, *, ends: bool) -> None:
        """The newest weights go to the disk; where the stage `ends` here, nothing more begins, in little time."""
        if ends:
            driver.feed(events.DrainStarted())
        self._saved.clear()
        driver.feed(events.SaveWanted())
        try:
            async with asyncio.timeout(DRAIN_SAVE_S if ends else None):
                await self._saved.wait()
        except TimeoutError:
            log.warning("the last checkpoint was not written in time; an older one stands")

    def _is_done(self, driver: StageDriver, limit: int | None) -> bool:
        """All updates are made; of several nodes of a stage each makes a part, and ends when the first stage has."""
        if limit is None or driver.machine.applied >= limit:
            return limit is not None
        first = self._view.hosts(0) if driver.machine.stage else []
        return bool(first) and all(record.state == "done" for record in first) and not driver.machine.load

    async def _linger(self, driver: StageDriver, limit: int) -> None:
        """Answers the stages before this one until they are done too."""
        self._facts.enter("done", "the run's updates are made")
        until = self._clock.monotonic() + LINGER_S
        while self._clock.monotonic() < until and not self._context.draining.is_set():
            if all(record.step >= limit or record.state == "done" for record in self._view.records()):
                return
            driver.feed(events.Ticked())
            await self._seeker.wait(TICK_S)
            await self._context.view.refresh()

    async def _look_after(self, driver: StageDriver) -> None:
        facts, missing = self._facts, self._view.missing()
        waiting = driver.machine.waiting_for
        facts.counters[WAITS_FOR] = float(-1 if waiting is None else waiting)
        if missing:
            named = ", ".join(map(str, missing))
            many = len(missing) > 1
            facts.enter("seeking", f"stage{'s' * many} {named} {'have' if many else 'has'} no host; the run waits")
        elif waiting is not None:
            facts.enter("seeking", f"waiting for the link with stage {waiting}")
        else:
            facts.enter("training")
        if missing or waiting is not None:
            await self._context.view.refresh()
        self._refuse_other_text(driver.machine.stage)
        facts.partners.update({peer: n - facts.partners[peer] for peer, n in driver.answered.items()})
        self._neighbours.connect(driver)
        if self._replicas is not None:
            self._replicas.look()
        if driver.computing_s > self._spec.answer_s:
            log.warning("the worker has not ended a pass in %.0f s; it is started again", driver.computing_s)
            self._worker.kill()
        if self._clock.monotonic() >= self._save_at:
            driver.feed(events.SaveWanted())
            self._save_at = self._clock.monotonic() + self._context.settings.checkpoint_every_s
        self._measure_rate(driver)
        facts.changed()

    def _refuse_other_text(self, stage: int) -> None:
        """Raises DataError on the last stage when its tokens are not the first stage's, whose labels they are to be."""
        if stage == 0 or stage < self._spec.stages - 1:
            return
        own = self._facts.init_digest[TEXT_FROM:]
        for record in self._view.hosts(0):
            theirs = record.init_digest[TEXT_FROM:]
            if theirs and own and theirs != own:
                raise DataError(
                    f"the text here is not that of {record.name}, which hosts the first stage; give both ends the same "
                    'with --data (the text "stdlib" is that of one Python version), or host another stage with --stage'
                )

    def _measure_rate(self, driver: StageDriver) -> None:
        """Tokens a second, told by the first stage alone: the swarm's sum is then the run's."""
        since, updates = self._rate_from
        elapsed, made = self._clock.monotonic() - since, driver.machine.applied - updates
        if elapsed < 5 * TICK_S:
            return
        self._rate_from = (self._clock.monotonic(), driver.machine.applied)
        if driver.machine.stage == 0:
            self._facts.tokens_per_s = made * self._tokens_an_update / elapsed

    @property
    def _tokens_an_update(self) -> int:
        return self._context.spec.train.batch_size * self._context.spec.data.sequence_length

    # streams

    async def _serve(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(OPENING_S):
                opening = await stream.receive()
        except TimeoutError:
            raise LinkError(f"nothing came for {OPENING_S:.0f} s") from None
        if opening is None:
            return
        if not isinstance(opening, StageOpen):
            self._context.view.score(stream.peer, "bad_stage_frame")
            raise MalformedMessage("a stream of a stage opens with what it is for")
        await self._serve_purpose(stream, opening)

    async def _serve_purpose(self, stream: Stream, opening: StageOpen) -> None:
        if opening.stage >= self._spec.stages:
            raise MalformedMessage(f"this run has {self._spec.stages} stages, from 0")
        match opening.purpose:
            case "keep":
                try:
                    await self._keeping.serve_keep(stream, opening.stage)
                except ProtocolError:
                    self._context.view.score(stream.peer, "bad_state")
                    raise
            case "fetch":
                self._save_first(opening.stage)
                await self._keeping.serve_fetch(stream, opening.stage)
            case "run":
                await self._neighbours.serve(self._driver, stream, opening.stage)

    def _save_first(self, stage: int) -> None:
        """Somebody asks for a stage that is hosted here and not saved yet: its next attempt is to find a copy."""
        if self._driver is not None and self._driver.machine.stage == stage and stage not in self._keeping.held():
            self._driver.feed(events.SaveWanted())

    # reports

    def _trained(self, update: int, loss: float) -> None:
        facts = self._facts
        self.rounds += 1
        facts.round = facts.step = update + 1
        if facts.stage == 0:
            facts.tokens = facts.step * self._tokens_an_update
        facts.count("updates")
        facts.counters["train_loss"] = loss
        self._context.journal.write("update", stage=facts.stage, update=update, loss=loss)
        if facts.step % self._spec.backup_every == 0 and self._driver is not None:
            self._driver.feed(events.SaveWanted())
        if self._replicas is not None:
            self._replicas.look()
        if self._limit() == facts.step:
            self._seeker.wake()

    def _evaluated(self, loss: float) -> None:
        self._facts.loss = loss
        self._context.journal.write("evaluated", stage=self._facts.stage, update=self._facts.step, held_out_loss=loss)
        log.info("update %d: held-out loss %.3f", self._facts.step, loss)
        self._facts.changed()

    def _note_save(self, outcome: Path | StorageError) -> None:
        facts = self._facts
        self._saved.set()
        if isinstance(outcome, StorageError):
            facts.count("checkpoints_failed")
            facts.warning = f"no checkpoint since update {facts.step}: {outcome}"
            log.error("no checkpoint written, training goes on: %s", outcome)
            return
        facts.count("checkpoints_written")
        facts.warning = ""
        log.info("checkpoint written: %s", outcome)
        self._keeping.saved()
