"""Which microbatches a stage has trained on: what keeps one that is run again from counting twice."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LANES = 4096  # first-stage nodes that one stage remembers; the least recently heard of goes first
MAX_AHEAD = 4096  # indices that one lane may be ahead of its first gap


@dataclass(frozen=True, slots=True, order=True)
class Microbatch:
    """One microbatch of the run: `index` counts up within a lane, `lane` being one first-stage node's own sequence.

    `held_out` ones are only evaluated, and are numbered apart.
    """

    lane: int
    index: int
    held_out: bool = False

    def __str__(self) -> str:
        return f"{'held-out ' if self.held_out else ''}microbatch {self.lane}/{self.index}"


@dataclass(slots=True)
class _Lane:
    below: int = 0  # all indices under it are in
    ahead: set[int] = field(default_factory=set)


class Ledger:
    """A set of microbatches that stays small because each lane fills up nearly in order."""

    def __init__(self, entries: dict[int, tuple[int, list[int]]] | None = None) -> None:
        self._lanes = {lane: _Lane(below, set(ahead)) for lane, (below, ahead) in (entries or {}).items()}

    def __contains__(self, microbatch: Microbatch) -> bool:
        lane = self._lanes.get(microbatch.lane)
        return lane is not None and (microbatch.index < lane.below or microbatch.index in lane.ahead)

    def add(self, microbatch: Microbatch) -> None:
        """Takes one in."""
        lane = self._lanes.pop(microbatch.lane, None) or _Lane()
        self._lanes[microbatch.lane] = lane  # the newest last
        if microbatch.index >= lane.below:
            lane.ahead.add(microbatch.index)
        if len(lane.ahead) > MAX_AHEAD:  # gaps that nobody will ever fill: their lane began elsewhere
            lane.below = min(lane.ahead)
        while lane.below in lane.ahead:
            lane.ahead.remove(lane.below)
            lane.below += 1
        if len(self._lanes) > MAX_LANES:
            del self._lanes[next(iter(self._lanes))]

    def first_missing(self, lane: int) -> int:
        """The lowest index of a lane that is not in."""
        found = self._lanes.get(lane)
        return found.below if found is not None else 0

    def entries(self) -> dict[int, tuple[int, list[int]]]:
        """By lane: all below the first number are in, and those of the list; what the constructor takes."""
        return {number: (lane.below, sorted(lane.ahead)) for number, lane in self._lanes.items()}
