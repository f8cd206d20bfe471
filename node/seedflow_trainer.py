"""One life of a SeedFlow node: resume or join, then step, flush, apply what others flooded, evaluate, save."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import TypeVar

from peerloom.node import base_folder
from peerloom.node.base_donor import KINDS, BaseDonor
from peerloom.node.base_joiner import BaseJoiner
from peerloom.node.context import Context
from peerloom.node.donor import Donor
from peerloom.node.flood_agreement import Agreement
from peerloom.node.flood_driver import FloodDriver
from peerloom.node.flood_joiner import FloodJoiner, swarm_peers
from peerloom.node.flood_log import FloodLog
from peerloom.node.place import unless_draining
from peerloom.node.seams import MessageStream
from peerloom.node.worker_seams import FIRST_STEP, SeedflowPort, SeedflowReady, StepsTaken
from peerloom.protocol.errors import BaseMissing, LinkError, NoDonor, RunMismatch, StorageError
from peerloom.protocol.flood import REPAIR_S, FloodMachine
from peerloom.protocol.lifecycle import budget_spent
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.services import FLOOD, Service

log = logging.getLogger(__name__)

M = TypeVar("M")

LOOK_S = 1.0  # between two looks at the swarm while there is nothing to do
SETTLE_S = 30.0  # how long a node that sees others waits for one to tell how much it has of this node's own messages
QUIET_S = 2 * REPAIR_S  # a node that has taken all its steps stays until nothing has come for so long
CLAIMED_S = 2 * QUIET_S  # and no longer for messages that a neighbour tells of and nobody gives
HASH_EVERY_S = 5.0
FLUSH_S = 2.0  # of the 10 s that a stop may take


class SeedflowTrainer(Agreement):
    """Drives one worker from its start to its end; raises WorkerDied, Drained, or what makes going on impossible."""

    def __init__(self, context: Context, worker: SeedflowPort) -> None:
        super().__init__(context, worker)
        self._donor: Donor | None = None
        self._base_donor: BaseDonor | None = None
        self._log: FloodLog
        self._saved_at = context.clock.monotonic()
        self._evaluated = -1
        self.rounds = 0  # flushes in this life

    # what a node asks for

    async def serve(self, service: Service[M], stream: MessageStream[M]) -> None:
        """Runs a link that a peer opened; raises LinkError while this node does not flood, and for other services."""
        if service.path != FLOOD.path:
            raise LinkError(f"this run's nodes do not serve {service.name}")
        record = self._context.view.record_of(stream.peer)
        if record is not None and record.init_digest not in ("", self._facts.init_digest):
            self._facts.count("flood_refused_base")
            raise LinkError("the two nodes' base models differ: their digests are not the same")
        if self._driver is None:
            raise LinkError("this node does not flood yet")
        await self._driver.serve(stream)  # type: ignore[arg-type]  # M is what FLOOD carries

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Serves this node's sums, or the base beneath them; raises LinkError while there are none."""
        if request.kind in KINDS:
            if self._base_donor is None:
                raise LinkError("this node holds no base model yet")
            async for message in self._base_donor.serve(request):
                yield message
            if request.kind == "base":
                self._facts.count("base_served")
            return
        if self._donor is None:
            raise LinkError("this node holds no state yet")
        if request.kind != "flood":
            raise RunMismatch(f"this node serves its sums and no state of kind {request.kind!r}")
        async for message in self._donor.serve(request, self._machine.total()):
            yield message
        self._facts.count("state_served")

    async def interrupt(self) -> None:
        """Cuts the steps under way short."""
        if self._driver is not None:
            self._driver.changed.set()
            await self._worker.interrupt()

    def kill(self) -> None:
        """Ends the worker by force: run() raises WorkerDied."""
        self._worker.kill()

    async def run(self) -> None:
        """The whole life: returns when drained, or when the run is done, with a checkpoint written."""
        opened: FloodLog | None = None
        try:
            ready = await unless_draining(self._context.draining, self._start())
            self._context.phases.mark("worker")
            self._note_ready(ready)
            settings, run_id = self._context.settings, self._context.spec.run_id
            opened = self._log = FloodLog(settings.run_dir, run_id, self._facts.peer_id)
            await unless_draining(self._context.draining, self._resume(ready))
            self._context.phases.mark("place in the swarm")
            await self._flood()
        finally:
            driver, self._driver, self._donor = self._driver, None, None
            base_donor, self._base_donor = self._base_donor, None
            for future in self._snapshots:
                future.cancel()
            for *_, written in self._bases:
                written.cancel()
            if base_donor is not None:
                await base_donor.close()
            if driver is not None:
                await driver.close()
            if opened is not None:
                opened.close()
            await self._worker.stop()

    # beginnings

    async def _start(self) -> SeedflowReady:
        """The worker's start; a base that cannot be had here is fetched from a peer first."""
        context = self._context
        base_folder.sweep(context.settings.run_dir)
        try:
            return await self._worker.start(context.worker_setup(), self._progress)
        except BaseMissing as missing:
            base_folder.discard(context.settings.run_dir)  # if it is what is damaged
            await BaseJoiner(context, self._worker).fetch(missing)
        context.facts.enter("starting", "building the model that was fetched")
        return await self._worker.start(context.worker_setup(), self._progress)

    def _progress(self, what: str, share: float) -> None:
        if what == FIRST_STEP:
            self._context.phases.mark(FIRST_STEP)
            self._context.journal.write("first_step")
        else:
            self._context.progress(what, share)

    def _note_ready(self, ready: SeedflowReady) -> None:
        if ready.note:
            log.warning("%s", ready.note)
        model = self._context.spec.model
        if model.path and not model.digest:
            log.info("the run does not name its base, whose digest is %s here; see model.digest", ready.init_digest)
        self._facts.init_digest, self._facts.layout_digest = ready.init_digest, ready.layout_digest
        self._facts.changed()

    async def _resume(self, ready: SeedflowReady) -> None:
        """From the log, or with no log from a peer's state; then waits to hear what others have of this node."""
        context, facts = self._context, self._facts
        machine = self._machine = FloodMachine(
            facts.peer_id,
            self._spec,
            context.spec.run_id,
            context.spec.seed,
            sign=context.sign,
            verify=context.verify,
        )
        self._joiner = FloodJoiner(context, self._worker, machine, self._log, ready)
        if self._log.note:
            log.warning("%s", self._log.note)
        restored = machine.restore(self._log.items)
        if self._log.state is not None:
            await self._worker.adopt_state(self._log.state)
        await self._worker.apply(restored.apply)
        await self._worker.retract(restored.retract)
        if context.settings.expect_peers:
            await context.view.wait_for_anybody(context.settings.first_view_s)
        self._joiner.check_base()
        if restored.resync or not self._log.items:
            if not await self._joiner.join(needed=restored.resync) and restored.resync:
                raise NoDonor(
                    "the state kept here counts messages of a peer that lied, and no peer could hand over another; "
                    "join again when a trainer is up"
                )
        elif machine.total():
            log.info("resumed from the log: %d messages, own steps up to %d", machine.total(), machine.next_step)
        self._log.items.clear()
        facts.tokens = machine.next_sequence * context.spec.train.batch_size * context.spec.data.sequence_length
        self._donor = Donor(self._clock, facts.layout_digest, self._take_snapshot)
        self._base_donor = BaseDonor(self._clock, facts.init_digest, context.settings.run_dir, self._write_base)
        self._driver = FloodDriver(
            machine,
            facts.peer_id,
            context.transport,
            self._clock,
            self._log,
            records=context.view.record_of,
            count=facts.count,
            score=context.view.score,
        )
        facts.step = machine.next_step
        facts.enter("training")  # or nobody links with it
        self.peers_changed()
        await self._settle(self._driver)

    async def _settle(self, driver: FloodDriver) -> None:
        """A node that lost its log must learn from others what it signed before it signs anything."""
        give_up_at = self._clock.monotonic() + SETTLE_S
        while not self._machine.settled() and self._clock.monotonic() < give_up_at:
            if not swarm_peers(self._context):
                return
            await self._wait(driver, LOOK_S / 4)
            await self._sync(driver)
        self._facts.step = self._machine.next_step

    # steps

    async def _flood(self) -> None:
        driver, context = self._driver, self._context
        assert driver is not None  # ours: set by _resume
        await self._evaluate(driver)
        while not context.draining.is_set() and not self._done():
            await self._sync(driver)
            await self._steps(driver)
        if not context.draining.is_set():
            await self._stay(driver)
        await self._sync(driver)
        await driver.flush(FLUSH_S)
        await self._hash()
        if not context.draining.is_set():
            await self._evaluate(driver)
            self._facts.enter("done", "the run's steps are done")
        await self._save()

    def _done(self) -> bool:
        context, most = self._context, self._context.settings.max_rounds
        spent = budget_spent(context.view.tokens().values(), self._facts.tokens, context.spec.token_budget)
        return self._machine.next_step >= self._spec.max_steps or spent or (most is not None and self.rounds >= most)

    async def _steps(self, driver: FloodDriver) -> None:
        facts, machine = self._facts, self._machine
        step, sequence, began = machine.next_step, machine.next_sequence, self._clock.monotonic()
        count = min(self._spec.flush_steps, self._spec.max_steps - step)
        facts.enter("training")
        taken = await self._worker.steps(count, step, sequence)
        if taken.scalars:
            await driver.own_steps(step, sequence, taken.scalars)
        self.rounds += 1
        self._note_steps(taken, step, sequence, max(self._clock.monotonic() - began, 1e-9))
        if self._machine.next_step // self._spec.eval_every_steps != self._evaluated:
            await self._evaluate(driver)
        if self._clock.monotonic() - self._hashed_at >= HASH_EVERY_S:
            await self._sync(driver)
            await self._hash()
        if self._clock.monotonic() - self._saved_at >= self._context.settings.checkpoint_every_s:
            await self._save()

    def _note_steps(self, taken: StepsTaken, step: int, sequence: int, seconds: float) -> None:
        facts = self._facts
        facts.step = self._machine.next_step
        facts.tokens += taken.tokens
        facts.rate(taken.tokens / seconds)
        facts.count("train_seconds", taken.seconds)
        facts.count("steps", len(taken.scalars))
        self._context.journal.write(
            "flush",
            step=step,
            sequence=sequence,
            steps=len(taken.scalars),
            tokens=facts.tokens,
            train_loss=taken.train_loss,
            messages=self._machine.total(),
            behind=self._machine.behind(),
            train_s=round(taken.seconds, 3),
        )
        facts.changed()

    async def _evaluate(self, driver: FloodDriver) -> None:
        await self._sync(driver)
        self._evaluated = self._machine.next_step // self._spec.eval_every_steps
        found, total = await self._worker.evaluate(), self._machine.total()
        self._facts.loss, self._facts.accuracy = found.loss, found.accuracy
        self._context.journal.write(
            "evaluated", step=self._facts.step, messages=total, loss=found.loss, accuracy=found.accuracy
        )
        await self._hash()

    async def _stay(self, driver: FloodDriver) -> None:
        """Its own steps are taken: goes on relaying and applying until the others are done too, and all is quiet."""
        self._facts.enter("training", "its steps are taken; it passes on what others send until they are done")
        quiet_since, total, evaluated = self._clock.monotonic(), self._machine.total(), -1
        while not self._context.draining.is_set():
            await self._sync(driver)
            now = self._clock.monotonic()
            if self._machine.total() != total:
                quiet_since, total = now, self._machine.total()
            if now - self._hashed_at >= HASH_EVERY_S:
                await self._hash()
            others = swarm_peers(self._context)
            busy = any(record.state == "training" and record.step < self._spec.max_steps for record in others)
            claimed = self._machine.behind() and now - quiet_since < CLAIMED_S
            if not busy and not claimed:
                if now - quiet_since >= (QUIET_S if others else 0.0):
                    return
                if now - quiet_since >= LOOK_S and evaluated != total:
                    await self._evaluate(driver)
                    evaluated = total
            await self._wait(driver, LOOK_S)

    async def _save(self) -> None:
        facts = self._facts
        try:
            self._log.sync()
            where = await self._worker.save(facts.step)
            log.info("checkpoint written: %s", where)
            facts.count("checkpoints_written")
        except StorageError as error:
            facts.count("checkpoints_failed")
            facts.warning = f"no checkpoint since step {facts.step}: {error}"
            log.error("no checkpoint written, training goes on: %s", error)
        else:
            facts.warning = ""
        self._saved_at = self._clock.monotonic()
