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
MUST_MOVE = {"training", "stalled"} | WAITING


async def watch_progress(facts: Facts) -> None:
    """Puts the node into "stalled" when no step comes, nor (between rounds) a transfer moves; until cancelled.

    The next step puts it back to training; peers do not pair with a stalled node meanwhile.
    """
    moved = sum(facts.bytes_moved())
    while True:
        await asyncio.sleep(LOOK_S)
        now, before, moved = facts.clock.monotonic(), moved, sum(facts.bytes_moved())
        if facts.state not in MUST_MOVE or (facts.state in WAITING and moved - before >= TRANSFER_BYTES):
            facts.pace.alive(now)
        elif reason := facts.pace.overdue(now, training=facts.state not in WAITING):
            if facts.state != "stalled":
                log.warning("%s", reason)
                facts.count("worker_stalls")
            facts.stall(reason)
