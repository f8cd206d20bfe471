"""How a pipeline's node finds its stage: it claims one, lets the claim settle, or stands by until one needs it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from peerloom.node.context import Context
from peerloom.node.stage_keeping import StageKeeping
from peerloom.node.stage_view import StageView
from peerloom.protocol.placement import Place, choose_place
from peerloom.protocol.types import StageRole

log = logging.getLogger(__name__)

TICK_S = 1.0
SETTLE_S = 3.0  # a claim that stood so long beside the others' is work
COPY_RETRY_S = 2.0


class StageSeeker:
    """Decides with `placement` what this node does, and says so in its record."""

    def __init__(self, context: Context, view: StageView, keeping: StageKeeping) -> None:
        self._context, self._view, self._keeping = context, view, keeping
        self._facts, self._clock, self._spec = context.facts, context.clock, context.spec.pipeline
        self._news = asyncio.Event()

    def wake(self) -> None:
        """The swarm is another one: look at once."""
        self._news.set()

    def take(self, role: StageRole, stage: int) -> None:
        """Says in the record what this node does."""
        self._facts.stage_role, self._facts.stage = role, stage
        self._facts.changed()

    async def wait(self, seconds: float) -> None:
        """Waits for so long, or until woken."""
        self._news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    async def find(self) -> int:
        """Claims a stage, or stands by until one needs this node; returns the stage that it hosts from now on."""
        context = self._context
        if context.settings.expect_peers:
            await context.view.wait_for_anybody(context.settings.first_view_s)
        stood_since, reason = self._clock.monotonic(), ""
        progress = (-1, self._clock.monotonic())  # of the stage that this node stands by for
        while True:
            place = self._choose()
            if place.role == "stands_by":
                progress = self._progress_of(place.stage, progress)
                if self._clock.monotonic() - progress[1] > 2 * self._spec.answer_s:
                    place = await self._join_stuck(place)
            if place.reason != reason:
                log.info("%s", place.reason)
            reason = place.reason
            role: StageRole = "claims" if place.role == "hosts" else place.role
            if context.settings.stage is not None:
                self.take("hosts", place.stage)  # its owner's choice: others are to see at once that it will not yield
                return place.stage
            if self._facts.stage_role == "stands_by" and place.role == "hosts":
                log.warning("taking over stage %d", place.stage)
                self._facts.count("stages_taken_over")
                self.take("hosts", place.stage)
                return place.stage
            if (role, place.stage) != (self._facts.stage_role, self._facts.stage):
                self.take(role, place.stage)
                stood_since = self._clock.monotonic()
            self._facts.enter("seeking", place.reason)
            if role == "claims" and self._clock.monotonic() - stood_since >= SETTLE_S:
                self.take("hosts", place.stage)
                return place.stage
            await self.wait(TICK_S)
            await context.view.refresh()
            if role == "stands_by":
                await self._view.probe()  # records outlive their node by half a minute: too long to take over

    def _progress_of(self, stage: int, before: tuple[int, float]) -> tuple[int, float]:
        """The newest update of a stage, and since when; a stage that waits for one without a host does not count."""
        update = max((record.step for record in self._view.hosts(stage)), default=-1)
        if update != before[0] or self._view.missing():
            return update, self._clock.monotonic()
        return before

    async def _join_stuck(self, place: Place) -> Place:
        """The run stands still though every stage has a host: joins the one that the stage before it waits for.

        A stage that has been given up waits for the one before it in turn, so that is no sign.
        """
        hosts = [record for record in self._view.records() if record.stage_role == "hosts"]
        stuck = Counter([r.stage + 1 for r in hosts if await self._view.waits_for(r) == r.stage + 1])
        stages = [stage for stage in stuck if stage < self._spec.stages]
        if not stages:
            return place
        stage = min(stages, key=lambda stage: (-stuck[stage], stage))
        return Place(stage, "hosts", f"stage {stage} stands still under its host")

    def _choose(self) -> Place:
        return choose_place(
            self._view.own(),
            self._view.claims(),
            self._spec.stages,
            standbys=self._spec.standbys,
            wanted=self._context.settings.stage,
            held=self._keeping.held(),
        )

    async def obtain_state(self, stage: int) -> None:
        """Has the newest copy of the stage on the disk, if anybody has one; waits for one while others have trained."""
        give_up_at = self._clock.monotonic() + self._context.settings.donor_patience_s
        while await self._keeping.obtain(stage) is None:
            trained = max((record.step for record in self._view.records()), default=0)
            ahead = any(record.step for record in self._view.hosts(stage))  # whom this one is to share the stage with
            if trained <= self._spec.backup_every and not ahead:
                return  # so little is lost with it
            if self._clock.monotonic() >= give_up_at:
                log.warning("no copy of stage %d is left: it begins anew among stages of update %d", stage, trained)
                return
            self._facts.enter("fetching", f"waiting for a copy of stage {stage}, which others trained to {trained}")
            await asyncio.sleep(COPY_RETRY_S)
            await self._context.view.refresh()
