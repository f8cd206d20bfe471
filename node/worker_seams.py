"""The seam to the worker that trains, as Protocols, and what goes over it: rounds, stages, SeedFlow's steps.

As in seams.py each has a real implementation (worker.port) and one in memory (memory_worker).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from peerloom.protocol.flood_messages import Batch
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerId, Span

A = TypeVar("A")

FIRST_STEP = "first step"  # what `progress` is told when the first optimizer step of a worker is done
STEPS = "steps"  # and while it trains, about once a second, with the number of steps in this life


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """All a worker needs to build its model and data."""

    spec: RunSpec
    peer_id: PeerId
    run_dir: Path  # the node's folder of this run: checkpoints/, cursor
    cache_dir: Path  # tokenized data, shared by runs
    data_source: str = ""  # instead of spec.data.source, which it does not change; "": as the spec says
    keep_checkpoints: int = 3  # the newest ones
    device: str = "cpu"  # "auto", "cpu", "cuda", "cuda:1"
    devices: tuple[str, ...] = ()  # of a node that shards its model, one a rank, instead of `device`
    threads: int = 0  # torch CPU threads; 0: torch's own choice
    nice: int = 0  # how far the training steps back for other programs, 19 at most
    stage: int = 0  # of a pipeline
    lost_s: float = 60.0  # of several ranks, one that says nothing for so long while others wait for it is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """The model is built; parameters and buffers lie in shared memory.

    `resumed` is True when an intact checkpoint was loaded; `note` says what was skipped, if anything was.
    """

    init_digest: str
    layout_digest: str
    numel: int
    payload_bytes: int  # of one encoded proposal
    round: int
    step: int
    tokens: int
    held_out_loss: float | None
    resumed: bool
    note: str = ""
    sketch: tuple[float, ...] = ()
    piece_bytes: tuple[int, ...] = ()  # of payload_bytes, piece by piece, as many a fragment; (): one
    replica_bytes: int = 0  # of a stage's encoded weights
    pipeline: dict[str, Any] | None = None  # a stage's, from its checkpoint: see checkpoint_meta.Meta
    owners: str = ""  # which of several ranks holds how much, as a table


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrained:
    """The local steps of a round, or those up to a fragment's exchange, are done: y is encoded in the outbox.

    `step` and `tokens` are cumulative; the round drew batches `first_batch` to `first_batch + batches - 1`.
    """

    round: int
    step: int
    tokens: int
    first_batch: int
    batches: int
    seconds: float
    train_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFinished:
    """theta of the next round stands; `held_out_loss` is None when this round is not evaluated.

    `share` is 1, or how much nearer the partner would have had to be to count whole; `far_off`: so much that it is to
    blame. `sketch` is theta's random projection. `beneath_s` is what the next round's local steps, that ran beneath the
    exchange, took.
    """

    round: int  # the next one
    held_out_loss: float | None
    share: float = 1.0
    far_off: bool = False
    sketch: tuple[float, ...] = ()
    beneath_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """How an exchange of several was taken in; as in RoundFinished."""

    share: float = 1.0
    far_off: bool = False


class WorkerDied(Exception):
    """The worker process ended or stopped answering; the message says how (exit code, signal, last stderr line)."""


class ExchangePort(Protocol):
    """What an exchange needs of a worker: the proposals, and an end to local steps for a partner who waits."""

    async def interrupt(self) -> None:
        """Ends the local steps under way after the current one; train() returns with fewer steps."""
        ...

    def outbox(self, pieces: Span = (0, 1)) -> memoryview:
        """These pieces of the encoded proposal, read-only, valid from train()'s return to take() or finish()."""
        ...

    def inbox(self, pieces: Span = (0, 1)) -> memoryview:
        """Where these pieces of a partner's encoded proposal go, same length."""
        ...


