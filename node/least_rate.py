"""A transfer that comes piece by piece is no slower than LEAST_RATE over the whole: it could last for weeks."""

from __future__ import annotations

import asyncio

from peerloom.protocol.errors import LinkError
from peerloom.protocol.limits import LEAST_RATE


def left_s(began: float, received: int, stall_s: float) -> float:
    """How long the next piece may take, at most `stall_s`; `began` is the loop's time, `received` the bytes since.

    Raises LinkError for one that has been slower.
    """
    left = began + stall_s + received / LEAST_RATE - asyncio.get_running_loop().time()
    if left <= 0:
        raise LinkError(f"slower than {LEAST_RATE // 1024} KiB/s over the whole transfer")
    return min(stall_s, left)
