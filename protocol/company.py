"""Fresh company: what keeps two nodes of one speed from meeting each other for ever.

Two partners end their exchange together, so they train side by side and reach the next exchange point together, before
anybody else: left alone, the same pairs meet in every round and the swarm falls apart into couples (seen with four
equal nodes). So when a couple has met `STREAKS` times running, each looks for somebody else first, for a random part of
the time a round takes; equal nodes fall into step after one such pause, and then meet at random. The pauses come at
doubling streaks, so that two fast nodes among slow ones lose less and less to them.

Nor do two stay together whose exchange took longer than their local steps, over a slow link: out of step with the rest
by then, they would meet in the next round too, and the next, and it would always be the same node that waits.
"""

from __future__ import annotations

import random
from collections.abc import Set

from peerloom.protocol.types import PeerId

STREAKS = frozenset(2**k for k in range(1, 31))
LEAST_SHARE, MOST_SHARE = 0.3, 1.0  # of the seconds that the local steps took


class Company:
    """Remembers the last partner and for how many rounds it has been the only one; `longest_s` bounds a pause."""

    def __init__(self, rng: random.Random, longest_s: float) -> None:
        self._rng = rng
        self._longest_s = longest_s
        self._last: PeerId | None = None
        self._streak = 0
        self._slow = False

    def met(self, peer: PeerId, *, slow: bool = False) -> None:
        """An exchange was committed; `slow`: it took longer than the local steps."""
        self._slow = slow
        self._streak = self._streak + 1 if peer == self._last else 1
        self._last = peer

    def to_avoid(self, present: Set[PeerId], trained_s: float) -> tuple[PeerId, float] | None:
        """The partner to leave aside and for how many seconds; None when any will do, or nobody else is present."""
        last = self._last
        if last is None or not (self._slow or self._streak in STREAKS) or not present - {last}:
            return None
        share = self._rng.uniform(LEAST_SHARE, MOST_SHARE)
        return last, min(share * trained_s, self._longest_s)
