"""The messages of Stage.Run, as plain values; `codec_stage.py` turns them to and from protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.messages import Chunk, PayloadEnd
from peerloom.protocol.spec_pipeline import ActivationEncoding

Purpose = Literal[
    "run",  # activations to the stage, gradients from it
    "keep",  # leave a copy of the stage's state
    "fetch",  # get one
]


@dataclass(frozen=True, slots=True)
class StageOpen:
    """Opens a stream about `stage`."""

    purpose: Purpose
    stage: int


@dataclass(frozen=True, slots=True)
class StageOpened:
    """The stream is taken."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Announces an activation; chunks and a PayloadEnd follow. `version` is of the weights that made it."""

    microbatch: Microbatch
    version: int
    shape: tuple[int, ...]
    encoding: ActivationEncoding


@dataclass(frozen=True, slots=True)
class Gradient:
    """Announces the gradient of an activation, whose version it repeats; `loss` in nats a token."""

    microbatch: Microbatch
    version: int
    shape: tuple[int, ...]
    encoding: ActivationEncoding
    loss: float


@dataclass(frozen=True, slots=True)
class Score:
    """The loss of a held-out activation."""

    microbatch: Microbatch
    version: int
    loss: float


@dataclass(frozen=True, slots=True)
class Credit:
    """`count` microbatches more may be sent."""

    count: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life; `waiting` for a stage after the sender's."""

    waiting: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Announces a stage's checkpoint of `update`: `files` by name and bytes, which follow one after the other."""

    stage: int
    update: int
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """The copy is whole, verified and on the disk."""


StageMessage = (
    StageOpen | StageOpened | Activation | Gradient | Chunk | PayloadEnd | Score | Credit | Beat | Copy | Kept
)
