"""One rank of a node with several devices: its shard of the model, its rows of each batch, its pieces of the block.

All methods but `load`, `publish`, `pull` and `project` are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy

from peerloom.node.checkpoint_parts import MOMENTS, Parts, write_part
from peerloom.node.durable import is_full
from peerloom.node.worker.inner import matrix_rate, soap_settings, state_shape
from peerloom.node.worker.inner_state import STEP
from peerloom.node.worker.memory import Region, SharedBlock
from peerloom.optim.matrix_fsdp import (
    OwnerOptimizer,
    ShardedModel,
    ShardingError,
    build_optimizer,
    clip_grad_norm_,
    matrix_fully_shard,
)
from peerloom.optim.matrix_fsdp.checkpoint import owned_moments, take_up_moments, written_here
from peerloom.optim.matrix_fsdp.runtime import whole_shapes
from peerloom.optim.projection import project
from peerloom.protocol.errors import ConfigError, StorageError
from peerloom.protocol.runspec import TrainSpec

Array = npt.NDArray[Any]

JOIN_S = 300.0  # by which all ranks have imported their libraries and met, on a machine that may be busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank among the ranks of its node; `store` is the file by which they find each other."""

    rank: int
    devices: tuple[str, ...]
    store: Path
    threads: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device(self.devices[self.rank])


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Why a rank could not write its part of a checkpoint; `full`: room on the disk may mend it."""

    reason: str
    full: bool


def join(place: Place) -> DeviceMesh:
    """Meets the other ranks of the node, over gloo on the CPU and NCCL on GPUs, on this machine's own loopback."""
    device, world_size = place.device, len(place.devices)
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # else making a mesh chooses a device by the rank
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (place.threads or torch.get_num_threads()) // world_size))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, loopback())
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=FileStore(str(place.store), world_size),
        rank=place.rank,
        world_size=world_size,
        timeout=timedelta(seconds=JOIN_S),
    )
    return init_device_mesh(device.type, (world_size,))


def loopback() -> str:
    """The name of this machine's loopback interface, which GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME take."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


def shared_out(count: int, rank: int, world_size: int) -> slice:
    """The rows of a batch that a rank takes; none where there are more ranks than rows."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)


