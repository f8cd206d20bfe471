"""What ranks do in the tests of MatrixFSDP, beside the same training on one process: a tiny Llama on random tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from peerloom.node.checkpoint_parts import MODEL, MOMENTS, Parts, finish, write_part
from peerloom.optim.matrix_fsdp import (
    OwnerOptimizer,
    ShardedModel,
    build_optimizer,
    clip_grad_norm_,
    holdings,
    matrix_fully_shard,
)
from peerloom.optim.matrix_fsdp.checkpoint import owned_moments, take_up_moments, written_here
from peerloom.optim.matrix_fsdp.runtime import whole_shapes

VOCABULARY, LENGTH = 96, 16
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training: what the model is, how it is sharded, how it is optimized."""

    steps: int = 20
    layers: int = 2
    width: int = 32
    tied: bool = False
    frozen: str = ""  # parameters whose name holds this are not trained
    matrix: str = "muon"
    settings: dict[str, Any] = field(default_factory=dict)
    clip: float = 0.0
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    sharding: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    reduce: torch.dtype | None = None  # of gradients on the way, without `bf16`
    checkpointing: bool | None = None  # use_reentrant, None for none
    replicas: int = 1

    @property
    def sending(self) -> Case:
        """The same with ranks that share no memory."""
        return replace(self, sharding=self.sharding | {"sharing": "never"})


@dataclass(slots=True)
class Outcome:
    """Of one rank, or of the reference: losses a step, and pieces by name with their first row."""

    losses: list[float]
    pieces: dict[str, tuple[int, Array]]
    norms: list[float]
    shares: bool = False  # memory with other ranks


def make_model(case: Case) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=case.width, intermediate_size=2 * case.width, num_hidden_layers=case.layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH, tie_word_embeddings=case.tied,
        use_cache=False, pad_token_id=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(11)
    model = LlamaForCausalLM(config).to(case.dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not case.frozen or case.frozen not in name)
    if case.checkpointing is not None:
        old = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", old)  # its name since transformers 5.24
        enable({"use_reentrant": case.checkpointing})
    made: nn.Module = model.train()
    return made


def make_optimizer(model: nn.Module, case: Case) -> OwnerOptimizer:
    settings = {"lr": 0.02, "adamw_lr": 1e-3} | case.settings
    return build_optimizer(model, case.matrix, **settings)  # type: ignore[arg-type]


def loss_of(model: Callable[..., Any], step: int, sequences: slice, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    windows = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)[sequences]
    logits = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def mesh_of(ranks: int, replicas: int = 1, begin: int = 0) -> DeviceMesh:
    """Of `ranks` ranks from `begin` on; each rank of the default group must call it."""
    listed = torch.arange(begin, begin + ranks)
    if replicas == 1:
        return DeviceMesh("cpu", listed)
    return DeviceMesh("cpu", listed.view(replicas, -1), mesh_dim_names=("replicas", "shard"))


def sharded_run(rank: int, ranks: int, case: Case) -> Outcome | None:
    """`case` on the first `ranks` ranks, a sequence a rank and microbatch."""
    mesh = mesh_of(ranks, case.replicas)
    if rank >= ranks:
        return None
    model = make_model(case)
    mp = MixedPrecisionPolicy(reduce_dtype=case.reduce)
    if case.bf16:
        mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = matrix_fully_shard(model, mesh, mp=mp, **case.sharding)
    optimizer = make_optimizer(model, case)
    losses, norms = train(sharded, optimizer, range(case.steps), rank, ranks, case)
    return Outcome(losses, pieces_of(model), norms, sharded.board is not None)


