"""The inner learning rate as a function of the step."""

from __future__ import annotations

import math

from peerloom.protocol.runspec import TrainSpec

REWARM_STEPS = 20  # fresh AdamW moments after an adoption: full-sized steps at once would throw a trained model off


def learning_rate(step: int, train: TrainSpec, *, adopted_at: int | None = None) -> float:
    """Linear warm-up, cosine to the floor at `total_steps`, constant after it.

    For the first min(warmup_steps, REWARM_STEPS) steps after a donor's state was adopted at step `adopted_at`, the rate
    rises again, linearly, to where it would be.
    """
    floor = train.learning_rate * train.min_lr_ratio
    if step < train.warmup_steps:
        rate = train.learning_rate * (step + 1) / train.warmup_steps
    else:
        span = max(1, train.total_steps - train.warmup_steps)
        share = min(1.0, (step - train.warmup_steps) / span)
        rate = floor + (train.learning_rate - floor) * 0.5 * (1.0 + math.cos(math.pi * share))
    if adopted_at is None:
        return rate
    rewarm = min(train.warmup_steps, REWARM_STEPS)
    return rate * min(1.0, (step - adopted_at + 1) / rewarm) if rewarm else rate
