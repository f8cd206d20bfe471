"""What ranks do in the tests of MatrixFSDP, beside the same training on one process: a tiny Llama on random tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
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
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from peerloom.node import matrix_checkpoint
from peerloom.optim.matrix_fsdp import (
    OwnerOptimizer,
    RankLost,
    ShardedModel,
    ShardingError,
    build_optimizer,
    clip_grad_norm_,
    holdings,
    matrix_fully_shard,
)

VOCABULARY, LENGTH = 96, 16
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training: what the model is, how it is sharded, how it is optimized."""

    steps: int = 20
    layers: int = 2
    tied: bool = False
    frozen: str = ""  # parameters whose name holds this are not trained
    matrix: str = "muon"
    settings: dict[str, Any] = field(default_factory=dict)
    clip: float = 0.0
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    sharding: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    checkpointing: bool | None = None  # use_reentrant, None for none
    replicas: int = 1


@dataclass(slots=True)
class Outcome:
    """Of one rank, or of the reference: losses a step, and pieces by name with their first row."""

    losses: list[float]
    pieces: dict[str, tuple[int, Array]]
    norms: list[float]


def make_model(case: Case) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=case.layers,
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


def mesh_of(ranks: int, replicas: int = 1) -> DeviceMesh:
    """Of the first `ranks` of all; each rank of the default group must call it."""
    if replicas == 1:
        return DeviceMesh("cpu", torch.arange(ranks))
    return DeviceMesh("cpu", torch.arange(ranks).view(replicas, -1), mesh_dim_names=("replicas", "shard"))


