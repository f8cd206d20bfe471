"""In which order the gradients of units go to their owners, and how many at a time."""

from __future__ import annotations

from collections.abc import Sequence

from peerloom.optim.matrix_fsdp.unit import Unit


class Reductions:
    """Of one backward pass after the other: the last unit first, whatever order their gradients are complete in.

    So it is one order on all ranks, though a parameter may be used on some of them alone; a unit whose turn has not
    come keeps its gradients until then. `at_once` are under way at a time; with `announced` a unit is begun only when
    there is room for it, since others take a beginning for a sign that those before are done (see `board`), else the
    one that makes room is awaited while it is under way.
    """

    def __init__(self, units: Sequence[Unit], at_once: int, announced: bool) -> None:
        self._units, self._at_once, self._announced = units, at_once, announced
        self.forget()

    def forget(self) -> None:
        """Before a backward pass; what is under way is forgotten."""
        self._left = [unit for unit in self._units if unit.trainable]
        self._complete: set[Unit] = set()
        self._under_way: list[Unit] = []

    def complete(self, unit: Unit) -> None:
        """All gradients of a unit are there. Raises RankLost."""
        self._complete.add(unit)
        while self._left and self._left[-1] in self._complete:
            self._begin(self._left.pop())

    def end(self) -> None:
        """The backward pass is over: reduces what is left, complete or not, and awaits all. Raises RankLost."""
        while self._left:
            self._begin(self._left.pop())
        self._finish(0)

    def _begin(self, unit: Unit) -> None:
        if self._announced:
            self._finish(self._at_once - 1)
        unit.start_reduce()
        self._under_way.append(unit)
        self._finish(self._at_once)

    def _finish(self, left: int) -> None:
        while len(self._under_way) > left:
            self._under_way.pop(0).finish_reduce()
