"""What a stage machine can ask for: imperative, plain values; the driver performs them and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.replicas import MixingStep
from peerloom.protocol.types import PeerId


@dataclass(frozen=True, slots=True)
class RunForward:
    """Forward with the weights of `version`, on the last stage the backward pass at once; ends in ForwardDone.

    Its gradient counts in `update`, None for one that is only evaluated or was counted before.
    """

    microbatch: Microbatch
    version: int
    update: int | None


@dataclass(frozen=True, slots=True)
class RunBackward:
    """Backward from the gradient that came, with the weights of the forward pass; ends in BackwardDone."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """Train the newest weights with the gradients of `update`; ends in UpdateDone.

    No forward pass will ask for a version below `oldest` any more.
    """

    update: int
    oldest: int


@dataclass(frozen=True, slots=True)
class RunSave:
    """Write a checkpoint of the newest weights, which have been trained on what `ledger` lists; ends in SaveDone."""

    ledger: dict[int, tuple[int, list[int]]] = field(hash=False)


@dataclass(frozen=True, slots=True)
class RunMixing:
    """Propose the newest weights to another host of the stage, or mix them; ends in MixingDone."""

    step: MixingStep
    round: int


@dataclass(frozen=True, slots=True)
class KeepActivation:
    """The activation that has just come is taken: its bytes are for the RunForward to come, or until Forget."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class KeepGradient:
    """The gradient that has just come from `peer` is taken: its bytes are for the RunBackward to come."""

    peer: PeerId
    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send what the forward pass gave to a node of the next stage."""

    peer: PeerId
    microbatch: Microbatch
    version: int


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Answer an activation with the gradient of it, which is kept until Forget."""

    peer: PeerId
    microbatch: Microbatch
    version: int
    loss: float


@dataclass(frozen=True, slots=True)
class SendScore:
    """Answer a held-out activation with its loss."""

    peer: PeerId
    microbatch: Microbatch
    version: int
    loss: float


@dataclass(frozen=True, slots=True)
class SendCredit:
    """Let a node of the stage before send `count` more."""

    peer: PeerId
    count: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all tensors of a microbatch."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class Blame:
    """A peer broke the protocol, or never answered: score `fault` and end its links."""

    peer: PeerId
    fault: str
    detail: str


@dataclass(frozen=True, slots=True)
class ReportTrained:
    """Update `update` was made, from microbatches of this mean loss."""

    update: int
    loss: float


@dataclass(frozen=True, slots=True)
class ReportHeldOut:
    """The held-out loss of an evaluation is whole."""

    loss: float


StageEffect = (
    RunForward
    | RunBackward
    | RunUpdate
    | RunSave
    | RunMixing
    | KeepActivation
    | KeepGradient
    | SendActivation
    | SendGradient
    | SendScore
    | SendCredit
    | Forget
    | Blame
    | ReportTrained
    | ReportHeldOut
)
