"""The daemon's end of the worker process: WorkerPort over a pipe and shared memory; see `calls.py` for its life."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from peerloom.node.worker import messages
from peerloom.node.worker.calls import WorkerCalls
from peerloom.node.worker.memory import SharedBlock
from peerloom.node.worker_seams import RoundFinished, RoundTrained, Taken, WorkerDied, WorkerReady, WorkerSetup
from peerloom.protocol.types import Span

log = logging.getLogger("peerloom.worker")

Answer = TypeVar("Answer")


class WorkerProcess(WorkerCalls):
    """The worker of all methods but SeedFlow."""

    def __init__(self, launched: WorkerCalls | None = None, *, ranks: int = 1) -> None:
        super().__init__(launched, ranks=ranks)
        self._trains = 0  # asked for
        self._block: SharedBlock | None = None

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> WorkerReady:
        """As the seam says; also raises DataError, SpecError, ConfigError, StorageError or RunMismatch."""
        started = await self._begin(setup, progress)
        if started.layout is None or not isinstance(started.ready, WorkerReady):
            raise TypeError(f"the worker of {setup.spec.method} shares no memory")
        self._block = SharedBlock(self._memory_fd, started.layout)
        for line in started.ready.owners.splitlines():
            log.debug("%s", line)
        return started.ready

    async def train(self, round: int, fragment: int = 0, linger_s: float = 0.0) -> RoundTrained:
        """Runs the fragment's local steps of `round`; raises StorageError when the batch cursor cannot be kept."""
        self._trains += 1
        return await self._call(messages.Train(self._trains, round, fragment, linger_s), RoundTrained)

    async def ask(self, command: messages.Command, answer: type[Answer]) -> Answer:
        """Carries out a command of the spec's method."""
        return await self._call(command, answer)

    async def interrupt(self) -> None:
        """Ends the local steps under way after the current one."""
        self._tell(messages.Interrupt(self._trains))

    def outbox(self, pieces: Span = (0, 1)) -> memoryview:
        """These pieces of the encoded proposal, read-only."""
        block = self._mapped()
        return block.view("outbox")[block.layout.pieces(pieces)].toreadonly()

    def inbox(self, pieces: Span = (0, 1)) -> memoryview:
        """Where these pieces of the partner's encoded proposal go."""
        block = self._mapped()
        return block.view("inbox")[block.layout.pieces(pieces)]

    def proposal(self) -> memoryview:
        """A stage's encoded weights, read-only."""
        return self._mapped().view("proposal").toreadonly()

    def partner(self) -> memoryview:
        """Where those of another host of the stage go."""
        return self._mapped().view("partner")

    async def take(self, fragment: int, weight: float, pieces: Span, replace: bool) -> Taken:
        """Takes in these pieces of the inbox."""
        return await self._call(messages.Take(fragment, weight, pieces, replace), Taken)

    async def settle(self, fragment: int) -> Taken:
        """Ends the fragment's exchanges."""
        return await self._call(messages.Settle(fragment), Taken)

    async def finish(self, mix: bool) -> RoundFinished:
        """Ends the round."""
        return await self._call(messages.Finish(mix), RoundFinished)

    def theta(self) -> memoryview:
        """The round's start point, fp32 bytes, read-only."""
        return self._mapped().view("theta").toreadonly()

    async def adopt(self, round: int, step: int, theta: memoryview) -> RoundFinished:
        """Takes a donor's state; raises ValueError when it is not as long as this model."""
        target, source = self._mapped().view("theta"), theta.cast("B")
        if len(source) != len(target):
            raise ValueError(f"the donor's theta has {len(source)} bytes, this model takes {len(target)}")
        target[:] = source
        return await self._call(messages.Adopt(round, step), RoundFinished)

    async def save(self) -> Path:
        """Writes a checkpoint of the last finished round; raises StorageError."""
        return await self._call(messages.Save(), Path)

    def _free(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None

    def _mapped(self) -> SharedBlock:
        if self._block is None:
            raise self._death or WorkerDied("the worker process was not started")
        return self._block
