"""Rounds whose exchange runs beneath the local steps of the next one (`gasloc.overlap`)."""

from __future__ import annotations

import asyncio

from peerloom.node.rounds import Rounds, met
from peerloom.node.seams import RoundFinished, RoundTrained
from peerloom.protocol import effects


class OverlappedRounds(Rounds):
    """As Rounds; but before a checkpoint, a fetch or the end, an exchange blocks, so that these find a whole round.

    Of an exchange, only the time in which the local steps are over already counts as waiting.
    """

    async def _all(self) -> None:
        waiting: RoundTrained | None = None  # a round whose exchange is to come
        while self._goes_on():
            if waiting is None:
                self._begin()
                waiting = await self._worker.train(self._facts.round)
                self._context.phases.mark("first round")
            if not self._pauses(waiting):
                waiting = await self._beneath(waiting)
                continue
            await self._land(waiting)
            waiting = None
            if not await self._between():
                break
        if waiting is not None:
            await self._land(waiting)

    def _pauses(self, waiting: RoundTrained) -> bool:
        most, draining = self._context.settings.max_rounds, self._context.draining.is_set()
        last = draining or (most is not None and waiting.round + 1 >= most) or self._budget_spent(waiting.tokens)
        return last or self._save_due() or self._place.behind is not None

    async def _beneath(self, waiting: RoundTrained) -> RoundTrained:
        """Trains the next round while this one's exchange is under way; both are over when it returns."""
        since = self._clock.monotonic()
        training = asyncio.ensure_future(self._worker.train(waiting.round + 1))
        landing = asyncio.ensure_future(self._landed(waiting))
        try:
            following, (ended, finished) = await asyncio.gather(training, landing)
        finally:
            training.cancel()
            landing.cancel()
            await asyncio.gather(training, landing, return_exceptions=True)
        stood = max(0.0, self._clock.monotonic() - since - following.seconds)
        self._note_round(waiting, ended, finished, stood, [met(ended, finished)])
        return following

    async def _landed(self, waiting: RoundTrained) -> tuple[effects.FinishRound, RoundFinished]:
        ended = await self._exchange(waiting.round)
        finished = await self._finish(waiting, mix=ended.partner is not None)
        self._begin()
        return ended, finished
