"""What a training method is to a node: one life of its worker, from start to end, and the streams it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeVar

from peerloom.node.context import Context
from peerloom.node.pipeline_trainer import PipelineTrainer
from peerloom.node.seams import MessageStream
from peerloom.node.seedflow_trainer import SeedflowTrainer
from peerloom.node.trainer import Trainer
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.services import Service

M = TypeVar("M")


class Life(Protocol):
    """One life of a worker, driven by its method."""

    @property
    def rounds(self) -> int:
        """Rounds finished in this life: after some, earlier deaths of the worker are forgotten."""
        ...

    async def run(self) -> None:
        """From the worker's start to its end in order; raises WorkerDied, NoDonor, or Drained before any work.

        Raises Moved when all is saved and another life is to begin at once.
        """
        ...

    async def serve(self, service: Service[M], stream: MessageStream[M]) -> None:
        """Runs a stream that a peer opened; raises LinkError while it cannot."""
        ...

    def fetch(self, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Serves this node's state; raises LinkError while there is none."""
        ...

    async def interrupt(self) -> None:
        """Cuts the work under way short: the node drains."""
        ...

    def kill(self) -> None:
        """Ends the worker by force."""
        ...

    def peers_changed(self) -> None:
        """The view of the swarm has changed."""
        ...


LIVES: dict[str, Callable[[Context, Any], Life]] = {  # the worker's port is the method's own
    "gasloc": Trainer,
    "seedflow": SeedflowTrainer,
    "pipeline": PipelineTrainer,
}
