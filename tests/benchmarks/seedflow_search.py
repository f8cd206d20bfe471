"""The rates of the quality runs, chosen by the validation loss alone: no figure of the test set is read.

Learning rates lie on a ladder of half decades that is climbed until the best is not at an edge. The first-order
ceiling, on the same parameters, is searched over batch and schedule too, and over the quarters of a decade beside its
best, judged by the mean over all seeds: a single seed's losses lie 0.01 to 0.03 apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.benchmarks.seedflow_quality import Run, final

Loss = Callable[[Run], float]

FIRST_ORDER = tuple((clients, decay) for clients in (16, 1) for decay in ("linear", "none"))
FIRST_ORDER_STEPS = 500  # the paper's
MOST = 8  # rungs tried in one climb
HALF_DECADE, QUARTER_DECADE = 2, 1  # rungs


def rung(number: int) -> float:
    """1, 1.7, 3, 5.5, 10 …, from number 0; below 1 for negative ones."""
    return float(f"{('1', '1.7', '3', '5.5')[number % 4]}e{number // 4}")


def climb(run: Run, loss: Loss, stride: int = HALF_DECADE) -> Run:
    """The run at the best rate of the ladder, from its own rate on; both neighbours of the best were tried."""
    first = next(number for number in range(-32, 8) if rung(number) == run.lr)
    tried = {first: loss(run)}
    while True:
        best = min(tried, key=lambda number: tried[number])
        missing = [number for number in (best - stride, best + stride) if number not in tried]
        if not missing or len(tried) >= MOST:
            return replace(run, lr=rung(best))
        tried[missing[0]] = loss(replace(run, lr=rung(missing[0])))


def climb_finely(run: Run, loss: Loss, seeds: int) -> Run:
    """Likewise, then among the rates between, by the mean over seeds."""

    def mean_loss(tried: Run) -> float:
        return statistics.mean(loss(replace(tried, seed=seed)) for seed in range(seeds))

    return climb(climb(run, loss), mean_loss, QUARTER_DECADE)


def ceiling(trainable: str, loss: Loss, seeds: int) -> Run:
    """AdamW's: batch, schedule and rate."""
    start = Run(method="adamw", clients=1, steps=FIRST_ORDER_STEPS, lr=1e-4, trainable=trainable)
    found = [climb(replace(start, clients=clients, decay=decay), loss) for clients, decay in FIRST_ORDER]
    return climb_finely(min(found, key=loss), loss, seeds)


def loss_of(perform: Callable[[Run], dict[str, Any]]) -> Loss:
    """The validation loss that counts for a run."""
    return lambda run: final(perform(run))[1]
