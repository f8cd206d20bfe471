"""MatrixFSDP and what it is measured against: each trains the same decoder with Muon and AdamW on a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon
from torch.optim._muon import _zeropower_via_newtonschulz

from peerloom.optim.matrix_fsdp import Sharing, build_optimizer, matrix_fully_shard, plan_owners
from tests.benchmarks.matrix_fsdp_model import Decoder, Size, hidden_matrices, make_model

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
COEFFICIENTS, NS_STEPS, NS_EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


class Method:
    """A model and its optimizer step; `held` gives every tensor that stays between steps."""

    def __init__(self, size: Size, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.device = torch.device(mesh.device_type)
        self.model: nn.Module = self.build(make_model(size).to(self.device))

    def build(self, model: Decoder) -> nn.Module:
        raise NotImplementedError

    def optimize(self) -> None:
        raise NotImplementedError

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def held(self) -> list[Tensor]:
        return [_local(parameter) for parameter in self.model.parameters()]

    def held_bytes(self) -> int:
        """Of memory between steps."""
        return bytes_of(self.held())

    def buffer_bytes(self) -> int:
        """Of memory in a step that torch has not allocated."""
        return 0


class Ours(Method):
    """MatrixFSDP as it comes: on one host's CPU its ranks share memory, on GPUs they send."""

    reshard = True
    sharing: Sharing = "auto"

    def build(self, model: Decoder) -> nn.Module:
        self.sharded = matrix_fully_shard(
            model, self.mesh, cost="newton_schulz", reshard_after_forward=self.reshard, sharing=self.sharing
        )
        self.optimizer = build_optimizer(
            model, "muon", lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adamw_lr=ADAMW["lr"],  # type: ignore[arg-type]
        )  # fmt: skip
        return model

    def optimize(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def held(self) -> list[Tensor]:
        return super().held() + _moments(self.optimizer.matrix) + _moments(self.optimizer.adamw)


    def held_bytes(self) -> int:
        """Of memory that all ranks share the part that is this one's own."""
        board = self.sharded.board
        if board is None:
            return super().held_bytes()
        return bytes_of(self.held(), but=board.address) + board.layout.resting[self.rank]

    def buffer_bytes(self) -> int:
        """Its slots for gradients."""
        board = self.sharded.board
        return sum(board.layout.slot_bytes[self.rank]) if board is not None else 0


class OursSending(Ours):
    """MatrixFSDP whose ranks send: a unit is freed after its forward pass and gathered again, as under FSDP2."""

    sharing = "never"


class OursKept(OursSending):
    """MatrixFSDP whose units stay whole from forward to backward pass, for who has the memory of a replica anyway."""

    reshard = False


class Sharded(Method):
    """FSDP2: one `fully_shard` a block, one for the rest; momentum sharded like the weights."""

    def build(self, model: Decoder) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        self.matrices = [parameter for _, parameter in hidden_matrices(model)]
        self.buffers = [torch.zeros_like(_local(parameter)) for parameter in self.matrices]
        self.adamw = _adamw(model)
        return model

    def optimize(self) -> None:
        updates = [self.momentum_update(at) for at in range(len(self.matrices))]
        for parameter, whole in self.orthogonal(updates):
            self.apply(parameter, whole)
        self.adamw.step()

    def momentum_update(self, at: int) -> Tensor:
        gradient = _local(self.matrices[at].grad)
        buffer = self.buffers[at].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(buffer, MOMENTUM)

    def orthogonal(self, updates: list[Tensor]) -> Any:
        """(parameter, its own rows of the orthogonalized update), one after the other."""
        raise NotImplementedError

    def own_rows(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.world_size)[self.rank]

    def apply(self, parameter: nn.Parameter, own: Tensor) -> None:
        rate = LR * max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        _local(parameter).mul_(1 - LR * DECAY).add_(own, alpha=-rate)

    def held(self) -> list[Tensor]:
        return super().held() + self.buffers + _moments(self.adamw)


class GatherEach(Sharded):
    """The usual Muon under FSDP2: every rank gathers every matrix and orthogonalizes it."""

    def orthogonal(self, updates: list[Tensor]) -> Any:
        for parameter, update in zip(self.matrices, updates, strict=True):
            assert isinstance(parameter, DTensor)
            sharded = DTensor.from_local(update, parameter.device_mesh, parameter.placements)
            yield parameter, self.own_rows(newton_schulz(sharded.full_tensor()))


class GatherOnce(Sharded):
    """One all-gather of all updates, then every rank orthogonalizes every matrix."""

    def orthogonal(self, updates: list[Tensor]) -> Any:
        mine = torch.cat([update.flatten() for update in updates])
        everyone = mine.new_empty(self.world_size * mine.numel())
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        rows = everyone.view(self.world_size, -1).split([update.numel() for update in updates], dim=1)
        for parameter, part in zip(self.matrices, rows, strict=True):
            yield parameter, self.own_rows(newton_schulz(part.reshape(parameter.shape)))


class ParameterParallel(Sharded):
    """Each matrix goes to one owner by all-to-all, is orthogonalized there, and its rows go back the same way."""

    def build(self, model: Decoder) -> nn.Module:
        built = super().build(model)
        self.owners = _owners(model, self.world_size)
        return built

    def orthogonal(self, updates: list[Tensor]) -> Any:
        of = [[at for at, owner in enumerate(self.owners) if owner == rank] for rank in range(self.world_size)]
        sent = torch.cat([updates[at].flatten() for ats in of for at in ats])
        sizes = [sum(updates[at].numel() for at in ats) for ats in of]
        mine = sizes[self.rank]
        received = sent.new_empty(mine * self.world_size)
        dist.all_to_all_single(received, sent, [mine] * self.world_size, sizes, group=self.group)
        rows = received.view(self.world_size, -1).split([updates[at].numel() for at in of[self.rank]], dim=1)
        done = [
            newton_schulz(part.reshape(self.matrices[at].shape)).float().reshape(self.world_size, -1)
            for at, part in zip(of[self.rank], rows, strict=True)
        ]
        back = torch.cat(done, dim=1).flatten() if done else sent.new_empty(0)
        own = sent.new_empty(sum(sizes))
        dist.all_to_all_single(own, back, sizes, [mine] * self.world_size, group=self.group)
        order = [at for ats in of for at in ats]
        for at, part in zip(order, own.split([updates[at].numel() for at in order]), strict=True):
            yield self.matrices[at], part.view(updates[at].shape)


class Replicated(Method):
    """DistributedDataParallel, Muon on every rank for every matrix."""

    def build(self, model: Decoder) -> nn.Module:
        parallel = DistributedDataParallel(model, process_group=self.group)
        matrices = [parameter for _, parameter in hidden_matrices(model)]
        self.muon = Muon(matrices, LR, DECAY, MOMENTUM)
        self.adamw = _adamw(model)
        return parallel

    def optimize(self) -> None:
        self.muon.step()
        self.adamw.step()

    def held(self) -> list[Tensor]:
        return super().held() + _moments(self.muon) + _moments(self.adamw)


class OwnersOfReplicas(Replicated):
    """ZeRO-1 by owners: whole parameters everywhere, Muon on the owner alone, which then broadcasts its matrices."""

    def build(self, model: Decoder) -> nn.Module:
        parallel = DistributedDataParallel(model, process_group=self.group)
        owners = _owners(model, self.world_size)
        matrices = [parameter for _, parameter in hidden_matrices(model)]
        self.of = [
            [p for p, owner in zip(matrices, owners, strict=True) if owner == rank] for rank in range(self.world_size)
        ]
        self.sizes = [sum(parameter.numel() for parameter in owned) for owned in self.of]
        self.muon = Muon([{"params": self.of[self.rank]}], LR, DECAY, MOMENTUM)
        self.adamw = _adamw(model)
        return parallel

    def optimize(self) -> None:
        super().optimize()
        mine = torch.cat([parameter.detach().flatten() for parameter in self.of[self.rank]])
        flats = [mine if rank == self.rank else mine.new_empty(size) for rank, size in enumerate(self.sizes)]
        works = [dist.broadcast(f, group=self.group, async_op=True, group_src=r) for r, f in enumerate(flats)]
        for rank, (owned, flat, work) in enumerate(zip(self.of, flats, works, strict=True)):
            work.wait()
            if rank == self.rank:
                continue
            for parameter, part in zip(owned, flat.split([p.numel() for p in owned]), strict=True):
                parameter.detach().copy_(part.view(parameter.shape))


METHODS: dict[str, Callable[[Size, DeviceMesh], Method]] = {
    "ours": Ours,
    "wires": OursSending,
    "kept": OursKept,
    "fsdp2": GatherEach,
    "gather_once": GatherOnce,
    "ddp": Replicated,
    "zero1": OwnersOfReplicas,
    "parameter_parallel": ParameterParallel,
}
TITLES = {
    "fsdp2": "FSDP2, Muon gathers each DTensor",
    "gather_once": "FSDP2, Muon gathers once",
    "ddp": "DDP, Muon on every rank",
    "zero1": "ZeRO-1 by owners",
    "parameter_parallel": "FSDP2, parameter-parallel Muon",
}


def bytes_of(tensors: Sequence[Tensor], but: int | None = None) -> int:
    """Of the storages of tensors, each once, but for the one at that address."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(nbytes for address, nbytes in storages.items() if address != but)


def newton_schulz(update: Tensor) -> Tensor:
    """torch.optim.Muon's own."""
    return _zeropower_via_newtonschulz(update, COEFFICIENTS, NS_STEPS, NS_EPS)


def _owners(model: nn.Module, world_size: int) -> list[int]:
    shapes = {name: tuple(parameter.shape) for name, parameter in hidden_matrices(model)}
    plan = plan_owners({"all": shapes}, world_size, cost="newton_schulz")
    return [plan.owner_of(name) or 0 for name in shapes]


def _adamw(model: nn.Module) -> AdamW:
    hidden = {id(parameter) for _, parameter in hidden_matrices(model)}
    return AdamW([p for p in model.parameters() if id(p) not in hidden], fused=True, **ADAMW)  # type: ignore[arg-type]


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return local


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states: Sequence[dict[str, Any]] = list(optimizer.state.values())
    return [_local(value) for state in states for value in state.values() if isinstance(value, Tensor)]
