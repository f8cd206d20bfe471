"""The `[pipeline]` table of a run spec: a model cut into stages, one after the other, each on nodes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from peerloom.protocol.spec_rules import Fault, choice, number
from peerloom.protocol.spec_table import Table

Schedule = Literal["async", "sync"]
ActivationEncoding = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec(Table):
    """Stages in a row; with "async" stage k of P trains with gradients that are P - 1 - k updates old."""

    stages: int = number(2, 1, 256, "P: parts the model is cut into; at most model.layers")
    microbatches: int = number(
        1, 1, 1024, "parts of a batch that travel one by one, an update after all of them; divides train.batch_size"
    )
    stash: bool = choice(True, "backward with the weights of the forward pass, P - k versions of them at stage k")
    schedule: Schedule = choice("async", "1F1B without a flush; sync: with one after every update, for comparison")
    encoding: ActivationEncoding = choice("bf16", "of activations and their gradients on the wire")
    eval_every: int = number(20, 1, 10**6, "updates between evaluations on held-out text")
    backup_every: int = number(50, 1, 10**6, "updates between copies of a stage's state to another node")
    standbys: int = number(1, 0, 16, "idle nodes that stand by for each stage before further ones host it too")
    heartbeat_s: float = number(2.0, 0, 600, "seconds between signs of life of neighbouring stages", open_low=True)
    dead_after_s: float = number(8.0, 0, 3600, "seconds without one after which a neighbour is given up", open_low=True)
    answer_s: float = number(
        120.0, 0, 86400, "seconds in which a stage that owes gradients must send one, or be left alone", open_low=True
    )

    def cross(self) -> Iterator[Fault]:
        if self.dead_after_s < 2 * self.heartbeat_s:
            yield Fault(
                ("dead_after_s", "heartbeat_s"),
                f"{self.dead_after_s}: must be at least two heartbeats, which are {self.heartbeat_s} s",
            )

    def lag(self, stage: int) -> int:
        """How many updates old the gradients of a stage are once the pipeline is full: P - 1 - k, or 0 with "sync"."""
        return 0 if self.schedule == "sync" else self.stages - 1 - stage

    def window(self, stage: int) -> int:
        """Microbatches that a stage may have under way: P - k batches of them; of one batch with "sync"."""
        if self.schedule == "sync":
            return min(self.microbatches, self.stages - stage)
        return (self.stages - stage) * self.microbatches
