"""Rounds whose exchange runs beneath the local steps of the next one (`gasloc.overlap`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from peerloom.node.rounds import Rounds, met
from peerloom.node.worker_seams import RoundFinished, RoundTrained
from peerloom.protocol import effects
from peerloom.protocol.gossip_moves import STALL_SHARE


@dataclass(slots=True)
class _Waiting:
    """A round that has been trained; `meeting` is its exchange, where it has begun."""

    trained: RoundTrained
    meeting: asyncio.Future[effects.FinishRound] | None = None


class OverlappedRounds(Rounds):
    """As Rounds; but before a checkpoint, a fetch or the end, an exchange blocks, so that these find a whole round.

    By the clock a partner is sought while local steps go on, as in Rounds, so that what is beneath the next round is
    the transfer alone. Of an exchange, only the time in which no local steps may run counts as waiting.
    """

    async def _all(self) -> None:
        waiting: _Waiting | None = None
        try:
            while self._goes_on():
                if waiting is None:
                    self._begin()
                    waiting = await self._next(self._facts.round)
                if not self._pauses(waiting.trained):
                    waiting = await self._beneath(waiting)
                    continue
                await self._meet(waiting)
                waiting = None
                if not await self._between():
                    break
            if waiting is not None:
                await self._meet(waiting)
                waiting = None
        finally:
            if waiting is not None:
                await _drop(waiting.meeting)

    def _pauses(self, waiting: RoundTrained) -> bool:
        most, draining = self._context.settings.max_rounds, self._context.draining.is_set()
        last = draining or (most is not None and waiting.round + 1 >= most) or self._budget_spent(waiting.tokens)
        return last or self._save_due() or self._place.behind is not None

    def _linger_s(self) -> float:
        """A partner who waits for the step under way trains on meanwhile; but he waits so long only."""
        spec = self._context.spec.gasloc
        short = 0 < self._step_s < STALL_SHARE * spec.match_timeout_s / 2
        return spec.match_timeout_s if spec.round_s and short else 0.0

    async def _next(
        self, round: int, landing: asyncio.Future[tuple[effects.FinishRound, RoundFinished]] | None = None
    ) -> _Waiting:
        """Local steps, beneath the round before's `landing`; by the clock, the meeting has begun when they are over."""
        linger_s, left_s = self._linger_s(), self._context.spec.gasloc.round_s
        training = asyncio.ensure_future(self._worker.train(round, linger_s=linger_s))
        meeting: asyncio.Future[effects.FinishRound] | None = None
        try:
            if landing is not None:
                await asyncio.wait((training, landing), return_when=asyncio.FIRST_COMPLETED)
                if training.done():
                    training.result()  # what failed there is not waited for
                left_s -= (await landing)[1].beneath_s
            if linger_s:
                await asyncio.wait((training,), timeout=max(0.0, left_s))
                meeting = asyncio.ensure_future(self._exchange(round, proposal=training))
                await asyncio.wait((training, meeting), return_when=asyncio.FIRST_COMPLETED)
                if not training.done():
                    await self._worker.interrupt()  # nobody was there
            trained = await training
        except BaseException:
            await _drop(training, meeting)
            raise
        self._context.phases.mark("first round")
        self._note_pace(trained)
        return _Waiting(trained, meeting)

    async def _beneath(self, waiting: _Waiting) -> _Waiting:
        """Trains the next round while this one's exchange is under way, which is over when it returns."""
        since = self._clock.monotonic()
        landing = asyncio.ensure_future(self._landed(waiting))
        try:
            following = await self._next(waiting.trained.round + 1, landing)
            ended, finished = await landing
        finally:
            await _drop(landing)
        stood = max(0.0, self._clock.monotonic() - since - following.trained.seconds)
        self._note_round(waiting.trained, ended, finished, stood, [met(ended, finished)])
        return following

    async def _landed(self, waiting: _Waiting) -> tuple[effects.FinishRound, RoundFinished]:
        ended = await self._ended(waiting)
        finished = await self._finish(waiting.trained, mix=ended.partner is not None)
        self._begin()
        return ended, finished

    async def _meet(self, waiting: _Waiting) -> None:
        """The exchange, or what is left of it, with nothing beneath it."""
        since = self._clock.monotonic()
        ended = await self._ended(waiting)
        stood = self._clock.monotonic() - since
        finished = await self._finish(waiting.trained, mix=ended.partner is not None)
        self._note_round(waiting.trained, ended, finished, stood, [met(ended, finished)])

    async def _ended(self, waiting: _Waiting) -> effects.FinishRound:
        if waiting.meeting is None:
            waiting.meeting = asyncio.ensure_future(self._exchange(waiting.trained.round))
        return await waiting.meeting


async def _drop(*jobs: asyncio.Future[Any] | None) -> None:
    running = [job for job in jobs if job is not None]
    for job in running:
        job.cancel()
    await asyncio.gather(*running, return_exceptions=True)
