"""The daemon's end of the worker process: WorkerPort over a pipe and shared memory.

SIGINT and SIGTERM do not end the worker, so that a signal to the whole process group leaves the daemon one to drain
with; `stop()` does, and so does the daemon's death, however it comes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import TypeVar

from peerloom.node.seams import RoundFinished, RoundTrained, Taken, WorkerDied, WorkerReady, WorkerSetup
from peerloom.node.worker import messages
from peerloom.node.worker.child import Child
from peerloom.node.worker.memory import SharedBlock, anonymous_file
from peerloom.protocol import errors
from peerloom.protocol.errors import PeerloomError, SpecError
from peerloom.protocol.types import Span

log = logging.getLogger("peerloom.worker")

MODULE = "peerloom.node.worker.main"
RANK_MODULE = "peerloom.node.worker.rank"

Answer = TypeVar("Answer")


class WorkerProcess:
    """One worker process, used once: after WorkerDied make a new one, and stop() the old one all the same.

    With `ranks` > 1 it is a group: rank 0 is the one that is spoken with, the others do what it tells them. When one
    dies, whichever it is, all do; WorkerDied names it.

    All calls are made in one event loop and are carried out in order; one that is cancelled is carried out still.
    `phases` holds the seconds of each phase of starting, once start() has returned.
    """

    def __init__(self, ranks: int = 1) -> None:
        self.phases: dict[str, float] = {}
        self._ranks = ranks
        self._child: Child | None = None
        self._followers: list[Child] = []
        self._memory_fd = -1
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._last_call = 0
        self._round = -1
        self._progress: Callable[[str, float], None] | None = None
        self._block: SharedBlock | None = None
        self._death: WorkerDied | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process id, None before launch(); of a group, rank 0's."""
        return self._child.pid if self._child else None

    @property
    def pids(self) -> list[int]:
        """The process ids of all ranks, in their order."""
        return [child.pid for child in self._children()]

    def launch(self) -> None:
        """Starts the process, which imports its libraries meanwhile; quick. start() calls it where nobody did."""
        if self._child is not None or self._death is not None:
            return
        self._memory_fd = anonymous_file()
        if self._ranks == 1:
            self._child = Child(MODULE, self._memory_fd)
            return
        pairs = [Pipe() for _ in range(1, self._ranks)]
        try:
            fds = [ours.fileno() for ours, _ in pairs]
            self._child = Child(MODULE, self._memory_fd, fds, "the worker process of rank 0")
            for rank, (_, theirs) in enumerate(pairs, 1):
                name = f"the worker process of rank {rank}"
                self._followers.append(Child(RANK_MODULE, self._memory_fd, [theirs.fileno()], name))
        finally:
            for ours, theirs in pairs:
                ours.close()
                theirs.close()

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> WorkerReady:
        """As the seam says; also raises DataError, SpecError, ConfigError, StorageError or RunMismatch."""
        self.launch()
        self._progress = progress
        started = await self._call(messages.Start(setup), messages.Started)
        self._block = SharedBlock(self._memory_fd, started.layout)
        self.phases = started.phases
        log.info("worker started: %s", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items()))
        return started.ready

    async def train(self, round: int, fragment: int = 0, linger_s: float = 0.0) -> RoundTrained:
        """Runs the fragment's local steps of `round`; raises StorageError when the batch cursor cannot be kept."""
        self._round = round
        return await self._call(messages.Train(round, fragment, linger_s), RoundTrained)

    async def ask(self, command: messages.Command, answer: type[Answer]) -> Answer:
        """Carries out a command of the spec's method."""
        return await self._call(command, answer)

    async def interrupt(self) -> None:
        """Ends the local steps under way after the current one."""
        if self._child is not None:
            self._child.send(messages.Request(0, messages.Interrupt(self._round)))

    def outbox(self, pieces: Span = (0, 1)) -> memoryview:
        """These pieces of the encoded proposal, read-only."""
        block = self._mapped()
        return block.view("outbox")[block.layout.pieces(pieces)].toreadonly()

    def inbox(self, pieces: Span = (0, 1)) -> memoryview:
        """Where these pieces of the partner's encoded proposal go."""
        block = self._mapped()
        return block.view("inbox")[block.layout.pieces(pieces)]

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

    def kill(self) -> None:
        """Ends the process by force; the call under way and later ones raise WorkerDied."""
        for child in self._children():
            child.kill()

    async def stop(self) -> None:
        """Ends the process and frees memory and descriptors; safe to call twice.

        By force after a few seconds, or at once when it never came to work.
        """
        children = self._children()
        self._attach()
        self._child, self._followers = None, []
        if not children:
            return
        self._death = self._death or WorkerDied("the worker process was stopped")
        if self._block is None:
            for child in children:
                child.kill()  # it imports, or builds a model nobody waits for: there is nothing to save
        try:
            stop = messages.Request(0, messages.Stop())
            ends = await asyncio.gather(*(child.end(stop) for child in children), return_exceptions=True)
            for end in ends:
                if end is not None:
                    raise end
        finally:
            self._on_death(self._death)
            os.close(self._memory_fd)
            if self._block is not None:
                self._block.close()
                self._block = None

    def _children(self) -> list[Child]:
        return [*([self._child] if self._child is not None else []), *self._followers]

    def _attach(self) -> None:
        if self._child is not None:
            self._child.attach(self._on_message, self._on_death)
        for follower in self._followers:
            follower.attach(partial(self._on_last_words, follower), partial(self._on_follower_death, follower))

    async def _call(self, command: messages.Command, answer: type[Answer]) -> Answer:
        """Sends a command and waits for its answer, the worker's error or its death."""
        if self._death is not None or self._child is None:
            raise self._death or WorkerDied("the worker process was never started")
        self._attach()
        self._last_call += 1
        call = self._last_call
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        self._child.send(messages.Request(call, command))
        try:
            value = await future
        finally:
            del self._calls[call]
        if not isinstance(value, answer):
            raise TypeError(f"the worker answered {type(command).__name__} with {type(value).__name__}")
        return value

    def _on_message(self, message: object) -> None:
        match message:
            case messages.Progress(what, share):
                if self._progress is not None:
                    self._progress(what, share)
            case messages.Crashed(reason):
                if self._child is not None:
                    self._child.last_words = reason
            case messages.Reply(id, value):
                future = self._calls.get(id)
                if future is not None and not future.done():
                    if isinstance(value, messages.Refused):
                        future.set_exception(_error(value))
                    else:
                        future.set_result(value)

    def _on_last_words(self, follower: Child, message: object) -> None:
        if isinstance(message, messages.Crashed):
            follower.last_words = message.message

    def _on_follower_death(self, follower: Child, death: WorkerDied) -> None:
        if follower.code != 0:  # else it has followed rank 0, whose death says more
            self._on_death(death)

    def _on_death(self, death: WorkerDied) -> None:
        """Of one rank, which is the end of all."""
        if self._death is None:
            self._death = death
            for child in self._children() if self._followers else ():
                child.kill()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._death)

    def _mapped(self) -> SharedBlock:
        if self._block is None:
            raise self._death or WorkerDied("the worker process was not started")
        return self._block


def _error(refused: messages.Refused) -> PeerloomError:
    kind = getattr(errors, refused.kind, PeerloomError)
    return SpecError([refused.message]) if kind is SpecError else kind(refused.message)
