"""One time limit for several waits in a row."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic

_LEAST = timedelta(milliseconds=1)  # what is there already is found even after the end


class Deadline:
    """Ends `within` a time from now."""

    def __init__(self, within: timedelta) -> None:
        self._end = monotonic() + within.total_seconds()

    @property
    def left(self) -> timedelta:
        """What is left, a millisecond at least."""
        return max(timedelta(seconds=self._end - monotonic()), _LEAST)
