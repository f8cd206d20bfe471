"""One life of a worker: start it, find this node's place in the swarm, go round after round, save."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from typing import Any, TypeVar, cast

from peerloom.node.context import Context
from peerloom.node.donor import Donor, manifest_of
from peerloom.node.gossip_driver import GossipDriver
from peerloom.node.joiner import FetchedState, Joiner
from peerloom.node.logs import log_if_changed, short
from peerloom.node.seams import (
    FIRST_STEP,
    STEPS,
    ExchangeStream,
    MessageStream,
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
from peerloom.protocol.lifecycle import StartDecision, budget_spent, catch_up_delay, choose_start, worse_than
from peerloom.protocol.membership import FAR_OFF, WORSE_STATE
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage
from peerloom.protocol.plan import is_plain
from peerloom.protocol.services import EXCHANGE, Service
from peerloom.protocol.transfer import FetchMachine
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

DRAIN_EXCHANGE_S = 4.0  # of the 10 s that a stop may take: what an exchange under way gets to end
DONOR_RETRY_S = 2.0
CATCH_UP_RATE = 256 << 10  # bytes a second: training does not stand still for a state that comes slower
MAJORITY = 3  # other peers: with fewer, nobody can tell who is the one that is far off

M = TypeVar("M")
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
        self._best_loss: float | None = None  # of this life's rounds: many states, each a little worse, add up
        self._catch_ups_failed = 0  # in a row
        self._catch_up_from = context.clock.monotonic()  # no attempt before this
        view = context.view
        self._joiner = Joiner(context.transport, view.record_of, view.score, context.progress)

    async def serve(self, service: Service[M], stream: MessageStream[M]) -> None:
        """Runs one exchange that a peer opened; raises LinkError while this node cannot pair, or for other services."""
        if service is not EXCHANGE:
            raise LinkError(f"a run of GASLoC serves no {service.name}")
        if self._driver is None:
            raise LinkError("this node is not training yet")
        await self._driver.serve(cast(ExchangeStream, stream))

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
        """Passes on how far starting is; the first optimizer step ends it, and steps are signs of life from then on."""
        if what == STEPS:
            self._facts.stepped(int(share))
        elif what == FIRST_STEP:
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
            log_if_changed(log, "place", decision.reason)
            if decision.kind == "resume" or (decision.kind == "fresh" and lost is None):
                return
            try:
                if decision.kind == "fresh" and lost is not None:
                    raise lost  # its last record has expired: starting afresh would make a second run of one id
                return await self._fetch(decision, ready.resumed)
            except NoDonor as error:
                if ready.resumed:
                    return self._stay_behind(error)  # a checkpoint to go on from beats waiting
                if self._clock.monotonic() >= give_up_at:
                    raise
                if any(record.round > 0 for record in view.believed()):
                    lost = error
                await asyncio.sleep(DONOR_RETRY_S)
                await view.refresh()

    def _decide(self, resumed: bool) -> StartDecision:
        return choose_start(
            self._facts.round,
            resumed,
            self._facts.init_digest,
            self._facts.layout_digest,
            self._context.view.believed(),
            self._context.spec.gasloc.max_round_skew,
            self._clock.wall(),
            started_at=self._facts.started_at,
            seen_s=self._context.view.seen_s(),
        )

    async def _fetch(self, decision: StartDecision, trained: bool) -> None:
        """Takes over the first state that its held-out loss does not speak against; raises NoDonor or Drained."""
        self._facts.enter("fetching", decision.reason)
        donors, began = decision.donors, asyncio.get_running_loop().time()
        while True:
            state = await self._unless_draining(self._receive(donors, began if trained else None))
            refusal = await self._take_over(state, trained)
            if not refusal:
                return
            blamed = state.to_blame()
            log.warning("the state of round %d from %s was refused: %s", state.round, ", ".join(blamed), refusal)
            for peer in blamed:
                self._context.view.score(peer, WORSE_STATE)
            donors = tuple(peer for peer in donors if peer not in blamed)
            if not donors:
                raise NoDonor(f"every state that was handed over had to be refused, the last one because {refusal}")

    async def _receive(self, donors: tuple[PeerId, ...], began: float | None) -> FetchedState:
        """Streams a state; `began` is when a node that has trained stopped for it, which it does not do for long."""
        facts, spec, total_bytes = self._facts, self._context.spec.gasloc, len(self._worker.theta())
        machine = FetchMachine(donors, facts.layout_digest, total_bytes, spec.max_round_skew)
        if began is None:
            return await self._joiner.fetch(machine, total_bytes)
        try:
            async with asyncio.timeout_at(began + 2 * spec.match_timeout_s + total_bytes / CATCH_UP_RATE):
                return await self._joiner.fetch(
                    machine, total_bytes, least_round=facts.round + 1, manifest_within_s=spec.match_timeout_s
                )
        except TimeoutError:
            raise NoDonor(f"the state came slower than {CATCH_UP_RATE >> 10} KiB/s") from None

    async def _take_over(self, state: FetchedState, trained: bool) -> str:
        """Adopts a state; goes back from one clearly worse (the inner moments are lost) and returns why, else ""."""
        facts, worker = self._facts, self._worker
        own = facts.loss if self._best_loss is None else self._best_loss
        known = (own, state.held_out_loss) if trained else (state.held_out_loss, own)
        reference = next((loss for loss in known if loss is not None), None)
        async with self._theta_lock:
            before = bytes(worker.theta())
            adopted = await worker.adopt(state.round, state.step, memoryview(state.theta))
            loss = adopted.held_out_loss
            if loss is not None and worse_than(loss, reference):
                await worker.adopt(facts.round, facts.step, memoryview(before))
                facts.count("states_refused")
                self._context.journal.write("refused", round=state.round, loss=loss, donors=" ".join(state.to_blame()))
                return f"its held-out loss is {loss:.3f}" + (
                    "" if reference is None else f", not about {reference:.3f}"
                )
            facts.round, facts.step, facts.loss, facts.sketch = state.round, state.step, loss, adopted.sketch
        facts.count("state_fetched")
        self._context.journal.write(
            "adopted", round=state.round, step=state.step, loss=facts.loss, donor_loss=state.held_out_loss
        )
        return ""

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
            if budget_spent(context.view.tokens().values(), facts.tokens, context.spec.token_budget):
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
            facts.exchanged_with(end.partner)
            if taken.share < 1:
                facts.count("gossip_clipped")
            if taken.far_off and len(self._context.view.live()) >= MAJORITY:
                self._context.view.score(end.partner, FAR_OFF)
        loss = finished.held_out_loss
        if loss is not None and not (self._best_loss is not None and self._best_loss < loss):
            self._best_loss = loss
        facts.met(any(end.partner is not None for end, _ in meetings), ended.reason)
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
        told = "" if loss is None else f", held-out loss {loss:.3f}"
        company = f"with {short(ended.partner)}" if ended.partner is not None else "alone"
        log_if_changed(log, "alone", f"no partner: {ended.reason}" if ended.reason else "")
        log.info("round %d done %s%s", trained.round, company, told)

    async def _catch_up(self) -> None:
        """Fetches when the swarm has left this node more than max_round_skew rounds behind."""
        if self._context.draining.is_set() or self._clock.monotonic() < self._catch_up_from:
            return
        decision = self._decide(resumed=True)
        if decision.kind != "fetch":
            return
        turn = self._catch_ups_failed % len(decision.donors)  # who failed first last time is not first again
        donors = decision.donors[turn:] + decision.donors[:turn]
        try:
            await self._fetch(replace(decision, donors=donors), trained=True)
            self._catch_ups_failed = 0
        except NoDonor as error:
            self._stay_behind(error)
        except Drained:
            log.info("stopping: the fetch is left")

    def _stay_behind(self, error: NoDonor) -> None:
        self._catch_ups_failed += 1
        delay = catch_up_delay(self._catch_ups_failed)
        self._catch_up_from = self._clock.monotonic() + delay
        log.warning("stayed behind, no new attempt for %.0f s: %s", delay, error)

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
