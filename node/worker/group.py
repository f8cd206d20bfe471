"""The ranks of a node as one: the inner loop over several devices. Rank 0 leads, the others do what it does."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor, nn

from peerloom.node.checkpoint_manifest import File
from peerloom.node.checkpoint_parts import finish
from peerloom.node.durable import storage_errors
from peerloom.node.worker.memory import BlockLayout, Region, SharedBlock
from peerloom.node.worker.shard import JOIN_S, Place, Shard, Unwritten, join, rows_of
from peerloom.node.worker_seams import WorkerSetup
from peerloom.optim.matrix_fsdp import RankLost
from peerloom.protocol.errors import ConfigError, StorageError

Pipe: TypeAlias = "Connection[Any, Any]"

STORE = "ranks.store"  # in the run's folder, where its ranks meet


@dataclass(frozen=True, slots=True)
class Join:
    """To a rank: shard the model whose parameters lie in the shared block, with all others. Answered by Joined."""

    setup: WorkerSetup
    place: Place
    layout: BlockLayout
    leader: int  # the process id of rank 0


@dataclass(frozen=True, slots=True)
class Joined:
    """The shard is there; or `refused` says why the model is sharded on no rank: rank 0 has found the same."""

    pid: int
    refused: str = ""


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

    def _place(self, rank: int) -> Place:
        return Place(rank=rank, devices=self._setup.devices, store=Path(self._store), threads=self._setup.threads)

    def shard(self, model: nn.Module, block: SharedBlock) -> None:
        """Shards the model, whose parameters lie in the block too; raises ConfigError before a weight is touched."""
        for rank, pipe in enumerate(self._pipes, 1):
            self._tell(rank, pipe, Join(self._setup, self._place(rank), block.layout, os.getpid()))
        place = self._place(0)
        self._threads, self._model = torch.get_num_threads(), model
        mesh = join(place)
        self._threads_in_step = torch.get_num_threads()
        refused = ""
        try:
            self._shard = Shard(model, self._setup.spec.train, mesh, place.device, block, lost_s=self._setup.lost_s)
        except ConfigError as error:
            refused = str(error)  # the others have the same, and say so
        others: list[Joined] = [self._hear(rank, pipe, JOIN_S) for rank, pipe in enumerate(self._pipes, 1)]
        for told in (refused, *(joined.refused for joined in others)):
            if told:
                raise ConfigError(told)
        self._pids = [os.getpid(), *(joined.pid for joined in others)]
        self.owners = self._shard.plan()
        if place.device.type == "cpu":  # gloo has met for good; NCCL makes connections as they are needed
            self._store.unlink(missing_ok=True)

    def publish(self) -> None:
        """Brings the parameters of all ranks into the block, flat, in the order of a node with one device."""
        self._all("publish")
        torch.set_num_threads(self._threads)  # the other ranks are idle until pull()

    def pull(self) -> None:
        """Takes the parameters of all ranks from the block."""
        torch.set_num_threads(self._threads_in_step)
        self._all("pull")

    def project(self) -> Tensor:
        """The projection of the block's theta by the run's seed, a part on each rank."""
        seed, count = self._setup.spec.seed, self.world_size
        parts = self._each("project", [(seed, (rank, count)) for rank in range(count)])
        return torch.tensor(parts, dtype=torch.float64).sum(0)

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

    def write(self, folder: Path, regions: Mapping[str, Region]) -> dict[str, File]:
        """Has every rank write its part of a checkpoint to an empty folder; size and digest of each file.

        `regions` are those of the block by the kind that they are written as. Raises StorageError.
        """
        answers = self._all("write", folder, regions, patient=True)
        for answer in answers:
            if isinstance(answer, Unwritten):
                raise StorageError(answer.reason) from (OSError(errno.ENOSPC, answer.reason) if answer.full else None)
        written = {name: found for answer in answers for name, found in answer.items()}
        return finish(folder, written, self._model.config)

    def load(self, folder: Path) -> None:
        """Has every rank take its moments up from a checkpoint of any number of devices."""
        self._all("load", folder, patient=True)

    def _all(self, method: str, *arguments: Any, patient: bool = False) -> list[Any]:
        return self._each(method, [arguments] * self.world_size, patient)

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]], patient: bool = False) -> list[Any]:
        """Calls a method on all ranks at once; the answers in their order. `patient`: see `_hear`."""
        for rank, pipe in enumerate(self._pipes, 1):
            self._tell(rank, pipe, Call(method, arguments[rank]))
        own = getattr(self._shard, method)(*arguments[0])
        return [own, *(self._hear(rank, pipe, patient=patient) for rank, pipe in enumerate(self._pipes, 1))]

    def _tell(self, rank: int, pipe: Pipe, message: object) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise RankLost((rank,), "the node's work", "its process has ended") from error

    def _hear(self, rank: int, pipe: Pipe, within_s: float = 0.0, *, patient: bool = False) -> Any:
        """A rank's answer to what this rank has done too; a `patient` one waits for a slow disk as long as it takes."""
        within_s = within_s or self._setup.lost_s
        try:
            while not pipe.poll(within_s):
                if not patient or is_stopped(self._pids[rank]):
                    raise RankLost((rank,), "the node's work", f"silent for {within_s:.0f} s")
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise RankLost((rank,), "the node's work", "its process has ended") from error


def is_stopped(pid: int) -> bool:
    """Whether a process runs no more, if only for now."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return True
    return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
