"""The RunSpec's table of SeedFlow: the estimator, the fixed point of scalars, and the limits of flooding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from peerloom.protocol.limits import MAX_FLOOD_ORIGINS
from peerloom.protocol.spec_rules import Fault, choice, number, text
from peerloom.protocol.spec_table import Table

MAX_PERIODS = 4096  # subspaces that a run may open, an accumulator a matrix each
MAX_SCALAR = 2**31 - 1  # what a message's scalar may be on the wire
MAX_SUM = 2**63 - 1  # what an accumulator holds
NORMAL_LIMIT = 1107  # the largest number of a small tensor's direction, in units of 2^-8: a scalar is multiplied by it


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedflowSpec(Table):
    """SeedFlow (SeedFlood with SubCGE): a scalar a local step, flooded to all."""

    version: int = number(
        4, 4, 4, "of what a message means and its origin signs; those before were drawn or signed otherwise"
    )
    rank: int = number(
        32,
        1,
        1024,
        "r: columns of a matrix's shared factors U and V. A period's messages share r^2 directions: their mean is\n"
        "1 + clients * period / r^2 times as noisy as with one each. A node keeps 8 * r^2 bytes a matrix and period",
    )
    period: int = number(1000, 1, 10**7, "T: steps after which new factors are drawn")
    eps: float = number(1e-3, 0, 10, "the two points are theta + eps z and theta - eps z", open_low=True)
    learning_rate: float = number(1e-4, 0, 10, "at the first step", open_low=True)
    decay: Literal["none", "linear"] = choice(
        "none", "linear: the learning rate falls to 0 at max_steps; scalars carry it, and all messages weigh alike"
    )
    clients: int = number(16, 1, 2**16, "a message weighs learning_rate / clients, however many nodes are there")
    scalar_bound: float = number(
        256.0,
        0,
        2**31,
        "largest size of a message's scalar; the origin clips. Fine-tuning wants 1, with decay = \"linear\" and "
        "period = 100:\nearly slopes are ten times later ones, and clipping them is what allows a high learning_rate",
        open_low=True,
    )
    fraction_bits: int = number(12, 0, 30, "scalars are rounded to whole multiples of 2^-fraction_bits")
    max_steps: int = number(5000, 1, 10**9, "local steps of a node; the run is done at the last one")
    flush_steps: int = number(5, 1, 1024, "local steps between two sends")
    neighbours: int = number(4, 2, 64, "overlay links of a node, on average: a ring, and random chords beyond 2")
    trainable: str = text("", "regular expression of the names of parameters to train; empty: all", empty=True)
    eval_every_steps: int = number(100, 1, 10**9, "local steps between two evaluations")
    rate_limit: float = number(100.0, 0, 10**9, "messages a second that are taken of one origin", open_low=True)
    rate_burst: int = number(5000, 1, 10**9, "and as many at once; at least flush_steps")
    max_periods_ahead: int = number(2, 1, 10**6, "periods that a message may be past the latest one taken")

    def scalar_limit(self) -> int:
        """The largest size of a scalar, in units of 2^-fraction_bits."""
        return int(self.scalar_bound * 2**self.fraction_bits)

    def rate_share(self, step: int) -> float:
        """Of the learning rate, at a node's local step."""
        return max(0.0, 1 - step / self.max_steps) if self.decay == "linear" else 1.0

    def periods(self) -> int:
        """How many subspaces the run opens."""
        return -(-self.max_steps // self.period)

    def cross(self) -> Iterator[Fault]:
        limit = self.scalar_limit()
        if not 1 <= limit <= MAX_SCALAR:
            yield Fault(
                ("scalar_bound", "fraction_bits"),
                f"{self.scalar_bound}: scalar_bound * 2^fraction_bits must be from 1 to {MAX_SCALAR}",
            )
        elif limit * NORMAL_LIMIT * self.max_steps * MAX_FLOOD_ORIGINS > MAX_SUM:  # all of all origins in one element
            most = MAX_SUM // (limit * NORMAL_LIMIT * MAX_FLOOD_ORIGINS)
            yield Fault(
                ("max_steps", "scalar_bound", "fraction_bits"),
                f"{self.max_steps}: must be at most {most} with these scalars, or sums could pass 64 bits",
            )
        if self.periods() > MAX_PERIODS:
            least = -(-self.max_steps // MAX_PERIODS)
            yield Fault(
                ("period", "max_steps"), f"{self.period}: must be at least {least} with max_steps = {self.max_steps}"
            )
        if self.rate_burst < self.flush_steps:
            yield Fault(
                ("rate_burst", "flush_steps"),
                f"{self.rate_burst}: must be at least flush_steps, which is {self.flush_steps}",
            )
        try:
            re.compile(self.trainable)
        except re.error as error:
            yield Fault(("trainable",), f"{self.trainable!r}: must be a regular expression; {error}")


def for_fine_tuning(clients: int, plain: SeedflowSpec) -> SeedflowSpec:
    """`plain` with what was best where a pre-trained model was fine-tuned; one client stands for an unknown number.

    `python -m tests.benchmarks.seedflow_report` has the runs: clipped slopes, a falling rate and periods of 100. The
    learning rate is left as it is: it hangs on how much is trained (one layer of SmolLM2-135M took 1e-2 with 16
    clients, 3e-3 with one). The rank is left too: 128 was no better than 32 for that layer, and sums are 8 rank^2 bytes
    a matrix and period, for all of a model more than the model.
    """
    weighed = clients if clients > 1 else plain.clients
    return replace(plain, period=100, decay="linear", scalar_bound=1.0, clients=weighed)
