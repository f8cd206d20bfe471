"""One life of a worker: start it, find this node's place in the swarm, go round after round, save."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from peerloom.node.context import Context
from peerloom.node.donor import Donor, manifest_of
from peerloom.node.gossip_driver import GossipDriver
from peerloom.node.joiner import Joiner
from peerloom.node.seams import (
    FIRST_STEP,
    ExchangeStream,
    RoundFinished,
    RoundTrained,
    Taken,
    WorkerPort,
    WorkerReady,
    WorkerSetup,
)
from peerloom.node.turns import Meeting, Turns
from peerloom.protocol import effects, events
from peerloom.protocol.errors import LinkError, NoDonor, StorageError
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.lifecycle import StartDecision, budget_spent, choose_start
from peerloom.protocol.membership import FAR_OFF
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage
from peerloom.protocol.plan import is_plain
from peerloom.protocol.transfer import FetchMachine

log = logging.getLogger(__name__)

DRAIN_EXCHANGE_S = 4.0  # of the 10 s that a stop may take: what an exchange under way gets to end
DONOR_RETRY_S = 2.0
MAJORITY = 3  # other peers: with fewer, nobody can tell who is the one that is far off

T = TypeVar("T")


class Drained(Exception):
    """The node was told to stop before it had anything to save."""


class Trainer:
    """Drives one worker from its start to its end; raises WorkerDied, NoDonor or Drained."""

    def __init__(self, context: Context, worker: WorkerPort) -> None:
        self._context = context
        self._worker = worker
        self._facts = context.facts
        self._clock = context.clock
        self._theta_lock = asyncio.Lock()
        self._driver: GossipDriver | None = None
        self._donor: Donor | None = None
        self._saved_at = context.clock.monotonic()
        self.rounds = 0  # finished in this life
        view = context.view
        self._joiner = Joiner(context.transport, view.record_of, view.score, context.progress)

    async def exchange(self, stream: ExchangeStream) -> None:
        """Runs one exchange that a peer opened; raises LinkError while this node cannot pair."""
        if self._driver is None:
            raise LinkError("this node is not training yet")
        await self._driver.serve(stream)

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Serves this node's theta; raises LinkError while there is none."""
        if self._donor is None:
            raise LinkError("this node holds no model yet")
        async for message in self._donor.serve(request, self._facts.round):
            yield message
        self._facts.count("state_served")

    async def interrupt(self) -> None:
        """Cuts the round under way short."""
        if self._driver is not None:
            self._driver.feed(events.DrainStarted())
            await self._worker.interrupt()

    def kill(self) -> None:
        """Ends the worker by force: run() raises WorkerDied."""
        self._worker.kill()

    def peers_changed(self) -> None:
        """The live view is another one."""
        if self._driver is not None:
            self._driver.feed(events.PeersChanged(self._context.view.live()))

    async def run(self) -> None:
        """The whole life: returns when drained, out of budget or past max_rounds, with a checkpoint written."""
        try:
            ready = await self._unless_draining(self._worker.start(self._setup(), self._progress))
            self._context.phases.mark("worker")
            self._facts.ready(ready)
            if ready.note:
                log.warning("%s", ready.note)
            self._donor = Donor(self._clock, ready.layout_digest, self._take_snapshot)
            await self._unless_draining(self._find_place(ready))
            self._context.phases.mark("place in the swarm")
            self._driver = self._new_driver(ready)
            self.peers_changed()
            await self._rounds()
        finally:
            driver, self._driver, self._donor = self._driver, None, None
            if driver is not None:
                await driver.close()
            await self._worker.stop()

    async def _unless_draining(self, job: Coroutine[Any, Any, T]) -> T:
        working, draining = asyncio.ensure_future(job), asyncio.ensure_future(self._context.draining.wait())
        try:
            await asyncio.wait((working, draining), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Drained
        finally:
            working.cancel()
            draining.cancel()
            await asyncio.gather(working, draining, return_exceptions=True)

    def _progress(self, what: str, share: float) -> None:
        """Passes on how far starting is; the first optimizer step ends it."""
        if what == FIRST_STEP:
            self._context.phases.mark(FIRST_STEP)
            self._context.journal.write("first_step")
        else:
            self._context.progress(what, share)

    def _setup(self) -> WorkerSetup:
        settings = self._context.settings
        return WorkerSetup(
            spec=self._context.spec,
            peer_id=self._facts.peer_id,
            run_dir=settings.run_dir,
            cache_dir=settings.cache_dir,
            data_source=settings.data_source,
            keep_checkpoints=settings.keep_checkpoints,
            device=settings.device,
            threads=settings.threads,
        )

    def _new_driver(self, ready: WorkerReady) -> GossipDriver:
        context, spec = self._context, self._context.spec.gasloc
        machine = GossipMachine(
            self._facts.peer_id,
            spec,
            context.spec.seed,
            context.rng,
            ready.layout_digest,
            ready.piece_bytes or ready.payload_bytes,
        )
        return GossipDriver(
            machine,
            context.transport,
            self._worker,
            self._clock,
            layout=ready.layout_digest,
            encoding=spec.encoding,
            records=context.view.record_of,
            count=self._facts.count,
            score=context.view.score,
            moved=self._show,
        )

    def _show(self, machine: GossipMachine) -> None:
        if machine.state != "training" and not self._context.draining.is_set():
            self._facts.enter(machine.state, machine.reason)

    # finding one's place

    async def _find_place(self, ready: WorkerReady) -> None:
        """Starts fresh, resumes, or fetches a peer's state; raises NoDonor."""
        settings, view = self._context.settings, self._context.view
        if settings.expect_peers:
            await view.wait_for_anybody(settings.first_view_s)
        give_up_at = self._clock.monotonic() + settings.donor_patience_s
        lost: NoDonor | None = None  # why a swarm that has trained already could not be joined
        while True:
            decision = self._decide(ready.resumed)
            log.info("%s", decision.reason)
            if decision.kind == "resume" or (decision.kind == "fresh" and lost is None):
                return
            try:
                if decision.kind == "fresh" and lost is not None:
                    raise lost  # its last record has expired: starting afresh would make a second run of one id
                return await self._fetch(decision)
            except NoDonor as error:
                if self._clock.monotonic() >= give_up_at:
                    raise
                if any(record.round > 0 for record in view.records()):
                    lost = error
                await asyncio.sleep(DONOR_RETRY_S)
                await view.refresh()

    def _decide(self, resumed: bool) -> StartDecision:
        return choose_start(
            self._facts.round,
            resumed,
            self._facts.init_digest,
            self._facts.layout_digest,
            self._context.view.records(),
            self._context.spec.gasloc.max_round_skew,
            self._clock.wall(),
            started_at=self._facts.started_at,
        )

    async def _fetch(self, decision: StartDecision) -> None:
        facts, total_bytes = self._facts, len(self._worker.theta())
        facts.enter("fetching", decision.reason)
        skew = self._context.spec.gasloc.max_round_skew
        state = await self._joiner.fetch(
            FetchMachine(decision.donors, facts.layout_digest, total_bytes, skew), total_bytes
        )
        async with self._theta_lock:
            adopted = await self._worker.adopt(state.round, state.step, memoryview(state.theta))
            facts.round, facts.step, facts.loss = state.round, state.step, adopted.held_out_loss
            facts.sketch = adopted.sketch
        facts.count("state_fetched")
        self._context.journal.write(
            "adopted", round=state.round, step=state.step, loss=facts.loss, donor_loss=state.held_out_loss
        )

    async def _take_snapshot(self) -> tuple[StateManifest, bytes]:
        async with self._theta_lock:  # never while the worker mixes
            facts, data = self._facts, bytes(self._worker.theta())
            manifest = manifest_of(
                data, round=facts.round, step=facts.step, layout=facts.layout_digest, held_out_loss=facts.loss
            )
            return manifest, data

    # rounds

    async def _rounds(self) -> None:
        context, facts = self._context, self._facts
        most = context.settings.max_rounds
        while not context.draining.is_set() and (most is None or facts.round < most):
            await self._round()
            if budget_spent(context.view.records(), facts.tokens, context.spec.token_budget):
                facts.enter("done", "the run's token budget is spent")
                break
            await self._catch_up()
        await self._save()

    async def _round(self) -> None:
        facts, began = self._facts, self._clock.monotonic()
        facts.enter("training")
        assert self._driver is not None  # ours: set before the rounds
        self._driver.feed(events.RoundStarted(facts.round))
        tokens_before = facts.tokens
        plain = is_plain(self._context.spec.gasloc)
        if plain:
            trained = await self._worker.train(facts.round)
            self._context.phases.mark("first round")
            waited_from = self._clock.monotonic()
            ended = await self._exchange(facts.round)
            waited = self._clock.monotonic() - waited_from
            meetings: list[Meeting] = []
        else:
            trained, meetings, waited = await self._turns().run(facts.round)
            ended = next((met.end for met in meetings if met.end.partner is not None), meetings[-1].end)
        async with self._theta_lock:
            finished = await self._worker.finish(mix=plain and ended.partner is not None)
            facts.trained(trained)
            seconds = max(self._clock.monotonic() - began, 1e-9)
            facts.finished(finished, (trained.tokens - tokens_before) / seconds)
        self.rounds += 1
        if plain:
            meetings = [Meeting(ended, Taken(share=finished.share, far_off=finished.far_off))]
        self._note_round(trained, ended, finished, waited, meetings)
        if self._clock.monotonic() - self._saved_at >= self._context.settings.checkpoint_every_s:
            await self._save()

    def _turns(self) -> Turns:
        """A round of several exchanges; the last fragment's are settled by finish()."""
        assert self._driver is not None  # ours: set before the rounds
        context = self._context
        return Turns(
            self._worker,
            self._driver.machine,
            self._exchange,
            context.spec.gasloc.fragments,
            draining=context.draining.is_set,
            trained=lambda: self._facts.enter("training"),
            lock=self._theta_lock,
            clock=self._clock,
            mark=context.phases.mark,
        )

    async def _exchange(self, round: int, fragment: int = 0, leg: int = 0) -> effects.FinishRound:
        assert self._driver is not None  # ours: set before the rounds
        draining = self._context.draining
        if draining.is_set():
            return effects.FinishRound(round, None, round, "stopping")
        ending = asyncio.ensure_future(self._driver.exchange_round(round, fragment, leg))
        stopping = asyncio.ensure_future(draining.wait())
        try:
            await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((ending,), timeout=DRAIN_EXCHANGE_S)
            if ending.done():
                return ending.result()
            await self._driver.close()  # nothing may read the outbox once the worker goes on
            return effects.FinishRound(round, None, round, "stopped before the exchange ended")
        finally:
            ending.cancel()
            stopping.cancel()
            await asyncio.gather(ending, stopping, return_exceptions=True)

    def _note_round(
        self,
        trained: RoundTrained,
        ended: effects.FinishRound,
        finished: RoundFinished,
        waited: float,
        meetings: list[Meeting],
    ) -> None:
        facts = self._facts
        for end, taken in meetings:
            if end.partner is None:
                continue
            facts.partners[end.partner] += 1
            if taken.share < 1:
                facts.count("gossip_clipped")
            if taken.far_off and len(self._context.view.live()) >= MAJORITY:
                self._context.view.score(end.partner, FAR_OFF)
        facts.count("rounds")
        facts.count("exchange_seconds", waited)
        facts.count("train_seconds", trained.seconds)
        facts.worst("exchange_seconds_max", waited)
        self._context.journal.write(
            "round",
            round=trained.round,
            step=trained.step,
            tokens=trained.tokens,
            first_batch=trained.first_batch,
            batches=trained.batches,
            train_loss=trained.train_loss,
            held_out_loss=finished.held_out_loss,
            partner=ended.partner,
            partner_round=ended.partner_round,
            alone_because=ended.reason,
            share=min([finished.share, *(met.taken.share for met in meetings)]),
            train_s=round(trained.seconds, 3),
            exchange_s=round(waited, 3),
            **({} if len(meetings) == 1 else {"met": " ".join(met.end.partner or "-" for met in meetings)}),
        )
        loss = "" if finished.held_out_loss is None else f", held-out loss {finished.held_out_loss:.3f}"
        company = f"with {ended.partner[-6:]}" if ended.partner is not None else f"alone: {ended.reason}"
        log.info("round %d done %s%s", trained.round, company, loss)

    async def _catch_up(self) -> None:
        """Fetches when the swarm has left this node more than max_round_skew rounds behind."""
        decision = self._decide(resumed=True)
        if decision.kind != "fetch" or self._context.draining.is_set():
            return
        try:
            await self._unless_draining(self._fetch(decision))
        except NoDonor as error:
            log.warning("stayed behind: %s", error)
        except Drained:
            log.info("stopping: the fetch is left")

    async def _save(self) -> None:
        facts = self._facts
        try:
            where = await self._worker.save()
            log.info("checkpoint written: %s", where)
            facts.count("checkpoints_written")
        except StorageError as error:
            facts.count("checkpoints_failed")
            facts.warning = f"no checkpoint since round {facts.round}: {error}"
            log.error("no checkpoint written, training goes on: %s", error)
        else:
            facts.warning = ""
        self._saved_at = self._clock.monotonic()
