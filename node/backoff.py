"""How long a peer that could not be reached is left alone: exponential, with jitter, capped."""

from __future__ import annotations

import random

from peerloom.protocol.errors import LinkError

BASE_S = 0.5  # after the first failure
CAP_S = 30.0  # a record's life: after it the peer has been seen anew, or is gone
FACTOR = 2.0


def delay_s(failures: int, rng: random.Random) -> float:
    """Seconds to wait after that many failures in a row: half of the exponential for sure, half at random."""
    whole = min(CAP_S, BASE_S * FACTOR ** min(failures - 1, 16))
    return whole * (0.5 + 0.5 * rng.random())


class Backoff:
    """One peer's failures in a row."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures = 0
        self._until = 0.0
        self._reason = ""

    def check(self, now: float) -> None:
        """Raises LinkError with the last reason while the peer is left alone."""
        if self._failures and now < self._until:
            raise LinkError(f"left alone for {self._until - now:.1f} s more after: {self._reason}")

    def due(self, now: float) -> bool:
        """Whether it is time to try."""
        return not self._failures or now >= self._until

    def failed(self, now: float, reason: str) -> None:
        """Counts a failure."""
        self._failures += 1
        self._until = now + delay_s(self._failures, self._rng)
        self._reason = reason

    def reset(self) -> None:
        """The peer answered."""
        self._failures = 0
