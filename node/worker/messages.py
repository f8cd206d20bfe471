"""What goes over the pipe between the daemon and its worker: small, local, trusted values; tensors never do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from peerloom.node.worker.memory import BlockLayout
from peerloom.node.worker_seams import SeedflowReady, WorkerReady, WorkerSetup
from peerloom.protocol.flood_messages import Batch
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.replicas import MixingStep
from peerloom.protocol.types import Span


@dataclass(frozen=True, slots=True)
class Start:
    """Build model and data, resume."""

    setup: WorkerSetup


@dataclass(frozen=True, slots=True)
class Train:
    """Run the local steps of `round` that lead to the fragment's exchange. `number` is Interrupt's."""

    number: int
    round: int
    fragment: int = 0
    linger_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End the local steps of the Train, or of SeedFlow's Steps, of that number after the current one. Has no reply.

    Of another one: too late, ignored. (A round has a Train for each fragment.)
    """

    number: int


@dataclass(frozen=True, slots=True)
class Take:
    """Take in these pieces of the inbox, over an edge of that weight."""

    fragment: int
    weight: float
    pieces: Span
    replace: bool


@dataclass(frozen=True, slots=True)
class Settle:
    """End the fragment's exchanges."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End the round, mixing with the inbox if `mix`."""

    mix: bool


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take the donor's state that lies in the theta region."""

    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process after the current step. Has no reply but the end of the pipe."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A stage's forward pass, as `stage_effects.RunForward`: from the inbox, or from its own data; answered by Ran."""

    microbatch: Microbatch
    version: int
    update: int | None


@dataclass(frozen=True, slots=True)
class Backward:
    """A stage's backward pass from the gradient in the inbox; answered by Ran."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class Update:
    """Train the stage's newest weights, as `stage_effects.RunUpdate`; answered by Ran."""

    update: int
    oldest: int


@dataclass(frozen=True, slots=True)
class SaveStage:
    """Write the stage's checkpoint; answered by its Path."""

    ledger: dict[int, tuple[int, list[int]]]
    lane: int


@dataclass(frozen=True, slots=True)
class Mixing:
    """One step of an exchange with another host of the stage, as `stage_effects.RunMixing`; answered by Taken."""

    step: MixingStep
    round: int


@dataclass(frozen=True, slots=True)
class Ran:
    """A command of a stage is done, in this time; its outcome lies in the outbox. `loss` only where it is known.

    `cpu_seconds` is the worker's own part of it: less where others held the core, more with several threads.
    """

    seconds: float
    loss: float | None = None
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Steps:
    """SeedFlow's local steps, each applied at once; answered by StepsTaken. `number` is Interrupt's."""

    number: int
    count: int
    first_step: int
    first_sequence: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Add messages to the sums; answered by None."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Retract:
    """Take messages out of the sums; answered by None."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class HashState:
    """Answered by 32 bytes over the sums, as they would be without these messages."""

    without: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class ExportState:
    """Write the sums into the shared memory, from its start; answered by their length in bytes."""


@dataclass(frozen=True, slots=True)
class AdoptState:
    """Take the sums that lie in the shared memory, so many bytes, in place of all there are; answered by None."""

    size: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Answered by Evaluation."""


@dataclass(frozen=True, slots=True)
class BaseNumel:
    """How many parameters the model of the configuration in this folder has; answered by int. May precede Start."""

    folder: Path


@dataclass(frozen=True, slots=True)
class WriteBase:
    """Write the base model into this folder, to be handed over; answered by None."""

    folder: Path
    weights: bool  # or what stands beside them alone


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write the sums to disk; answered by the file's Path."""

    step: int


Command = (
    Start | Train | Interrupt | Take | Settle | Finish | Adopt | Save | Stop | Forward | Backward | Update | SaveStage
    | Mixing | Steps | Apply | Retract | HashState | ExportState | AdoptState | Evaluate | SaveState
    | BaseNumel | WriteBase
)


@dataclass(frozen=True, slots=True)
class Request:
    """A command with the number its reply will carry."""

    id: int
    command: Command


@dataclass(frozen=True, slots=True)
class Started:
    """The reply to Start; `phases` are the seconds of each phase of starting, in order."""

    ready: WorkerReady | SeedflowReady
    layout: BlockLayout | None  # of the shared memory; None: not mapped
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """A command failed with an error of the user's error tree, `kind` being its class name; the worker lives on."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the request of the same number: a value of the seams, Started or Refused."""

    id: int
    value: object


@dataclass(frozen=True, slots=True)
class Progress:
    """How far starting has come."""

    what: str
    share: float


@dataclass(frozen=True, slots=True)
class Crashed:
    """The worker is about to end, for this reason."""

    message: str
