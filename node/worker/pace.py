"""When a round's local steps are over: a fixed number of them, or as many as fit in a time."""

from __future__ import annotations

from collections.abc import Iterator

from peerloom.protocol.runspec import GaslocSpec

RESERVE = 16  # batches reserved at a time in a timed round, at least: a reservation costs an fsync
MAX_STEPS = 10**6  # a round, as for local_steps


def another_step(done: int, elapsed_s: float, spec: GaslocSpec) -> bool:
    """Whether a step follows the `done` ones, which took `elapsed_s`.

    With `round_s`: whether one as long as their mean ends within it.
    """
    if not spec.round_s:
        return done < spec.local_steps
    return done == 0 or (done < MAX_STEPS and elapsed_s * (done + 1) / done <= spec.round_s)


def reservations(spec: GaslocSpec, last_round: int) -> Iterator[int]:
    """How many batches to reserve, again and again; `last_round` is how many the round before took, 0 if unknown."""
    if not spec.round_s:
        yield spec.local_steps
    yield max(RESERVE, last_round + 1)
    while True:
        yield RESERVE
