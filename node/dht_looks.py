"""How many nodes a find asks: each answers with all that it holds, every record of the run, so that asking costs most.

A record stands with the REPLICAS nodes nearest to its key, and one of them is enough. But who is nearest is each node's
own opinion, most of all where some cannot be dialled by others. So one find in a while asks all, and if that brings
records which the few did not have, the next ones do so more often.
"""

from __future__ import annotations

from collections.abc import Set

FEW = 2  # asked, the nearest; one where this node is among those who store the record itself
ALL = 20  # hivemind's bucket size: as many as a find asks of itself
OFTEN, SELDOM = 3, 24  # of how many finds one asks all


class Looks:
    """The finds of one key, in order: `ask()`, then `found()` with what came."""

    def __init__(self) -> None:
        self._every, self._until_all = OFTEN, 0
        self._few: Set[str] = frozenset()  # what the finds since the last that asked all have brought

    def ask(self, *, stored_here: bool) -> int:
        """How many other nodes the next find asks."""
        return (FEW - stored_here) if self._until_all else ALL

    def found(self, subkeys: Set[str]) -> None:
        """Takes note of what it brought."""
        if self._until_all:
            self._until_all -= 1
            self._few = self._few | subkeys
            return
        known, self._few = self._few, frozenset()
        self._every = OFTEN if subkeys - known else min(4 * self._every, SELDOM)
        self._until_all = self._every
