"""A round in several exchanges: fragments at their local steps, legs one after the other, each taken in as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from peerloom.node.seams import Clock
from peerloom.node.worker_seams import RoundTrained, Taken, WorkerPort
from peerloom.protocol import effects
from peerloom.protocol.gossip import GossipMachine


class Meeting(NamedTuple):
    """How a turn ended, and how its partner's proposal was taken in."""

    end: effects.FinishRound
    taken: Taken


class Reached(NamedTuple):
    """A fragment's local steps, how its first turn ended, and the seconds that were waited for that."""

    trained: RoundTrained
    ended: effects.FinishRound
    waited: float


class Turns:
    """Runs one round; `lock` guards theta, `trained` is told when local steps go on.

    `reach` takes a fragment's local steps and its first turn, told the seconds of local steps before; `exchange` is one
    of its later turns.
    """

    def __init__(
        self,
        worker: WorkerPort,
        machine: GossipMachine,
        reach: Callable[[int, int, float], Awaitable[Reached]],
        exchange: Callable[[int, int, int], Awaitable[effects.FinishRound]],
        fragments: int,
        *,
        draining: Callable[[], bool],
        trained: Callable[[], None],
        lock: asyncio.Lock,
        clock: Clock,
    ) -> None:
        self._worker = worker
        self._machine = machine
        self._reach = reach
        self._exchange = exchange
        self._fragments = fragments
        self._draining = draining
        self._training = trained
        self._lock = lock
        self._clock = clock

    async def run(self, round: int) -> tuple[RoundTrained, list[Meeting], float]:
        """The local steps in all, every turn's end, and the seconds at exchange points.

        The last fragment, and whatever a stop has cut off, is left to the worker's finish().
        """
        trained: RoundTrained | None = None
        ends: list[Meeting] = []
        waited = 0.0
        for fragment in range(self._fragments):
            if fragment:
                async with self._lock:
                    await self._worker.settle(fragment - 1)
                self._training()
            reached = await self._reach(round, fragment, trained.seconds if trained is not None else 0.0)
            trained = _joined(trained, reached.trained)
            began = self._clock.monotonic()
            ends += await self._legs(round, fragment, reached.ended)
            waited += reached.waited + self._clock.monotonic() - began
            if self._draining():
                break
        assert trained is not None  # a spec has one fragment at least
        return trained, ends, waited

    async def _legs(self, round: int, fragment: int, first: effects.FinishRound) -> list[Meeting]:
        ends = [Meeting(first, await self._taken(fragment, first))]
        while len(ends) < self._machine.legs(fragment) and not self._draining():
            end = await self._exchange(round, fragment, len(ends))
            ends.append(Meeting(end, await self._taken(fragment, end)))
        return ends

    async def _taken(self, fragment: int, end: effects.FinishRound) -> Taken:
        if end.partner is None:
            return Taken()
        return await self._worker.take(fragment, end.weight, end.receive, end.replace)


def _joined(first: RoundTrained | None, then: RoundTrained) -> RoundTrained:
    if first is None:
        return then
    batches = first.batches + then.batches
    loss = (first.train_loss * first.batches + then.train_loss * then.batches) / max(batches, 1)
    return replace(
        then,
        first_batch=first.first_batch,
        batches=batches,
        seconds=first.seconds + then.seconds,
        train_loss=loss,
    )