def train(
    sharded: ShardedModel, optimizer: OwnerOptimizer, steps: range, rank: int, ranks: int, case: Case
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        loss = 0.0
        for micro in range(case.accumulate):
            at = micro * ranks + rank
            with sharded.no_sync() if micro < case.accumulate - 1 else nullcontext():
                each = loss_of(sharded.model, step, slice(at, at + 1), ranks * case.accumulate) / case.accumulate
                each.backward()  # type: ignore[no-untyped-call]
            loss += float(each.detach())
        if case.clip:
            norms.append(float(clip_grad_norm_(sharded.model, case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, norms


def reference_run(ranks: int, case: Case) -> Outcome:
    """The same on one process, in the same order of additions: microbatches of a rank, then ranks, then the mean.

    Ranks are added up in fp32 at least, those of a replica first, and rounded once.
    """
    model = make_model(case)
    adding = torch.promote_types(case.dtype, torch.float32)
    optimizer = make_optimizer(model, case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses, norms = [], []
    for step in range(case.steps):
        sums: list[list[Tensor]] = []  # of each replica
        loss = 0.0
        for rank in range(ranks):
            forward, leaves = _in_bf16(model) if case.bf16 else (model, trained)
            for micro in range(case.accumulate):
                at = micro * ranks + rank
                each = loss_of(forward, step, slice(at, at + 1), ranks * case.accumulate) / case.accumulate
                each.backward()  # type: ignore[no-untyped-call]
                loss += float(each.detach()) / ranks
            gradients = [_taken(leaf).to(adding) for leaf in leaves]
            if rank % (ranks // case.replicas) == 0:
                sums.append(gradients)
            else:
                sums[-1] = [a + b for a, b in zip(sums[-1], gradients, strict=True)]
        total = [sum(each[1:], each[0]) for each in zip(*sums, strict=True)]
        for parameter, gradient in zip(trained, total, strict=True):
            parameter.grad = (gradient / ranks).to(parameter.dtype)
        if case.clip:
            torchs = float(nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
            norms.append(float(clip_grad_norm_(model, case.clip)))
            assert abs(norms[-1] - torchs) <= 16 * torch.finfo(case.dtype).eps * torchs
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return Outcome(losses, pieces_of(model), norms)


def full_batch_run(ranks: int, case: Case) -> Outcome:
    """The same on one process with one batch of all sequences."""
    model = make_model(case)
    optimizer = make_optimizer(model, case)
    losses = []
    for step in range(case.steps):
        loss = loss_of(model, step, slice(None), ranks)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Outcome(losses, pieces_of(model), [])


def ddp_run(rank: int, ranks: int, case: Case, in_rank_order: bool) -> Outcome | None:
    """DistributedDataParallel with the same optimizers; `in_rank_order` replaces its all-reduce by such a sum."""
    group = mesh_of(ranks).get_group() if rank < ranks else mesh_of(ranks)
    if rank >= ranks:
        return None
    assert isinstance(group, dist.ProcessGroup)
    model = make_model(case)
    parallel = DistributedDataParallel(model, process_group=group)
    if in_rank_order:
        # torch compares the hook's annotations, and ours are strings
        parallel.register_comm_hook(group, lambda group, bucket: _mean_in_rank_order(group, bucket))
    optimizer = make_optimizer(model, case)
    losses = []
    for step in range(case.steps):
        loss = loss_of(parallel, step, slice(rank, rank + 1), ranks)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Outcome(losses, pieces_of(model), [])


def _mean_in_rank_order(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    mine = bucket.buffer()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    total = everyone[0].clone()
    for each in everyone[1:]:
        total.add_(each)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(total.div_(len(everyone)))
    return done


def _in_bf16(model: nn.Module) -> tuple[Callable[..., Any], list[nn.Parameter]]:
    """The model's forward pass on bf16 copies of its parameters, and those copies."""
    copies = {name: nn.Parameter(parameter.detach().bfloat16()) for name, parameter in model.named_parameters()}

    def forward(**inputs: Tensor) -> Any:
        return torch.func.functional_call(model, copies, (), inputs)

    return forward, list(copies.values())


def _taken(parameter: nn.Parameter) -> Tensor:
    gradient, parameter.grad = parameter.grad, None
    return gradient if gradient is not None else torch.zeros_like(parameter)


def pieces_of(model: nn.Module) -> dict[str, tuple[int, Array]]:
    return {
        owned.name: (owned.piece.first_row, owned.parameter.detach().to(torch.float64).numpy().copy())
        for owned in holdings(model)
        if owned.parameter.numel()
    }


def whole(outcomes: list[Outcome]) -> dict[str, Array]:
    """Parameters put together from the pieces of all ranks; AssertionError when a row is there twice or not at all."""
    found: dict[str, list[tuple[int, Array]]] = {}
    for outcome in outcomes:
        for name, piece in outcome.pieces.items():
            found.setdefault(name, []).append(piece)
    joined: dict[str, Array] = {}
    for name, pieces in found.items():
        pieces.sort(key=lambda piece: piece[0])
        at = 0
        for first, rows in pieces:
            assert first == at, f"{name}: row {at} is missing or there twice"
            at += rows.shape[0]
        joined[name] = np.concatenate([rows for _, rows in pieces])
    return joined


# ---- what ranks do in the other tests


GLOBAL_BATCH = 12  # a step, of every world size


def continued(
    rank: int, ranks: int, case: Case, steps: range, source: Path | None, target: Path | None
) -> list[float] | None:
    """Losses of `steps` with a schedule, from the checkpoint `source`, written to `target` after them."""
    mesh = mesh_of(ranks, case.replicas)
    if rank >= ranks:
        return None
    model = make_model(case)
    sharded = matrix_fully_shard(model, mesh)
    optimizer = make_optimizer(model, case)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if source is not None:
        take_up(source, model, optimizer)
    scheduler.last_epoch = steps.start
    for group, rate in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = rate / (1 + steps.start)
    share = GLOBAL_BATCH // ranks
    losses = []
    for step in steps:
        loss = loss_of(model, step, slice(rank * share, (rank + 1) * share), GLOBAL_BATCH)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    if target is not None:
        write(target, model, optimizer, rank, mesh)
    assert not any(unit.is_full for unit in sharded.units) or sharded.world_size == 1
    return losses


def write(folder: Path, model: nn.Module, optimizer: OwnerOptimizer, rank: int, mesh: DeviceMesh) -> None:
    """A checkpoint as a node's ranks write it: parameters from memory that all share, moments by who owns them."""
    shapes, starts, numel = whole_shapes(model), dict[str, int](), 0
    for name, shape in shapes.items():
        starts[name] = numel
        numel += torch.Size(shape).numel()
    dtype = next(model.parameters()).dtype
    if rank == 0:
        folder.mkdir()
        with (folder / "shared").open("wb") as file:  # from_file sets the first byte of one that is too short to 0
            file.truncate(numel * dtype.itemsize)
    _meet(mesh)
    flat = torch.from_file(str(folder / "shared"), shared=True, size=numel, dtype=dtype)
    for owned in holdings(model):
        whole = flat[starts[owned.name] :][: torch.Size(owned.whole_shape).numel()].view(owned.whole_shape)
        rows = slice(owned.piece.first_row, owned.piece.first_row + owned.piece.shape[0])
        whole[rows].copy_(owned.parameter.detach())
    _meet(mesh)
    ends = {name: start + torch.Size(shapes[name]).numel() for name, start in starts.items()}
    parameters = {name: flat[starts[name] : ends[name]].view(shapes[name]) for name in written_here(model)}
    kinds = {MODEL: parameters, MOMENTS: owned_moments(model, optimizer)}
    if rank < (shards := mesh.size(-1)):  # of the first replica: the others have the same
        (folder / f"{rank}.json").write_text(json.dumps(write_part(folder, rank, shards, kinds)))
    _meet(mesh)
    if rank == 0:
        (folder / "shared").unlink()
        finish(folder, {k: v for path in folder.glob("*.json") for k, v in _taken_away(path).items()}, model.config)
    _meet(mesh)


def take_up(folder: Path, model: nn.Module, optimizer: OwnerOptimizer) -> None:
    """What is here of a model, sharded or plain, and its optimizer, from such a checkpoint."""
    with Parts(folder, MODEL) as parameters, Parts(folder, MOMENTS) as moments, torch.no_grad():
        for owned in holdings(model):
            owned.parameter.copy_(parameters.read(owned.name, owned.piece.first_row, owned.piece.shape[0]))
        take_up_moments(model, optimizer, moments, moments.keys())


def _meet(mesh: DeviceMesh) -> None:
    for dimension in range(mesh.ndim):
        dist.barrier(group=mesh.get_group(dimension))


def _taken_away(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    path.unlink()
    return found