def sharded_run(rank: int, ranks: int, case: Case) -> Outcome | None:
    """`case` on the first `ranks` ranks, a sequence a rank and microbatch."""
    mesh = mesh_of(ranks, case.replicas)
    if rank >= ranks:
        return None
    model = make_model(case)
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.bf16 else None
    sharded = matrix_fully_shard(model, mesh, mp=mp, **case.sharding)
    optimizer = make_optimizer(model, case)
    losses, norms = train(sharded, optimizer, range(case.steps), rank, ranks, case)
    return Outcome(losses, pieces_of(model), norms)


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
    """The same on one process, in the same order of additions: microbatches of a rank, then ranks, then the mean."""
    model = make_model(case)
    optimizer = make_optimizer(model, case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses, norms = [], []
    for step in range(case.steps):
        total: list[Tensor] = []
        loss = 0.0
        for rank in range(ranks):
            forward, leaves = _in_bf16(model) if case.bf16 else (model, trained)
            for micro in range(case.accumulate):
                at = micro * ranks + rank
                each = loss_of(forward, step, slice(at, at + 1), ranks * case.accumulate) / case.accumulate
                each.backward()  # type: ignore[no-untyped-call]
                loss += float(each.detach()) / ranks
            gradients = [_taken(leaf).to(case.dtype) for leaf in leaves]
            total = gradients if rank == 0 else [a + b for a, b in zip(total, gradients, strict=True)]
        for parameter, gradient in zip(trained, total, strict=True):
            parameter.grad = gradient / ranks
        if case.clip:
            torchs = float(nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
            norms.append(float(clip_grad_norm_(model, case.clip)))
            assert abs(norms[-1] - torchs) <= 1e-6 * torchs
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


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Names of the torch.distributed operations that are started inside."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[str] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if str(function).startswith("c10d."):
                calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with Counting():
        yield calls


# ---- what ranks do in the other tests


def counted_step(rank: int, ranks: int, case: Case) -> dict[str, Any] | None:
    """Operations and bytes of one step, part by part."""
    mesh = mesh_of(ranks)
    if rank >= ranks:
        return None
    model = make_model(case)
    sharded = matrix_fully_shard(model, mesh, **case.sharding)
    optimizer = make_optimizer(model, case)
    compared = sharded.traffic.messages
    with counted_calls() as passes:
        loss = loss_of(model, 0, slice(rank, rank + 1), ranks)
        loss.backward()  # type: ignore[no-untyped-call]
    before = replace(sharded.traffic)
    with counted_calls() as clipping:
        clip_grad_norm_(model, 1.0)
    with counted_calls() as step:
        optimizer.step()
    optimizer.zero_grad()
    resident = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in model.parameters()}
    moments = [v for o in holdings(model) for v in optimizer.state_of(o.parameter).values() if v.dim()]
    return {
        "passes": passes, "clipping": clipping, "step": step,
        "compared": compared, "traffic": before, "after": replace(sharded.traffic),
        "resident": sum(storage.nbytes() for storage in resident.values()),
        "moments": sum(value.nbytes for value in moments), "full": [unit.is_full for unit in sharded.units],
        "plan": sharded.plan,
    }  # fmt: skip


def refused(rank: int, ranks: int, odd: int, how: str) -> tuple[str, bool] | None:
    """Shards with something wrong on rank `odd`; the sentence, and whether the weights are as they were."""
    mesh = mesh_of(ranks)
    if rank >= ranks:
        return None
    case, sharding = Case(), dict[str, Any]()
    version = torch.__version__
    if rank == odd and how == "layers":
        case = Case(layers=3)
    model = make_model(case)
    try:
        if rank == odd:
            sharding = _spoil(model, how, mesh)
        before = [(id(parameter), _bytes_of(parameter)) for parameter in model.parameters()]
        matrix_fully_shard(model, mesh, **sharding)
    except ShardingError as error:
        return str(error), before == [(id(parameter), _bytes_of(parameter)) for parameter in model.parameters()]
    finally:
        torch.__version__ = version
    return "", True


def _spoil(model: nn.Module, how: str, mesh: DeviceMesh) -> dict[str, Any]:
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    weight = layer.get_parameter("weight").detach()
    spoilt: dict[str, Callable[[], Tensor]] = {
        "view": lambda: torch.zeros(2, *weight.shape)[0],
        "strided": lambda: weight.T.contiguous().T,
        "sparse": weight.to_sparse,
        "complex": lambda: weight.to(torch.complex64),
        "dtensor": lambda: DTensor.from_local(weight, mesh, [Replicate()], run_check=False),
        "shared": lambda: model.get_parameter("model.layers.0.mlp.up_proj.weight").detach(),
        "half": weight.half,
    }
    if how in spoilt:
        layer.weight = nn.Parameter(spoilt[how]())
    if how == "version":
        torch.__version__ = "2.0.0"  # type: ignore[assignment]
    return {"policy": "scope_greedy"} if how == "plan" else {"memory_limit": 1000} if how == "memory" else {}


def _bytes_of(parameter: Tensor) -> str:
    return repr(parameter.detach().to_dense() if parameter.layout != torch.strided else parameter.detach())


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
        assert matrix_checkpoint.load(source, model, optimizer) == {"step": steps.start}
        scheduler.last_epoch = steps.start
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
        matrix_checkpoint.save(target, model, optimizer, {"step": steps.stop})
    assert not any(unit.is_full for unit in sharded.units) or sharded.world_size == 1
    return losses


def interrupted(rank: int, ranks: int, case: Case) -> Outcome | None:
    """A training with an evaluation and passes that fail in between: neither may leave a trace."""
    mesh = mesh_of(ranks)
    if rank >= ranks:
        return None
    model = make_model(case)
    sharded = matrix_fully_shard(model, mesh)
    optimizer = make_optimizer(model, case)
    losses: list[float] = []
    for step in range(case.steps):
        with torch.no_grad():
            loss_of(model, 500 + step, slice(0, 1), 1)
        _fail_in_forward(model)
        _fail_in_backward(model)
        losses += train(sharded, optimizer, range(step, step + 1), rank, ranks, case)[0]
    return Outcome(losses, pieces_of(model), [])


def _fail_in_forward(model: nn.Module) -> None:
    def stop(*_: object) -> None:
        raise InterruptedError

    with model.get_submodule("model.layers.1.mlp").register_forward_hook(stop), suppress(InterruptedError):
        loss_of(model, 0, slice(0, 1), 1)


def _fail_in_backward(model: nn.Module) -> None:
    def stop(gradient: Tensor) -> None:
        raise InterruptedError

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(stop)  # type: ignore[no-untyped-call]

    with model.get_submodule("model.layers.0.mlp").register_forward_hook(watch), suppress(InterruptedError):
        loss_of(model, 0, slice(0, 1), 1).backward()  # type: ignore[no-untyped-call]


def meets_a_loss(rank: int, dies: int, hangs: int) -> tuple[int, ...]:
    """Ranks 0-2 lose `dies` in the second step; ranks 3 and 4 wait for `hangs`, which trains no more. Those named."""
    groups = (range(3), range(3, 5))
    meshes = [DeviceMesh("cpu", torch.tensor(list(group))) for group in groups]
    mine = 0 if rank in groups[0] else 1
    model = make_model(Case())
    sharded = matrix_fully_shard(model, meshes[mine])
    optimizer = make_optimizer(model, Case())
    train(sharded, optimizer, range(1), sharded.rank, sharded.world_size, Case())
    if mine == 1:
        sharded.links.timeout = timedelta(seconds=1)
    if rank == dies:
        os._exit(9)
    if rank == hangs:
        return ()
    try:
        train(sharded, optimizer, range(1, 2), sharded.rank, sharded.world_size, Case())
    except RankLost as error:
        return error.ranks
    raise AssertionError("nobody was missed")
