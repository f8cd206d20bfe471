"""A round in several exchanges: fragments at their local steps, legs one after the other, each taken in as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from peerloom.node.seams import Clock, RoundTrained, Taken, WorkerPort
from peerloom.protocol import effects
from peerloom.protocol.gossip import GossipMachine


class Meeting(NamedTuple):
    """How a turn ended, and how its partner's proposal was taken in."""

    end: effects.FinishRound
    taken: Taken


class Turns:
    """Runs one round; `exchange` is one turn of it, `lock` guards theta, `trained` is told when local steps go on."""

    def __init__(
        self,
        worker: WorkerPort,
        machine: GossipMachine,
        exchange: Callable[[int, int, int], Awaitable[effects.FinishRound]],
        fragments: int,
        *,
        draining: Callable[[], bool],
        trained: Callable[[], None],
        lock: asyncio.Lock,
        clock: Clock,
        mark: Callable[[str], None],
    ) -> None:
        self._worker = worker
        self._machine = machine
        self._exchange = exchange
        self._fragments = fragments
        self._draining = draining
        self._training = trained
        self._lock = lock
        self._clock = clock
        self._mark = mark

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
            trained = _joined(trained, await self._worker.train(round, fragment))
            self._mark("first round")
            began = self._clock.monotonic()
            ends += await self._legs(round, fragment)
            waited += self._clock.monotonic() - began
            if self._draining():
                break
        assert trained is not None  # a spec has one fragment at least
        return trained, ends, waited

    async def _legs(self, round: int, fragment: int) -> list[Meeting]:
        ends: list[Meeting] = []
        while not ends or (len(ends) < self._machine.legs(fragment) and not self._draining()):
            end = await self._exchange(round, fragment, len(ends))
            taken = Taken()
            if end.partner is not None:
                taken = await self._worker.take(fragment, end.weight, end.receive, end.replace)
            ends.append(Meeting(end, taken))
        return ends


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
