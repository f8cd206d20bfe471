"""GASLoC on several devices of one node: the model is sharded over its ranks, the exchange is as on one device.

theta, y and previous lie once a node in the shared block, flat in the order of a node with one device, so that nodes
with different numbers of devices exchange with each other, and a node may change its number between two starts. For an
exchange every rank writes the segments it owns into that block; rank 0 mixes there, and each takes its segments back.
It mixes with all the node's threads, the other ranks being idle then, and its work is small: proposal, distance and mix
of 17 M parameters are 0.07 s of one thread a round, where a single step takes 2 s. So what a distance adds up to and
where a proposal is rounded do not depend on the number of devices. The sketch of theta, twice as much, is shared out.
A checkpoint is written by all ranks side by side, each what it owns; rank 0 gives it its name once all have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from peerloom.node import checkpoint
from peerloom.node.checkpoint_meta import Meta
from peerloom.node.checkpoint_parts import MODEL
from peerloom.node.worker.group import Group, Pipe
from peerloom.node.worker.memory import Region
from peerloom.node.worker.model import numel_of
from peerloom.node.worker.tasks.common import chosen_device
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.node.worker_seams import WorkerReady, WorkerSetup
from peerloom.protocol.errors import ConfigError
from peerloom.protocol.runspec import RunSpec


class GaslocGroupTask(GaslocTask):
    """GaslocTask over the ranks that `pipes` lead to; also raises ConfigError where it cannot be sharded, RankLost."""

    def __init__(
        self,
        setup: WorkerSetup,
        memory_fd: int,
        progress: Callable[[str, float], None],
        pipes: Sequence[Pipe],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pipes = pipes
        super().__init__(setup, memory_fd, progress, clock)

    def _choose_device(self) -> torch.device:
        """All devices, and the memory, are looked at before a rank is told to do anything."""
        for name in self._setup.devices:
            device = chosen_device(self._setup, name)
        check_memory(self._spec, len(self._setup.devices), on_cpu=device.type == "cpu")
        self._group = Group(self._setup, self._pipes)
        return device

    def _place(self, model: nn.Module, memory_fd: int) -> None:
        """The whole model is built here alone; the other ranks take their segments out of the block."""
        named = tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
        self._model = model
        host, previous = self._open_block(sum(parameter.numel() for parameter in model.parameters()), memory_fd)
        torch.cat([parameter.detach().view(-1) for parameter in model.parameters()], out=host)
        self._group.shard(model, self._block)
        self._inner = self._group
        self._names = [name for name, _ in named]
        self._open_method(host, (self._host_theta, previous), named)

    def _seed(self, value: int) -> None:
        self._group.seed(value)

    def _collect(self) -> None:
        self._group.publish()

    def _spread(self) -> None:
        self._group.pull()

    def ready(self) -> WorkerReady:
        """What start() answers."""
        return replace(super().ready(), owners=self._group.owners)

    def _projected(self) -> Tensor:
        return self._group.project()

    def _newest(self) -> tuple[checkpoint.Checkpoint | None, list[str]]:
        return checkpoint.newest_intact(self._folder, moments=False)

    def _load_moments(self, found: checkpoint.Checkpoint) -> None:
        assert found.folder is not None  # ours: it was read from disk
        self._group.load(found.folder)

    def _write(self, meta: Meta) -> Path:
        regions: dict[str, Region] = {MODEL: "theta", "previous": "previous"}
        if self._spec.gasloc.fragments > 1:
            regions["params"] = "params"
        return checkpoint.save_parts(
            self._folder,
            meta,
            self._names,
            lambda folder: self._group.write(folder, regions),
            keep=self._setup.keep_checkpoints,
        )

    def _publish_theta(self, fragment: int | None = None) -> None:
        """theta lives in the block."""


def check_memory(spec: RunSpec, ranks: int, *, on_cpu: bool) -> None:
    """Raises ConfigError when this machine cannot hold the model's copies, each once for all ranks.

    They are theta, y, previous and inbox in the shared block and, while it is built, the model; on the CPU in its place
    parameters, gradients and two moments. A stored model's size shows only when it is loaded.
    """
    numel = numel_of(spec)
    if numel is None:
        return
    copies = 4 + (4 if on_cpu else 1)
    needed, free = copies * 4 * numel, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"devices: the model takes {needed / 2**30:.1f} GiB of memory on {ranks} devices where {free / 2**30:.1f} "
            "GiB are free; use fewer devices or a smaller model"
        )
