"""One worker process seen from the daemon: commands in order, their answers, and its end, whatever its method.

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
from typing import TypeVar

from peerloom.node.worker import messages
from peerloom.node.worker.child import Child
from peerloom.node.worker.memory import anonymous_file
from peerloom.node.worker_seams import WorkerDied, WorkerSetup
from peerloom.protocol import errors
from peerloom.protocol.errors import PeerloomError, SpecError

log = logging.getLogger("peerloom.worker")

MODULE = "peerloom.node.worker.main"
RANK_MODULE = "peerloom.node.worker.rank"

Answer = TypeVar("Answer")


class WorkerCalls:
    """One worker process, used once: after WorkerDied make a new one, and stop() the old one all the same.

    With `ranks` > 1 it is a group: rank 0 is the one that is spoken with, the others do what it tells them. When one
    dies, whichever it is, all do; WorkerDied names it.

    All calls are made in one event loop and are carried out in order; one that is cancelled is carried out still.
    `launched` is one whose process runs and was never called: this one takes the process over. `phases` holds the
    seconds of each phase of starting, once started.
    """

    def __init__(self, launched: WorkerCalls | None = None, *, ranks: int = 1) -> None:
        self.phases: dict[str, float] = {}
        self._ranks = ranks
        self._child: Child | None = None
        self._followers: list[Child] = []
        self._memory_fd = -1
        self._calls: dict[int, asyncio.Future[object]] = {}
        self._last_call = 0
        self._progress: Callable[[str, float], None] | None = None
        self._started = False
        self._death: WorkerDied | None = None
        if launched is not None:
            self._child, launched._child = launched._child, None
            self._followers, launched._followers = launched._followers, []
            self._memory_fd, launched._memory_fd = launched._memory_fd, -1

    @property
    def pid(self) -> int | None:
        """The worker's process id, None before launch(); of a group, rank 0's."""
        return self._child.pid if self._child else None

    @property
    def pids(self) -> list[int]:
        """The process ids of all ranks, in their order."""
        return [child.pid for child in self._children()]

    def launch(self) -> None:
        """Starts the process, which imports its libraries meanwhile; quick. Starting the work does where nobody did."""
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
        if not self._started:
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
            self._free()

    def _children(self) -> list[Child]:
        return [*([self._child] if self._child is not None else []), *self._followers]

    def _attach(self) -> None:
        if self._child is not None:
            self._child.attach(self._on_message, self._on_death)
        for follower in self._followers:
            follower.attach(partial(self._on_last_words, follower), partial(self._on_follower_death, follower))

    def _free(self) -> None:
        """Frees what was mapped."""

    async def _begin(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> messages.Started:
        """Launches the process if nobody did, and has it build model and data."""
        self.launch()
        self._progress = progress
        started = await self._call(messages.Start(setup), messages.Started)
        self._started, self.phases = True, started.phases
        log.info("worker started: %s", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items()))
        return started

    def _tell(self, command: messages.Command) -> None:
        """Sends a command that has no answer."""
        if self._child is not None:
            self._child.send(messages.Request(0, command))

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


def _error(refused: messages.Refused) -> PeerloomError:
    kind = getattr(errors, refused.kind, PeerloomError)
    return kind([refused.message]) if issubclass(kind, SpecError) else kind(refused.message)
