"""The machine's own clock."""

from __future__ import annotations

import time


class SystemClock:
    """`seams.Clock` on the operating system's clocks; asyncio loops, uvloop's too, run on the same monotonic one."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start, never jumping."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix time in seconds."""
        return time.time()
