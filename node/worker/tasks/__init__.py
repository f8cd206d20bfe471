"""One task a method: what the worker does with the daemon's commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from peerloom.node.devices import check_devices
from peerloom.node.worker import messages
from peerloom.node.worker.between import Between
from peerloom.node.worker.memory import BlockLayout
from peerloom.node.worker_seams import SeedflowReady, WorkerReady, WorkerSetup


class Task(Protocol):
    """A node's training, driven command by command; `phases` holds the seconds of each phase of building it."""

    phases: dict[str, float]

    @property
    def layout(self) -> BlockLayout | None:
        """Of the shared memory; None: the daemon maps none."""
        ...

    def ready(self) -> WorkerReady | SeedflowReady:
        """What start() answers."""
        ...

    @property
    def exchanging(self) -> bool:
        """Whether a Finish is due while Train is carried out: for the round before, whose exchange is under way."""
        ...

    def obey(self, command: messages.Command, between: Between) -> object:
        """Carries out one command; `between` is called between local steps."""
        ...


def open_task(
    setup: WorkerSetup,
    memory_fd: int,
    progress: Callable[[str, float], None],
    ranks: Sequence[Connection[Any, Any]] = (),
) -> Task:
    """The task of the spec's method, `ranks` being pipes to those of the other devices; raises as start() does."""
    if len(setup.devices) > 1:
        check_devices(setup.spec, setup.devices)
        if len(ranks) != len(setup.devices) - 1:
            raise RuntimeError(f"{len(setup.devices)} devices, and {len(ranks)} ranks beside this one")
        from peerloom.node.worker.tasks.gasloc_group import GaslocGroupTask

        return GaslocGroupTask(setup, memory_fd, progress, ranks)
    if setup.spec.method == "pipeline":
        from peerloom.node.worker.tasks.stage import StageTask

        return StageTask(setup, memory_fd, progress)
    if setup.spec.method == "seedflow":
        from peerloom.node.worker.tasks.seedflow import SeedflowTask

        return SeedflowTask(setup, memory_fd, progress)
    from peerloom.node.worker.tasks.gasloc import GaslocTask  # one method's imports do not delay another's

    return GaslocTask(setup, memory_fd, progress)