class Shard:
    """Trains a rank's shard; `model` is whole and equal on all ranks, its parameters' places are in `block`.

    Raises ConfigError, on all ranks alike.
    `memory_limit` is in bytes, None: what the device or this rank's share of the machine has free.
    """

    def __init__(
        self,
        model: nn.Module,
        train: TrainSpec,
        mesh: DeviceMesh,
        device: torch.device,
        block: SharedBlock,
        memory_limit: int | None = None,
        lost_s: float = 60.0,
    ) -> None:
        self._model, self._train, self._device, self._block = model, train, device, block
        self._spans, at = dict[str, slice](), 0
        for name, parameter in model.named_parameters():
            self._spans[name] = slice(at, at + parameter.numel())
            at += parameter.numel()
        on_gpu = device.type == "cuda"
        if memory_limit is None and not on_gpu:
            memory_limit = psutil.virtual_memory().available // mesh.size()
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if on_gpu else None
        try:
            self._sharded: ShardedModel = matrix_fully_shard(
                model, mesh, mp=mixed, timeout_s=lost_s, memory_limit=memory_limit
            )
        except ShardingError as error:
            raise ConfigError(f"devices: {error}") from error
        _set_pg_timeout(timedelta(seconds=lost_s), mesh.get_group())  # NCCL knows no other; until here it was JOIN_S
        self._optimizer = self._fresh()
        self._flat = self._region("params")

    def plan(self) -> str:
        """Who owns how much, as a table."""
        return self._sharded.plan.table()

    def publish(self) -> None:
        """Writes the owned pieces to their places in the block's flat parameters."""
        for place, parameter in self._places():
            place.copy_(parameter)

    def pull(self) -> None:
        """Takes the owned pieces from the block's flat parameters."""
        for place, parameter in self._places():
            parameter.copy_(place)

    def project(self, seed: int, share: tuple[int, int]) -> list[float]:
        """A part of the projection of the block's theta; see `optim.projection`."""
        found: list[float] = project(self._region("theta"), seed, share=share).tolist()
        return found

    def seed(self, value: int) -> None:
        """Of dropout."""
        torch.manual_seed(value)

    def step(self, windows: Array, share: float, rate: float) -> Tensor:
        """One optimizer step; `windows` are this rank's rows, `share` their part of the batch. The batch's mean loss.

        A rank without rows brings some with share 0: it takes part all the same.
        """
        self._model.train()
        loss = self._loss(windows) * share
        (loss * self._sharded.world_size).backward()  # type: ignore[no-untyped-call]
        self._update(rate)
        total = loss.detach().reshape(1).clone()
        self._sharded.links.sum_scalar(total)
        return total[0]

    def evaluate(self, batches: Sequence[tuple[Array, float]]) -> list[float]:
        """This rank's part of each batch's mean loss, in eval mode, without a trace on the state."""
        self._model.eval()
        with torch.no_grad():
            losses = [self._loss(windows).double() * share for windows, share in batches]
        return [float(loss) for loss in losses]

    def reset(self) -> None:
        """Forgets the moments."""
        self._optimizer = self._fresh()

    def write(self, folder: Path, regions: Mapping[str, Region]) -> dict[str, dict[str, Any]] | Unwritten:
        """Writes this rank's part of a checkpoint: moments, and by kind what it owns of these regions of the block.

        The answer is that of `write_part`.
        """
        names = written_here(self._model)
        shapes = whole_shapes(self._model)
        kinds: dict[str, Mapping[str, Tensor]] = {}
        for kind, region in regions.items():
            flat = self._region(region)
            kinds[kind] = {name: flat[self._spans[name]].view(shapes[name]) for name in names}
        kinds[MOMENTS] = owned_moments(self._model, self._optimizer)
        try:
            return write_part(folder, self._sharded.rank, self._sharded.world_size, kinds)
        except StorageError as error:
            return Unwritten(str(error), is_full(error))

    def load(self, folder: Path) -> None:
        """Takes up the optimizer's state of a checkpoint, of any number of devices, as far as it is owned here.

        Raises ValueError for a tensor that does not fit.
        """
        shapes = whole_shapes(self._model)
        with Parts(folder, MOMENTS) as moments:
            for key in moments.keys():
                name, what = key.rsplit("/", 1)
                shape = moments.shape(key)
                fits = torch.Size(()) if what == STEP else state_shape(what, torch.Size(shapes[name]))
                if tuple(shape) != tuple(fits):
                    raise ValueError(f"{what} of {name} has shape {shape}, not {tuple(fits)}")
            take_up_moments(self._model, self._optimizer, moments, moments.keys())

    def _region(self, name: Region) -> Tensor:
        return torch.frombuffer(self._block.view(name), dtype=torch.float32)

    def _places(self) -> list[tuple[Tensor, Tensor]]:
        """(place in the flat parameters, what is held), both flat."""
        places = []
        for owned in self._sharded.owned():
            held = owned.parameter.detach().view(-1)
            row = held.numel() // owned.piece.shape[0]
            start = self._spans[owned.name].start + owned.piece.first_row * row
            places.append((self._flat[start : start + held.numel()], held))
        return places

    def _loss(self, windows: Array) -> Tensor:
        tokens = torch.from_numpy(windows).to(self._device, non_blocking=True)
        logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _update(self, rate: float) -> None:
        matrix = matrix_rate(self._train, rate)
        for optimizer, lr in ((self._optimizer.matrix, matrix), (self._optimizer.adamw, rate)):
            for group in optimizer.param_groups:
                group["lr"] = lr
        if self._train.clip_norm:
            self._clip(self._train.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _clip(self, most: float) -> None:
        """As InnerLoop does: with "basis_rotated" the hidden matrices and the rest each by their own norm."""
        if self._train.optimizer != "basis_rotated":
            clip_grad_norm_(self._model, most)
            return
        parts = [
            [each for group in optimizer.param_groups for each in group["params"]]
            for optimizer in (self._optimizer.matrix, self._optimizer.adamw)
        ]
        for others in parts:  # put by, while the rest is clipped
            put_by = [parameter.grad for parameter in others]
            for parameter in others:
                parameter.grad = None
            clip_grad_norm_(self._model, most)
            for parameter, gradient in zip(others, put_by, strict=True):
                parameter.grad = gradient

    def _fresh(self) -> OwnerOptimizer:
        train = self._train
        betas = (train.beta1, train.beta2)
        others: dict[str, Any] = {
            "adamw_lr": train.learning_rate,
            "adamw_betas": betas,
            "adamw_eps": train.eps,
            "adamw_weight_decay": train.weight_decay,
            "weight_decay": train.weight_decay,
        }
        if train.optimizer == "muon":
            return build_optimizer(
                self._model, "muon", lr=train.muon_learning_rate, momentum=train.muon_momentum, **others
            )
        if train.optimizer == "soap":
            return build_optimizer(self._model, "soap", **others | soap_settings(train))
        own: dict[str, Any] = {"lr": train.learning_rate, "betas": betas, "eps": train.eps, **others}
        if train.optimizer == "adamw":
            return build_optimizer(self._model, "adamw", fused=True, **own)
        rotation: dict[str, Any] = {
            "source": train.rotation_source,
            "geometry": train.rotation_geometry,
            "freq": train.rotation_freq,
        }
        return build_optimizer(self._model, "basis_rotated", **own, **rotation)


def rows_of(windows: Array, rank: int, world_size: int) -> tuple[Array, float]:
    """A rank's rows of a batch, and their part of it; the first row with 0 for a rank that gets none."""
    rows = shared_out(len(windows), rank, world_size)
    mine = windows[rows]
    return (np.ascontiguousarray(mine), len(mine) / len(windows)) if len(mine) else (windows[:1].copy(), 0.0)
