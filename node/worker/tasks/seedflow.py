"""SeedFlow in the worker: the base model, the sums of all messages over it, local steps, evaluation.

It always starts from the base: what was trained before comes back as messages, or as sums, from the daemon's log.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from peerloom.node.durable import read_at, storage_errors, write_at
from peerloom.node.worker import base, messages
from peerloom.node.worker import seedflow_state as states
from peerloom.node.worker.between import Between
from peerloom.node.worker.memory import BlockLayout
from peerloom.node.worker.model import check_digest
from peerloom.node.worker.objectives import open_objective
from peerloom.node.worker.tasks.common import NonFiniteLoss, chosen_device
from peerloom.node.worker.tokenizer import Tokenizer, load_tokenizer
from peerloom.node.worker_seams import FIRST_STEP, Evaluation, SeedflowReady, StepsTaken, WorkerSetup
from peerloom.optim.subcge import NotFinite
from peerloom.optim.subcge_targets import Target
from peerloom.protocol.errors import BaseMissing, DataError, MalformedMessage
from peerloom.protocol.flood_messages import Batch


class SeedflowTask:
    """A node's fine-tuning, driven command by command; `phases` holds the seconds of each phase of building it.

    Raises DataError, SpecError, ConfigError (device), StorageError, or RunMismatch: the run names another base.
    """

    layout: BlockLayout | None = None
    exchanging = False

    def __init__(self, setup: WorkerSetup, memory_fd: int, progress: Callable[[str, float], None]) -> None:
        self._setup, self._spec, self._progress = setup, setup.spec, progress
        self._memory_fd = memory_fd
        self._stepped = False
        self.phases: dict[str, float] = {}
        self._device = chosen_device(setup, setup.device)
        began = time.perf_counter()
        progress("model", 0.0)
        built = base.base_of(self._spec, setup.run_dir)
        self._init_digest = states.base_digest(built)
        check_digest(self._spec, self._init_digest)
        self._model = built.to(self._device).eval().requires_grad_(False)
        self._numel = sum(parameter.numel() for parameter in self._model.parameters())
        began = self._phase("model", began)
        self._tokenizer = self._open_tokenizer()
        self._objective = open_objective(setup, self._tokenizer, self._model, self._device, progress)
        began = self._phase("data", began)
        targets = states.trainable(self._model, self._spec)
        self._base, anchor = self._stored("base", targets), self._stored("anchor", targets)
        for target in targets:
            self._base[target.name].copy_(target.parameter)
        self._flow = states.open_flow(self._model, self._spec, self._base, anchor)
        self._key = states.signed_key(setup.peer_id)
        self._phase("base copy", began)

    def _open_tokenizer(self) -> Tokenizer:
        try:
            return load_tokenizer(base.with_tokenizer(self._spec, self._setup.run_dir).data.tokenizer)
        except DataError as error:
            if not self._spec.model.path:
                raise
            raise BaseMissing([str(error)]) from error

    def _phase(self, name: str, began: float) -> float:
        now = time.perf_counter()
        self.phases[name] = now - began
        return now

    def _stored(self, what: str, targets: list[Target]) -> dict[str, Tensor]:
        """fp32 tensors like the targets in a file without a name, so that the kernel need not keep them in memory."""
        self._setup.run_dir.mkdir(parents=True, exist_ok=True)
        numel = sum(target.parameter.numel() for target in targets)
        with storage_errors(f"the {what} copy of the model in {self._setup.run_dir}"):
            handle, name = tempfile.mkstemp(prefix=f".{what}-", dir=self._setup.run_dir)
            try:
                _allocate(handle, 4 * numel)
                flat = torch.from_file(name, shared=True, size=numel, dtype=torch.float32)
            finally:
                os.close(handle)
                os.unlink(name)
        parts = torch.split(flat, [target.parameter.numel() for target in targets])
        return {target.name: part.view(target.parameter.shape) for target, part in zip(targets, parts, strict=True)}

    def ready(self) -> SeedflowReady:
        """What start() answers."""
        return SeedflowReady(
            init_digest=self._init_digest,
            layout_digest=states.sums_digest(self._flow, self._model),
            numel=self._numel,
            state_bytes_max=states.most_bytes(self._flow, self._spec.seedflow.periods()),
        )

    @property
    def model(self) -> nn.Module:
        """With the weights that the sums stand for."""
        return self._model

    def obey(self, command: messages.Command, between: Between) -> object:
        """Carries out one command; `between` is called between local steps."""
        match command:
            case messages.Steps(number, count, first_step, first_sequence):
                return self.steps(count, first_step, first_sequence, lambda: between.interrupted(number))
            case messages.Apply(batches):
                self.apply(batches)
                return None
            case messages.Retract(batches):
                self.retract(batches)
                return None
            case messages.HashState(without):
                return self.state_hash(without)
            case messages.ExportState():
                return self._export()
            case messages.AdoptState(size):
                self.adopt_state(read_at(self._memory_fd, size, 0))
                return None
            case messages.Evaluate():
                return self.evaluate()
            case messages.WriteBase(folder, weights):
                self.write_base(folder, weights)
                return None
            case messages.SaveState(step):
                return self.save(step)
        raise RuntimeError(f"no command of SeedFlow: {command}")

    def steps(self, count: int, first_step: int, first_sequence: int, interrupted: Callable[[], bool]) -> StepsTaken:
        """Local steps, at least one; `interrupted` is asked after each. Raises NonFiniteLoss."""
        began = time.perf_counter()
        scalars, losses, tokens = list[int](), list[float](), 0
        for index in range(count):
            step, sequence = first_step + index, first_sequence + index
            draw, drawn = self._objective.draw(sequence)
            scalars.append(self._step(step, sequence, draw, losses))
            tokens += drawn
            if not self._stepped:
                self._stepped = True
                self._progress(FIRST_STEP, 1.0)
            if interrupted():
                break
        return StepsTaken(
            scalars=tuple(scalars),
            tokens=tokens,
            seconds=time.perf_counter() - began,
            train_loss=sum(losses) / len(losses) if losses else math.nan,
        )

    def _step(self, step: int, sequence: int, draw: Callable[[], Tensor], losses: list[float]) -> int:
        def loss() -> float:
            losses.append(float(draw()))
            return losses[-1]

        flow = self._flow
        flow.advance(step)
        try:
            share = self._spec.seedflow.rate_share(step)
            scalar = flow.estimate(loss, flow.seed_of(self._key, sequence), share)
        except NotFinite as error:
            raise NonFiniteLoss(f"training diverged at step {step}: {error}") from error
        flow.apply([(self._key, sequence, step, scalar)])
        return scalar

    def apply(self, batches: tuple[Batch, ...]) -> None:
        """Adds messages and writes the weights once."""
        self._flow.apply(states.rows_of(batches))

    def retract(self, batches: tuple[Batch, ...]) -> None:
        """Takes messages out again."""
        self._flow.retract(states.rows_of(batches))

    def state_hash(self, without: tuple[Batch, ...] = ()) -> bytes:
        """Over all sums, as they would be without these messages."""
        return self._flow.state_hash(states.rows_of(without))

    def export_state(self) -> bytes:
        """All sums."""
        return states.pack(self._flow)

    def _export(self) -> int:
        data = self.export_state()
        os.ftruncate(self._memory_fd, 0)
        write_at(self._memory_fd, data, 0)
        return len(data)

    def adopt_state(self, state: bytes) -> None:
        """Takes sums in place of all there are; raises MalformedMessage, with nothing changed."""
        try:
            self._flow.load_state(states.unpack(state, self._flow, self._spec.seedflow.periods()))
        except ValueError as error:
            raise MalformedMessage(f"{len(state)} bytes that are no sums of this run: {error}") from error

    def write_base(self, folder: Path, weights: bool = True) -> None:
        """Writes the base into a folder, to be handed over; raises RunMismatch or StorageError."""
        base.write_base(folder, self._model, self._base, self._tokenizer, self._init_digest if weights else "")

    def evaluate(self) -> Evaluation:
        """Held-out loss and accuracy; sums from the base first where messages came late."""
        if self._flow.stale:
            self._flow.rebuild()
        return self._objective.evaluate()

    def save(self, step: int) -> Path:
        """Writes the sums: with the base model they are the model. Raises StorageError."""
        about: dict[str, object] = {
            "step": step,
            "messages": sum(self._flow.state.counts.values()),
            "spec_hash": self._spec.spec_hash(),
            "init_digest": self._init_digest,
        }
        return states.write(self._setup.run_dir, self._flow, about)


def _allocate(handle: int, size: int) -> None:
    """Sets the space aside: running out of it later, in mapped memory, would be a SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, max(size, 1))
    else:
        os.ftruncate(handle, size)
