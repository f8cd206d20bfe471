"""The daemon's end of SeedFlow's worker: SeedflowPort over a pipe; exported sums go through the shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from peerloom.node.durable import read_at, write_at
from peerloom.node.worker import messages
from peerloom.node.worker.calls import WorkerCalls
from peerloom.node.worker_seams import Evaluation, SeedflowReady, StepsTaken, WorkerDied, WorkerSetup
from peerloom.protocol.flood_messages import Batch

NONE = type(None)


class SeedflowProcess(WorkerCalls):
    """Implements worker_seams.SeedflowPort."""

    def __init__(self, launched: WorkerCalls | None = None) -> None:
        super().__init__(launched)
        self._steps = 0

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> SeedflowReady:
        """As the seam says; also raises DataError, SpecError, ConfigError, StorageError or RunMismatch.

        Safe after BaseMissing.
        """
        started = await self._begin(setup, progress)
        if not isinstance(started.ready, SeedflowReady):
            raise TypeError(f"the worker of {setup.spec.method} is not SeedFlow's")
        return started.ready

    async def steps(self, count: int, first_step: int, first_sequence: int) -> StepsTaken:
        """Takes local steps in a row."""
        self._steps += 1
        return await self._call(messages.Steps(self._steps, count, first_step, first_sequence), StepsTaken)

    async def interrupt(self) -> None:
        """Ends the local steps under way after the current one."""
        self._tell(messages.Interrupt(self._steps))

    async def apply(self, batches: Sequence[Batch]) -> None:
        """Adds messages."""
        if batches:
            await self._call(messages.Apply(tuple(batches)), NONE)

    async def retract(self, batches: Sequence[Batch]) -> None:
        """Takes messages out again."""
        if batches:
            await self._call(messages.Retract(tuple(batches)), NONE)

    async def state_hash(self, without: Sequence[Batch] = ()) -> bytes:
        """32 bytes over all sums, as they would be without these messages."""
        return await self._call(messages.HashState(tuple(without)), bytes)

    async def export_state(self) -> bytes:
        """All sums."""
        size = await self._call(messages.ExportState(), int)
        data = read_at(self._memory_fd, size, 0)
        if len(data) != size:
            raise WorkerDied("the worker's sums are not in the shared memory")
        return data

    async def adopt_state(self, state: bytes) -> None:
        """Takes sums in place of all there are; raises MalformedMessage."""
        if self._child is not None:
            os.ftruncate(self._memory_fd, 0)
            write_at(self._memory_fd, state, 0)
        await self._call(messages.AdoptState(len(state)), NONE)

    async def base_numel(self, folder: Path) -> int:
        """How many parameters a fetched configuration makes; raises SpecError."""
        self.launch()
        return await self._call(messages.BaseNumel(folder), int)

    async def write_base(self, folder: Path, weights: bool) -> None:
        """Writes the base model, to be handed over; raises RunMismatch or StorageError."""
        await self._call(messages.WriteBase(folder, weights), NONE)

    async def evaluate(self) -> Evaluation:
        """Held-out loss and accuracy."""
        return await self._call(messages.Evaluate(), Evaluation)

    async def save(self, step: int) -> Path:
        """Writes the sums to disk; raises StorageError."""
        return await self._call(messages.SaveState(step), Path)
