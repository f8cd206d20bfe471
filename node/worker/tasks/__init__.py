"""One task a method: what the worker does with the daemon's commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from peerloom.node.seams import WorkerReady, WorkerSetup
from peerloom.node.worker import messages
from peerloom.node.worker.memory import BlockLayout


class Task(Protocol):
    """A node's training, driven command by command; `phases` holds the seconds of each phase of building it."""

    layout: BlockLayout
    phases: dict[str, float]

    def ready(self) -> WorkerReady:
        """What start() answers."""
        ...

    def obey(self, command: messages.Command, interrupted: Callable[[int], bool]) -> object:
        """Carries out one command; `interrupted(round)` says whether that round's local steps are to end."""
        ...


def open_task(setup: WorkerSetup, memory_fd: int, progress: Callable[[str, float], None]) -> Task:
    """The task of the spec's method; raises as the worker's start() does."""
    from peerloom.node.worker.tasks.gasloc import GaslocTask  # one method's imports do not delay another's

    return GaslocTask(setup, memory_fd, progress)
