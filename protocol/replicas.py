"""Several hosts of one pipeline stage: what of GASLoC holds among them, and what keeps stages apart."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Literal

from peerloom.protocol.runspec import RunSpec

ANY_SKEW = 10**6  # a host makes its updates as microbatches reach it: one behind in number is not behind in training

MixingStep = Literal[
    "propose",  # y of the newest weights is to be sent
    "mix",  # the partner's has come
    "alone",  # nobody was there
    "drop",  # nobody else hosts the stage any more: as if it had never been proposed
]


def replica_spec(spec: RunSpec) -> RunSpec:
    """The run as the hosts of one stage exchange in it: one partner by rendezvous, beneath the updates that go on."""
    gasloc = replace(spec.gasloc, overlap=True, max_round_skew=ANY_SKEW)
    return replace(spec, gasloc=gasloc)


def replica_layout(stage: int, layout: str) -> str:
    """The layout that a host's offers name, in hex: of the stage too, so that no two stages' weights are ever mixed."""
    return sha256(f"peerloom-replica-v1:{stage}:{layout}".encode()).hexdigest()
