"""Which microbatches and versions a node of the stage before may come with over one link."""

from __future__ import annotations

from peerloom.protocol.ledger import MAX_LANES, Microbatch

REACH = 1 << 16  # between two activations of a link: what all other hosts do while this one owes an answer, and more


class LinkWindow:
    """Takes a link's activations one by one; `indices` is how many a lane has in a run that ends.

    Both numbers are the sender's, and what its other neighbours do meanwhile shows in neither: a lane's microbatches
    may go to other hosts of this stage, and several lanes, of which not all come here, make up the sender's updates. So
    the first activation of a link may have any number, and later ones are held to those before; older ones may be run
    again at any time.
    """

    def __init__(self, indices: int | None) -> None:
        self._indices = indices
        self._newest: int | None = None  # version
        self._highest: dict[tuple[int, bool], int] = {}  # by lane, held-out ones apart; the newest last

    def refusal(self, microbatch: Microbatch, version: int) -> str | None:
        """Why an activation is out of the window; None once it is taken."""
        newest = version if self._newest is None else self._newest
        if abs(version - newest) > REACH:
            return f"{microbatch} came with version {version}, more than {REACH} from version {newest} before it"
        if self._indices is not None and not microbatch.held_out and microbatch.index >= self._indices:
            return f"{microbatch} came, and a lane of this run has {self._indices}"
        lane = (microbatch.lane, microbatch.held_out)
        highest = self._highest.get(lane, microbatch.index)
        if microbatch.index > highest + REACH:
            return f"{microbatch} came, more than {REACH} after {highest}, the last of its lane"
        self._newest = max(newest, version)
        self._highest.pop(lane, None)
        self._highest[lane] = max(highest, microbatch.index)
        if len(self._highest) > MAX_LANES:
            del self._highest[next(iter(self._highest))]
        return None
