"""What one neighbour may ask of this node, and what it may send in vain: token buckets, kept by peer.

A new message costs its sender nothing here; its origin has a rate of its own. All else is paid for: messages asked for,
messages that bring nothing new, version vectors and questions for hashes. The sizes are such that an honest neighbour
never meets them. It passes a message on once a link, so that what it sends in vain is within what all origins together
may send; it asks for what it lacks, which is as much, and for a page again that it could not take; and it compares when
a link comes up, five seconds apart at least, and every 30 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from peerloom.protocol.flood_messages import Batch
from peerloom.protocol.limits import MAX_PAGE
from peerloom.protocol.spec_seedflow import SeedflowSpec

Kind = Literal["wants", "repeats", "talk"]
Verdict = Literal["within", "over", "blatant"]

SEGMENT_COST = 8  # of a segment beside its messages: it is looked up, hashed and compared
WANT_COST = 16  # of a want beside what it is given; a refused message of wants costs a page as well
PROOF_COST = 64  # of a proof that is known, or an answer that nobody asked for
TALK_PER_S = 1.0  # a version vector, or a link that comes up
TALK_BURST = 128
HASH_COST = 4  # of a question for a state hash, in version vectors
LEAST_ORIGINS = 16  # counted even where fewer are known: a newcomer knows none
LEAST_PAGES = 16  # of messages, at once
MARGIN = 2


@dataclass(slots=True)
class Tokens:
    """A bucket that may be overdrawn: what is refused is owed as well, so that who goes on and on is blatant."""

    left: float = math.inf  # full, whatever its size turns out to be
    at: float = 0.0

    def take(self, cost: float, now: float, rate: float, burst: float) -> Verdict:
        """Takes `cost`: within while anything is left, blatant once another `burst` is owed."""
        self.left = min(burst, self.left + rate * max(0.0, now - self.at))
        self.at = now
        within = self.left > 0
        self.left -= cost
        if within:
            return "within"
        return "blatant" if self.left <= -burst else "over"


@dataclass(slots=True)
class Pace:
    """One peer's buckets; they outlast its links."""

    wants: Tokens = field(default_factory=Tokens)
    repeats: Tokens = field(default_factory=Tokens)
    talk: Tokens = field(default_factory=Tokens)

    def take(self, kind: Kind, cost: float, now: float, spec: SeedflowSpec, origins: int) -> Verdict:
        """`origins` are known to this node."""
        if kind == "talk":
            return self.talk.take(cost, now, TALK_PER_S, TALK_BURST)
        bucket = self.wants if kind == "wants" else self.repeats
        return bucket.take(cost, now, *allowed(spec, origins))


def allowed(spec: SeedflowSpec, origins: int) -> tuple[float, float]:
    """(a second, at once) of messages that a neighbour may be given, or send in vain.

    Live messages come a flush a segment, a backlog merged.
    """
    origins = max(origins, LEAST_ORIGINS)
    live = spec.rate_limit * origins * (1 + SEGMENT_COST / spec.flush_steps)
    return MAX_PAGE + MARGIN * live, LEAST_PAGES * MAX_PAGE + MARGIN * spec.rate_burst * origins


def cost_of(batch: Batch) -> int:
    """Of a segment that brings nothing new."""
    return SEGMENT_COST + len(batch.scalars)
