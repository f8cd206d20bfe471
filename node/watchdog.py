"""Notices a training process that lives but makes no step, and says so in the node's state."""

from __future__ import annotations

import asyncio
import logging

from peerloom.node.facts import Facts
from peerloom.protocol.limits import LEAST_RATE

log = logging.getLogger(__name__)

LOOK_S = 5.0
TRANSFER_BYTES = LEAST_RATE * LOOK_S / 2  # in that time a transfer moves more, and offers and questions less
WAITING = {"seeking", "exchanging"}


async def watch_progress(facts: Facts, *, in_rounds: bool) -> None:
    """Puts the node into "stalled" when no step comes for long; until cancelled.

    With `in_rounds` the worker tells of its steps from its first one on, and no wait between them is for ever: there a
    transfer that moves is the sign of life. Other methods are watched once steps were seen, in "training" alone. A
    state that has a reason for not training is no stall. The next step puts the node back to training; peers do not
    pair with it meanwhile.
    """
    moved, step, looked_at = sum(facts.bytes_moved()), facts.step, facts.clock.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        now = facts.clock.monotonic()
        before, moved = moved, sum(facts.bytes_moved())
        _see_steps(facts, facts.step - step, now, now - looked_at)
        step, looked_at = facts.step, now
        if facts.state in WAITING and in_rounds:
            expected, alive = True, moved - before >= TRANSFER_BYTES
        else:
            expected, alive = _must_step(facts, in_rounds), False
        if alive or not expected:
            facts.pace.alive(now)
        elif reason := facts.pace.overdue(now, training=facts.state not in WAITING):
            if facts.state != "stalled":
                log.warning("%s", reason)
                facts.count("worker_stalls")
            facts.stall(reason)


def _must_step(facts: Facts, in_rounds: bool) -> bool:
    if facts.state == "stalled":
        return True
    return facts.state == "training" and not facts.reason and (in_rounds or facts.pace.usual_s is not None)


def _see_steps(facts: Facts, taken: int, now: float, seconds: float) -> None:
    """Steps that stand in the node's own figures, where its worker tells of none."""
    if taken <= 0:
        return
    if facts.state == "stalled":
        facts.enter("training")
    facts.pace.alive(now)
    if not facts.tells_steps:
        facts.pace.measured(seconds / taken)
