"""Round after round: local steps, the exchange, what it came to, a checkpoint now and then."""

from __future__ import annotations

import asyncio
import logging

from peerloom.node.context import Context
from peerloom.node.gossip_driver import GossipDriver
from peerloom.node.logs import log_if_changed, short
from peerloom.node.place import Held, Place
from peerloom.node.turns import Meeting, Reached, Turns
from peerloom.node.worker_seams import RoundFinished, RoundTrained, Taken, WorkerPort
from peerloom.protocol import effects, events
from peerloom.protocol.errors import StorageError
from peerloom.protocol.lifecycle import budget_spent
from peerloom.protocol.membership import FAR_OFF
from peerloom.protocol.plan import due_s, is_plain

log = logging.getLogger(__name__)

DRAIN_EXCHANGE_S = 4.0  # of the 10 s that a stop may take: what an exchange under way gets to end
LINGER_STEP_S = 0.5  # a partner waits for the step under way: with longer ones, local steps end before one is sought
MAJORITY = 3  # other peers: with fewer, nobody can tell who is the one that is far off


class Rounds:
    """Runs a worker's rounds until the node drains, the budget is spent or max_rounds are done."""

    def __init__(self, context: Context, worker: WorkerPort, driver: GossipDriver, place: Place, held: Held) -> None:
        self._context, self._worker, self._driver = context, worker, driver
        self._place, self._held = place, held
        self._facts, self._clock = context.facts, context.clock
        self._began = context.clock.monotonic()
        self._tokens_before = 0  # when the round began
        self._step_s = 0.0  # of the last round's steps, 0: not known yet
        self.finished = 0

    async def run(self) -> None:
        """All rounds, and a checkpoint of the last."""
        await self._all()
        await self._save()

    async def _all(self) -> None:
        while self._goes_on():
            await self._round()
            if not await self._between():
                break

    def _goes_on(self) -> bool:
        most = self._context.settings.max_rounds
        return not self._context.draining.is_set() and (most is None or self._facts.round < most)

    async def _between(self) -> bool:
        """What may come between two rounds; whether another follows."""
        if self._save_due():
            await self._save()
        if self._budget_spent(self._facts.tokens):
            self._facts.enter("done", "the run's token budget is spent")
            return False
        await self._place.catch_up()
        return True

    def _budget_spent(self, own_tokens: int) -> bool:
        return budget_spent(self._context.view.tokens().values(), own_tokens, self._context.spec.token_budget)

    def _save_due(self) -> bool:
        return self._clock.monotonic() - self._held.saved_at >= self._context.settings.checkpoint_every_s

    def _begin(self) -> None:
        self._facts.enter("training")
        self._began, self._tokens_before = self._clock.monotonic(), self._facts.tokens
        self._driver.feed(events.RoundStarted(self._facts.round))

    async def _round(self) -> None:
        self._begin()
        round = self._facts.round
        if is_plain(self._context.spec.gasloc):
            trained, ended, waited = await self._reach(round)
            finished = await self._finish(trained, mix=ended.partner is not None)
            return self._note_round(trained, ended, finished, waited, [met(ended, finished)])
        trained, meetings, waited = await self._turns().run(round)
        ended = next((met.end for met in meetings if met.end.partner is not None), meetings[-1].end)
        finished = await self._finish(trained, mix=False)
        self._note_round(trained, ended, finished, waited, meetings)

    async def _reach(self, round: int, fragment: int = 0, before_s: float = 0.0) -> Reached:
        """A fragment's local steps and its first exchange; `before_s` is what those of the fragments before took."""
        if linger_s := self._linger_s():
            return await self._lingering(round, fragment, before_s, linger_s)
        trained = await self._worker.train(round, fragment)
        self._context.phases.mark("first round")
        self._note_pace(trained)
        since = self._clock.monotonic()
        ended = await self._exchange(round, fragment)
        return Reached(trained, ended, self._clock.monotonic() - since)

    def _linger_s(self) -> float:
        """How long local steps may go on while a partner is sought, where they are short and their number is free."""
        spec = self._context.spec.gasloc
        return spec.match_timeout_s if spec.round_s and 0 < self._step_s < LINGER_STEP_S else 0.0

    def _note_pace(self, trained: RoundTrained) -> None:
        if trained.batches:
            self._step_s = trained.seconds / trained.batches

    async def _lingering(self, round: int, fragment: int, before_s: float, linger_s: float) -> Reached:
        """By the clock: a partner is sought from the fragment's time on, and until one is found the worker trains.

        What counts as waiting begins with its last step.
        """
        training = asyncio.ensure_future(self._worker.train(round, fragment, linger_s))
        proposed: list[float] = []
        training.add_done_callback(lambda _: proposed.append(self._clock.monotonic()))
        seeking: asyncio.Future[effects.FinishRound] | None = None
        try:
            until_due = max(0.0, due_s(self._context.spec.gasloc, fragment) - before_s)
            await asyncio.wait((training,), timeout=until_due)
            seeking = asyncio.ensure_future(self._exchange(round, fragment, proposal=training))
            await asyncio.wait((training, seeking), return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                await self._worker.interrupt()  # nobody was there
            trained = await training
            self._note_pace(trained)
            ended = await seeking
        finally:
            waited = [task for task in (training, seeking) if task is not None]
            for task in waited:
                task.cancel()
            await asyncio.gather(*waited, return_exceptions=True)
        return Reached(trained, ended, self._clock.monotonic() - proposed[0])

    async def _finish(self, trained: RoundTrained, *, mix: bool) -> RoundFinished:
        facts = self._facts
        async with self._held.lock:
            finished = await self._worker.finish(mix)
            facts.trained(trained)
            seconds = max(self._clock.monotonic() - self._began, 1e-9)
            facts.finished(finished, (trained.tokens - self._tokens_before) / seconds)
        self.finished += 1
        return finished

    def _turns(self) -> Turns:
        """A round of several exchanges; the last fragment's are settled by finish()."""
        context = self._context
        return Turns(
            self._worker,
            self._driver.machine,
            self._reach,
            self._exchange,
            context.spec.gasloc.fragments,
            draining=context.draining.is_set,
            trained=lambda: self._facts.enter("training"),
            lock=self._held.lock,
            clock=self._clock,
        )

    async def _exchange(
        self, round: int, fragment: int = 0, leg: int = 0, proposal: asyncio.Future[RoundTrained] | None = None
    ) -> effects.FinishRound:
        draining = self._context.draining
        if draining.is_set():
            return effects.FinishRound(round, None, round, "stopping")
        ending = asyncio.ensure_future(self._driver.exchange_round(round, fragment, leg, proposal))
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
        if loss is not None and not (self._held.best_loss is not None and self._held.best_loss < loss):
            self._held.best_loss = loss
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
        self._held.saved_at = self._clock.monotonic()


def met(ended: effects.FinishRound, finished: RoundFinished) -> Meeting:
    """A plain round's one meeting."""
    return Meeting(ended, Taken(share=finished.share, far_off=finished.far_off))
