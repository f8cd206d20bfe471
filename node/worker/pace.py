"""When local steps are over: a fixed number of them, or as many as fit in a time; shared out over the fragments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from peerloom.optim.fragments import offset
from peerloom.protocol.plan import due_s
from peerloom.protocol.spec_gasloc import GaslocSpec

RESERVE = 16  # batches reserved at a time in a timed round, at least: a reservation costs an fsync
BENEATH = 0.25  # of the local steps: what may run beneath an exchange; see `may_go_on`
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


def another_step(
    done: int, elapsed_s: float, spec: GaslocSpec, fragment: int = 0, linger_s: float = 0.0, before: Done = Done()
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


def may_go_on(done: int, elapsed_s: float, spec: GaslocSpec) -> bool:
    """Whether another step may run while the exchange of the round before is under way, after at least one.

    Loss bounds it: in `python -m tests.benchmarks.gasloc --full` (16 workers, 320 steps, H = 16, one random peer, "pre"
    and "post", 2 seeds) an exchange over 4 of the 16 next steps moved the final loss by -0.1 to +0.7 %, over 8 by +0.3
    to +1.4 %; one run with 15 by +2.2 %.
    """
    beneath = elapsed_s / spec.round_s if spec.round_s else done / spec.local_steps
    return done == 0 or beneath < BENEATH


def reservations(spec: GaslocSpec, last_round: int, fragment: int = 0) -> Iterator[int]:
    """How many batches to reserve, again and again; `last_round` is how many the round before took, 0 if unknown."""
    if not spec.round_s:
        yield steps_before(fragment, spec)
    yield max(RESERVE, last_round + 1)
    while True:
        yield RESERVE
