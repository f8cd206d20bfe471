"""What can happen to a stage machine: past tense, plain values. The tensors themselves lie with the driver."""

from __future__ import annotations

from dataclasses import dataclass

from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.replicas import MixingStep
from peerloom.protocol.types import PeerId


@dataclass(frozen=True, slots=True)
class UpstreamOpened:
    """A node of the stage before this one opened a link."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class UpstreamLost:
    """Its link is over."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class DownstreamOpened:
    """A node of the next stage took our link and lets us send `credit` microbatches."""

    peer: PeerId
    credit: int


@dataclass(frozen=True, slots=True)
class DownstreamLost:
    """Its link is over."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class DownstreamBeat:
    """A sign of life of the next stage's node; `waiting`: it lacks a stage after it, and owes no answer meanwhile."""

    peer: PeerId
    waiting: bool


@dataclass(frozen=True, slots=True)
class CreditReceived:
    """The peer lets us send `count` more."""

    peer: PeerId
    count: int


@dataclass(frozen=True, slots=True)
class ActivationReceived:
    """A microbatch came whole, of the shape and encoding of the run; `version` of the sender's weights."""

    peer: PeerId
    microbatch: Microbatch
    version: int


@dataclass(frozen=True, slots=True)
class GradientReceived:
    """The gradient of an activation that we sent with `version` came whole; `loss` in nats a token."""

    peer: PeerId
    microbatch: Microbatch
    version: int
    loss: float


@dataclass(frozen=True, slots=True)
class ScoreReceived:
    """The loss of a held-out microbatch, which has no gradient."""

    peer: PeerId
    microbatch: Microbatch
    version: int
    loss: float


@dataclass(frozen=True, slots=True)
class AnswerSent:
    """A gradient or score has gone out to the peer: its connection has taken all of it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """The worker's forward pass is done; on the last stage with the loss, and the backward pass too."""

    microbatch: Microbatch
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class BackwardDone:
    """The worker's backward pass is done; the gradient of the input lies with the driver."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class UpdateDone:
    """The weights of version `update` + 1 stand."""

    update: int


@dataclass(frozen=True, slots=True)
class SaveWanted:
    """A checkpoint is due."""


@dataclass(frozen=True, slots=True)
class SaveDone:
    """It is written, or could not be."""


@dataclass(frozen=True, slots=True)
class MixingWanted:
    """An exchange of `round` with another host of the stage has come to a step that the weights take part in."""

    step: MixingStep
    round: int


@dataclass(frozen=True, slots=True)
class MixingDone:
    """The step is taken."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed: whoever owes an answer for too long is given up."""


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """The node is stopping: nothing new begins."""


StageEvent = (
    UpstreamOpened
    | UpstreamLost
    | DownstreamOpened
    | DownstreamLost
    | DownstreamBeat
    | CreditReceived
    | ActivationReceived
    | GradientReceived
    | ScoreReceived
    | AnswerSent
    | ForwardDone
    | BackwardDone
    | UpdateDone
    | SaveWanted
    | SaveDone
    | MixingWanted
    | MixingDone
    | Ticked
    | DrainStarted
)
