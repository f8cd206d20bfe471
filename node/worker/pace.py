"""When local steps are over: a fixed number of them, or as many as fit in a time; shared out over the fragments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from peerloom.optim.fragments import offset
from peerloom.protocol.plan import due_s
from peerloom.protocol.spec_gasloc import GaslocSpec

RESERVE = 16  # batches reserved at a time in a timed round, at least: a reservation costs an fsync
BENEATH = 0.25  # of the local steps: what may run beneath exchanges on average; see `Beneath`
SPARE = 1.5  # rounds of local steps: what may run beneath one exchange besides, saved up from those that took less
MAX_STEPS = 10**6  # a round, as for local_steps


class Done(NamedTuple):
    """Local steps taken, and the seconds that they took."""

    steps: int = 0
    seconds: float = 0.0

    def plus(self, steps: int, seconds: float) -> Done:
        """With these as well."""
        return Done(self.steps + steps, self.seconds + seconds)


def steps_before(fragment: int, spec: GaslocSpec) -> int:
    """The local steps of a round that lead to a fragment's exchange from the one before it."""
    before = offset(fragment - 1, spec.local_steps, spec.fragments) if fragment else 0
    return offset(fragment, spec.local_steps, spec.fragments) - before


NOTHING_YET = Done()


def another_step(
    done: int, elapsed_s: float, spec: GaslocSpec, fragment: int = 0, linger_s: float = 0.0, before: Done = NOTHING_YET
) -> bool:
    """Whether a step towards the fragment's exchange follows the `done` ones, which took `elapsed_s`.

    `before` is what was done in this round up to the fragment before. With `round_s`: whether one as long as their mean
    ends by the fragment's time and `linger_s`; the first step of a round always follows. So a node whose steps are long
    comes to several fragments at the same end of a step, and its round lasts no longer than the others'.
    """
    if not spec.round_s:
        return done < steps_before(fragment, spec)
    steps, seconds = before.plus(done, elapsed_s)
    fits = steps == 0 or seconds * (steps + 1) / steps <= due_s(spec, fragment) + linger_s
    return fits and done < MAX_STEPS


class Beneath:
    """How many local steps may run while the exchange of the round before is under way: a quarter, on average.

    Loss bounds it: in `python -m tests.benchmarks.gasloc --full` (16 workers, 320 steps, H = 16, one random peer, "pre"
    and "post", 2 seeds) an exchange over 4 of the 16 next steps moved the final loss by +0.6 to +1.8 %, over 8 by +2.6
    to +3.9 %. That is with every exchange as late. Now and then a partner's link is slow, and who meets him would stand
    still for as long; so what exchanges leave of their quarter is saved up, to SPARE at most, for one that lasts
    longer, past the round's own time where that is free. Consensus bears it: what is stable with a whole round beneath
    each exchange (`protocol.stability`) is so with more beneath some, since however many local steps take no more of a
    disagreement back than all of it.
    """

    def __init__(self, spec: GaslocSpec) -> None:
        self._spec = spec
        self._spare = SPARE  # a run's first exchanges are the least of its loss
        self._seconds = 0.0

    def goes_on(self, done: int, elapsed_s: float) -> bool:
        """Whether another step may run beneath the exchange under way, after `done` that took `elapsed_s`."""
        self._seconds = elapsed_s
        return done == 0 or self._share(done, elapsed_s) < BENEATH + self._spare

    def over(self, done: int, elapsed_s: float) -> None:
        """The exchange is over; so many steps ran beneath it."""
        self._spare = min(SPARE, max(0.0, self._spare + BENEATH - self._share(done, elapsed_s)))

    def finished(self) -> float:
        """The round is finished: the seconds of local steps that ran beneath its exchange."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _share(self, done: int, elapsed_s: float) -> float:
        return elapsed_s / self._spec.round_s if self._spec.round_s else done / self._spec.local_steps


def reservations(spec: GaslocSpec, last_round: int, fragment: int = 0) -> Iterator[int]:
    """How many batches to reserve, again and again; `last_round` is how many the round before took, 0 if unknown."""
    if not spec.round_s:
        yield steps_before(fragment, spec)
    yield max(RESERVE, last_round + 1)
    while True:
        yield RESERVE