class WorkerPort(ExchangePort, Protocol):
    """The training process, from the daemon's side. All calls raise WorkerDied when it dies."""

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> WorkerReady:
        """Builds model and data, resumes the newest intact checkpoint; `progress(what, share)` while it does.

        `progress(FIRST_STEP, 1.0)` comes later: once, after the first optimizer step of this worker's life; then
        `progress(STEPS, count)` while local steps are taken: what a watchdog goes by.
        """
        ...

    async def train(self, round: int, fragment: int = 0, linger_s: float = 0.0) -> RoundTrained:
        """Runs the local steps of `round` that lead to the fragment's exchange, and prepares its proposal.

        With `round_s`, more steps follow for `linger_s`, or until interrupt(): a partner is being sought meanwhile.

        With overlap it may be called while the round before is at its exchange, and then waits for its finish(), at the
        latest before it proposes.
        """
        ...

    async def ask(self, command: Any, answer: type[A]) -> A:
        """Carries out a command of the spec's method, of which `answer` is the answer's type."""
        ...

    async def take(self, fragment: int, weight: float, pieces: Span, replace: bool) -> Taken:
        """Takes in these pieces of the inbox, over an edge of that weight; more may follow.

        In a group they are averaged with the node's own, or `replace` them, and the outbox then holds the outcome, to
        be sent on.
        """
        ...

    async def settle(self, fragment: int) -> Taken:
        """Ends the fragment's exchanges, all but the round's last one's: it goes on from what was taken."""
        ...

    async def finish(self, mix: bool) -> RoundFinished:
        """Ends the round, mixing the last fragment with the inbox if `mix`; evaluates when due.

        With overlap, between two local steps of the next round if that is under way, which goes on with what changed.

        Fragments whose turn has not come are proposed to nobody.
        """
        ...

    def theta(self) -> memoryview:
        """The round's start point, fp32 bytes: constant while a round trains and exchanges."""
        ...

    async def adopt(self, round: int, step: int, theta: memoryview) -> RoundFinished:
        """Takes a donor's state: theta, y_prev = theta, fresh inner moments; evaluates."""
        ...

    async def save(self) -> Path:
        """Writes a checkpoint of the last finished round; raises StorageError when the disk refuses."""
        ...

    def kill(self) -> None:
        """Ends the process by force; the call under way and later ones raise WorkerDied."""
        ...

    async def stop(self) -> None:
        """Ends the process and frees the shared memory."""
        ...


class StagePort(WorkerPort, Protocol):
    """A pipeline stage's worker: inbox and outbox hold activations and their gradients; weights lie beside them."""

    def proposal(self) -> memoryview:
        """The stage's encoded weights for another host of it, read-only, from a "propose" to its "mix" or "alone"."""
        ...

    def partner(self) -> memoryview:
        """Where that host's go, same length."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedflowReady:
    """The base model is built; its state counts no message yet, whatever was trained before.

    `state_bytes_max`: what an exported state of this run can have at most; a larger one is a lie.
    """

    init_digest: str  # of the base model's parameters
    layout_digest: str
    numel: int
    state_bytes_max: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsTaken:
    """Local steps are done, fewer than asked for when interrupted; each scalar is part of the state already."""

    scalars: tuple[int, ...]
    tokens: int  # of these steps
    seconds: float
    train_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out figures of the state as it is; accuracy is None where the task has none."""

    loss: float
    accuracy: float | None


class SeedflowPort(Protocol):
    """The training process of SeedFlow, from the daemon's side. All calls raise WorkerDied when it dies.

    Its state is a sum of messages, in integers, over the base model: each is added once and may be taken out again.
    Calls are made one after the other, save interrupt() and kill().
    """

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> SeedflowReady:
        """Builds the base model and the data; `progress(what, share)` while it does, and FIRST_STEP later, once.

        Raises BaseMissing when the base cannot be had here; may be called again once it lies in the run's folder, as
        base_folder.py says.
        """
        ...

    async def base_numel(self, folder: Path) -> int:
        """How many parameters the configuration in a folder makes, before start(); raises SpecError."""
        ...

    async def write_base(self, folder: Path, weights: bool) -> None:
        """Writes the base model into a folder, to be handed over; without `weights` what stands beside them alone.

        Raises RunMismatch or StorageError.
        """
        ...

    async def steps(self, count: int, first_step: int, first_sequence: int) -> StepsTaken:
        """Takes local steps in a row, each one's own message being applied at once."""
        ...

    async def interrupt(self) -> None:
        """Ends the local steps under way after the current one."""
        ...

    async def apply(self, batches: Sequence[Batch]) -> None:
        """Adds messages, of any period and in any order."""
        ...

    async def retract(self, batches: Sequence[Batch]) -> None:
        """Takes messages out again that were added before."""
        ...

    async def state_hash(self, without: Sequence[Batch] = ()) -> bytes:
        """32 bytes over all sums, as they would be without these messages."""
        ...

    async def export_state(self) -> bytes:
        """All sums, for adopt_state() of another node; equal states give equal bytes."""
        ...

    async def adopt_state(self, state: bytes) -> None:
        """Takes sums in place of all there are, none for b""; raises MalformedMessage for bytes that are no state."""
        ...

    async def evaluate(self) -> Evaluation:
        """Held-out loss and accuracy."""
        ...

    async def save(self, step: int) -> Path:
        """Writes the sums, which with the base are the model; raises StorageError when the disk refuses."""
        ...

    def kill(self) -> None:
        """Ends the process by force; the call under way and later ones raise WorkerDied."""
        ...

    async def stop(self) -> None:
        """Ends the process."""
        ...
