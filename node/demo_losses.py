"""The nodes' held-out losses by round, as a watch of the swarm shows them: what says whether they agree.

Each node's last loss was measured when it was: on a machine whose cores are taken one may lie many rounds behind
another's, and the model learnt in between. So nodes of GASLoC, which train a model each, are compared where all
measured after the same round; those of a pipeline measure one model together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from peerloom.protocol.types import NodeStatus, PeerId


@dataclass(slots=True)
class LossesByRound:
    """Takes each look at the swarm. Trainers measure after every `every`-th round, 1 or more."""

    every: int = 1
    _last: dict[PeerId, float] = field(default_factory=dict)
    _found: defaultdict[PeerId, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))

    def observe(self, statuses: Iterable[NodeStatus]) -> None:
        """A loss that is new was measured after the last round that is due one."""
        for record in (status.record for status in statuses if status.record.role == "trainer"):
            if record.loss is not None and record.loss != self._last.get(record.peer_id):
                self._last[record.peer_id] = record.loss
                self._found[record.peer_id][record.round - record.round % self.every] = record.loss

    def at_one_round(self) -> list[float]:
        """The losses of all nodes after the last round after which all were seen; each one's last if that is long ago.

        It is if the newest loss comes from a round twice as late: then a node has stopped, and is not excused.
        """
        seen = [set(losses) for losses in self._found.values()]
        if not seen:
            return []
        common = max(set.intersection(*seen), default=-1)
        if 2 * common < max(set.union(*seen)):
            return self.last()
        return [losses[common] for losses in self._found.values()]

    def last(self) -> list[float]:
        """Each node's last loss."""
        return list(self._last.values())
