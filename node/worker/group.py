"""The ranks of a node as one: the inner loop over several devices. Rank 0 leads, the others do what it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from peerloom.node.durable import storage_errors
from peerloom.node.seams import WorkerSetup
from peerloom.node.worker.inner import state_shape
from peerloom.node.worker.memory import BlockLayout
from peerloom.node.worker.shard import JOIN_S, LOST_S, Held, Place, Shard, cut_for, join, rows_of
from peerloom.optim.matrix_fsdp import RankLost
from peerloom.protocol.errors import ConfigError

Pipe: TypeAlias = "Connection[Any, Any]"

STORE = "ranks.store"  # in the run's folder, while its ranks live


@dataclass(frozen=True, slots=True)
class Join:
    """To a rank: meet the others, build the model and shard it. Answered by Joined."""

    setup: WorkerSetup
    place: Place


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank's shard stands, or `refused` says why there is none on any rank: rank 0 has found the same."""

    refused: str = ""


@dataclass(frozen=True, slots=True)
class MapBlock:
    """To a rank: open the shared block. Answered by what the rank holds."""

    layout: BlockLayout


@dataclass(frozen=True, slots=True)
class Call:
    """To a rank: call this method of its Shard with these arguments. Answered by what it returns, never a tensor."""

    method: str
    arguments: tuple[Any, ...] = ()


class Group:
    """Rank 0's end of the node's ranks, `pipes` leading to ranks 1, 2, ... Has what GASLoC's task needs of InnerLoop.

    Raises RankLost, naming the rank, when one is gone.
    """

    def __init__(self, setup: WorkerSetup, pipes: Sequence[Pipe]) -> None:
        self._setup, self._pipes = setup, pipes
        self.world_size = len(pipes) + 1
        self._store = setup.run_dir / STORE
        with storage_errors(f"the file {self._store}"):
            self._store.parent.mkdir(parents=True, exist_ok=True)
            self._store.unlink(missing_ok=True)  # of a life that was killed
        for rank, pipe in enumerate(pipes, 1):
            self._tell(rank, pipe, Join(setup, self._place(rank)))

    def _place(self, rank: int) -> Place:
        return Place(rank=rank, devices=self._setup.devices, store=Path(self._store), threads=self._setup.threads)

    def shard(self, model: nn.Module) -> None:
        """Shards the model over all ranks, which have built it too; raises ConfigError before a weight is touched."""
        place = self._place(0)
        self._threads = torch.get_num_threads()
        mesh = join(place)
        self._threads_in_step = torch.get_num_threads()
        refused: ConfigError | None = None
        try:
            self._shard = Shard(model, self._setup.spec.train, mesh, place.device)
        except ConfigError as error:
            refused = error  # the others have the same, and say so
        for rank, pipe in enumerate(self._pipes, 1):
            joined: Joined = self._hear(rank, pipe, JOIN_S)
            if joined.refused and refused is None:
                refused = ConfigError(joined.refused)
        if refused is not None:
            raise refused

    def map(self, memory_fd: int, layout: BlockLayout) -> None:
        """Opens the block on all ranks."""
        for rank, pipe in enumerate(self._pipes, 1):
            self._tell(rank, pipe, MapBlock(layout))
        own = self._shard.map(memory_fd, layout)
        self._held: list[tuple[Held, ...]] = [own]
        self._held += [self._hear(rank, pipe) for rank, pipe in enumerate(self._pipes, 1)]
        self._all("publish")

    def publish(self) -> None:
        """Brings the parameters of all ranks into the block, flat, in the order of a node with one device."""
        self._all("publish")
        torch.set_num_threads(self._threads)  # the other ranks are idle until pull()

    def pull(self) -> None:
        """Takes the parameters of all ranks from the block."""
        torch.set_num_threads(self._threads_in_step)
        self._all("pull")

    def seed(self, value: int) -> None:
        """Of dropout, which is another on each rank."""
        self._each("seed", [(value + rank,) for rank in range(self.world_size)])

    def step(self, windows: Tensor, rate: float) -> Tensor:
        """One step over a batch, its rows shared out over the ranks; the batch's mean loss, detached."""
        parts = [rows_of(windows.numpy(), rank, self.world_size) for rank in range(self.world_size)]
        loss: Tensor = self._each("step", [(rows, share, rate) for rows, share in parts])[0]
        return loss

    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Mean loss in nats a token."""
        held_out = [windows.numpy() for windows in batches]
        parts = [
            ([rows_of(windows, rank, self.world_size) for windows in held_out],) for rank in range(self.world_size)
        ]
        return float(torch.tensor(self._each("evaluate", parts), dtype=torch.float64).sum(0).mean())

    def reset(self) -> None:
        """Forgets the moments."""
        self._all("reset")

    def state(self) -> dict[str, Tensor]:
        """The optimizers' tensors, whole, as InnerLoop has them on one device; empty before the first step."""
        found: dict[str, Tensor] = {}
        for part in self._all("moments"):
            found |= {key: torch.from_numpy(value) for key, value in part.items()}
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state` of any number of devices gave; ValueError for a tensor that does not fit."""
        shapes = {each.name: each.whole_shape for held in self._held for each in held}
        for key, value in state.items():
            what, name = key.split("/", 1)
            fits = state_shape(what, torch.Size(shapes[name])) if name in shapes else value.shape
            if value.dim() and value.shape != fits:
                raise ValueError(f"{what} of {name} has shape {tuple(value.shape)}, not {tuple(fits)}")
        self._each("load", [(cut_for(held, state),) for held in self._held])

    def _all(self, method: str) -> list[Any]:
        return self._each(method, [()] * self.world_size)

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method on all ranks at once; the answers in their order."""
        for rank, pipe in enumerate(self._pipes, 1):
            self._tell(rank, pipe, Call(method, arguments[rank]))
        own = getattr(self._shard, method)(*arguments[0])
        return [own, *(self._hear(rank, pipe) for rank, pipe in enumerate(self._pipes, 1))]

    def _tell(self, rank: int, pipe: Pipe, message: object) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise RankLost((rank,), "the node's work", "its process has ended") from error

    def _hear(self, rank: int, pipe: Pipe, within_s: float = LOST_S) -> Any:
        """A rank's answer to what this rank has done too."""
        try:
            if not pipe.poll(within_s):
                raise RankLost((rank,), "the node's work", f"silent for {within_s:.0f} s")
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise RankLost((rank,), "the node's work", "its process has ended") from error
