"""What the first stage of a pipeline draws: microbatches of its lane, in order, and now and then held-out ones."""

from __future__ import annotations

from collections import deque

from peerloom.protocol.ledger import Ledger, Microbatch


class StageSource:
    """Numbers the microbatches of a lane, those that `ledger` lists left out; evaluates `held_out` at a time."""

    def __init__(self, lane: int, ledger: Ledger, held_out: int) -> None:
        self._lane, self._ledger, self._held_out = lane, ledger, held_out
        self._index = ledger.first_missing(lane)
        self._evaluations = 0
        self._to_evaluate: deque[Microbatch] = deque()
        self.evaluate()

    def evaluate(self) -> None:
        """Puts a whole evaluation in line."""
        start = self._evaluations * self._held_out
        self._evaluations += 1
        self._to_evaluate.extend(Microbatch(self._lane, start + index, True) for index in range(self._held_out))

    def next_held_out(self) -> Microbatch | None:
        """The next one to evaluate, None when none is in line."""
        return self._to_evaluate.popleft() if self._to_evaluate else None

    def next_counted(self) -> Microbatch:
        """The next one to train on."""
        while (microbatch := Microbatch(self._lane, self._index)) in self._ledger:
            self._index += 1
        self._index += 1
        return microbatch
