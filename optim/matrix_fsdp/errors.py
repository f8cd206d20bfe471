"""What can go wrong between the ranks of one sharded model."""

from __future__ import annotations


class ShardingError(ValueError):
    """A model, plan or setting that cannot be sharded: one sentence, the same on every rank, no weight touched."""


class RankLost(RuntimeError):
    """Ranks of the default group no longer answer: it is broken and has to be started again.

    `ranks` is empty where all still answer and only a connection between them has failed.
    """

    def __init__(self, ranks: tuple[int, ...], what: str, cause: str) -> None:
        listed = ", ".join(map(str, ranks))
        named = f"rank{'s' if len(ranks) > 1 else ''} {listed}" if ranks else "another rank"
        super().__init__(f"{named} did not answer in {what}: start the group again from the last checkpoint ({cause})")
        self.ranks = ranks
