"""A node's place in the swarm: where it starts, and whose state it takes over when it has fallen behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from peerloom.node.context import Context
from peerloom.node.joiner import FetchedState, Joiner
from peerloom.node.logs import log_if_changed
from peerloom.node.worker_seams import WorkerPort, WorkerReady
from peerloom.protocol.errors import NoDonor
from peerloom.protocol.lifecycle import StartDecision, catch_up_delay, choose_start, worse_than
from peerloom.protocol.membership import WORSE_STATE
from peerloom.protocol.transfer import FetchMachine
from peerloom.protocol.types import PeerId, PeerRecord

log = logging.getLogger(__name__)

DONOR_RETRY_S = 2.0
CATCH_UP_RATE = 256 << 10  # bytes a second: training does not stand still for a state that comes slower

T = TypeVar("T")


class Drained(Exception):
    """The node was told to stop before it had anything to save."""


@dataclass(slots=True)
class Held:
    """What this life holds of the model: `lock` guards theta, `saved_at` is when it was last saved, or the life began.

    `best_loss` is that of its rounds so far: the best, since many states, each a little worse, add up.
    """

    saved_at: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    best_loss: float | None = None


async def unless_draining(draining: asyncio.Event, job: Coroutine[Any, Any, T]) -> T:
    """The job's outcome; raises Drained, the job cancelled, when the node is to stop before it has one."""
    working, stopping = asyncio.ensure_future(job), asyncio.ensure_future(draining.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Drained
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


class Place:
    """Finds it at the start, and again when the swarm has gone on without this node."""

    def __init__(self, context: Context, worker: WorkerPort, held: Held) -> None:
        self._context, self._worker, self._held = context, worker, held
        self._facts, self._clock = context.facts, context.clock
        self._catch_ups_failed = 0  # in a row
        self._catch_up_from = context.clock.monotonic()  # no attempt before this
        view = context.view
        self._joiner = Joiner(context.transport, view.record_of, view.score, context.progress)

    async def find(self, ready: WorkerReady) -> None:
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
            self._believed(),
            self._context.spec.gasloc.max_round_skew,
            self._clock.wall(),
            started_at=self._facts.started_at,
            seen_s=self._context.view.seen_s(),
        )

    def _believed(self) -> list[PeerRecord]:
        """Without those that began from other parameters than the run names: they are of no such run."""
        named, found = self._context.spec.model.digest, self._context.view.believed()
        return [record for record in found if not named or record.init_digest in ("", named)]

    async def _fetch(self, decision: StartDecision, trained: bool) -> None:
        """Takes over the first state that its held-out loss does not speak against; raises NoDonor or Drained."""
        self._facts.enter("fetching", decision.reason)
        donors, began = decision.donors, asyncio.get_running_loop().time()
        while True:
            state = await unless_draining(self._context.draining, self._receive(donors, began if trained else None))
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
        own = facts.loss if self._held.best_loss is None else self._held.best_loss
        known = (own, state.held_out_loss) if trained else (state.held_out_loss, own)
        reference = next((loss for loss in known if loss is not None), None)
        async with self._held.lock:
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

    @property
    def behind(self) -> StartDecision | None:
        """Whom to fetch from, when the swarm has left this node more than max_round_skew rounds behind."""
        if self._context.draining.is_set() or self._clock.monotonic() < self._catch_up_from:
            return None
        decision = self._decide(resumed=True)
        return decision if decision.kind == "fetch" else None

    async def catch_up(self) -> None:
        """Fetches a state when this node is behind."""
        if (decision := self.behind) is None:
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
