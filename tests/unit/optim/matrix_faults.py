"""What goes wrong on ranks of MatrixFSDP: refusals before a weight is touched, failing passes, ranks that are lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from peerloom.optim.matrix_fsdp import (
    RankLost,
    ShardingError,
    clip_grad_norm_,
    matrix_fully_shard,
)
from tests.unit.optim.matrix_cases import (
    Case,
    Outcome,
    loss_of,
    make_model,
    make_optimizer,
    mesh_of,
    pieces_of,
    train,
)


def refused(rank: int, ranks: int, odd: tuple[int, ...], how: str, replicas: int = 1) -> tuple[str, bool] | None:
    """Shards with something wrong on the ranks `odd`; the sentence, and whether the weights are as they were."""
    mesh = mesh_of(ranks, replicas)
    if rank >= ranks:
        return None
    case, sharding = Case(), dict[str, Any]()
    version = torch.__version__
    if rank in odd and how == "layers":
        case = Case(layers=3)
    model = make_model(case)
    try:
        if rank in odd:
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
    settings: dict[str, dict[str, Any]] = {
        "plan": {"policy": "scope_greedy"}, "memory": {"memory_limit": 1000},
        "setting": {"sharing": "never"}, "sharing": {"sharing": "always"},
    }  # fmt: skip
    return settings.get(how, {})


def _bytes_of(parameter: Tensor) -> str:
    return repr(parameter.detach().to_dense() if parameter.layout != torch.strided else parameter.detach())


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A group of which one rank, counted in the group, dies or falls silent in the second step."""

    ranks: int = 3
    dies: int = 1
    within: str  # "forward", "backward", "clipping", "silence"
    case: Case = field(default_factory=Case)


LOSSES = {
    "forward": Loss(within="forward", case=Case().sending),
    "backward": Loss(within="backward", dies=2),
    "clipping": Loss(within="clipping", dies=0),
    "broadcast": Loss(within="forward", dies=2, case=Case(sharding={"fan_out": "broadcast"}).sending),
    "replicas": Loss(ranks=4, dies=3, within="backward", case=Case(replicas=2)),
    "silence": Loss(within="silence"),
}


def groups_of_losses() -> dict[str, range]:
    """The ranks of each of LOSSES, one group after the other."""
    groups, begin = {}, 0
    for name, loss in LOSSES.items():
        groups[name] = range(begin, begin + loss.ranks)
        begin += loss.ranks
    return groups


def meets_a_loss(rank: int) -> tuple[int, ...]:
    """Who is lost, as an error that is raised in the second step has it."""
    mine = next(name for name, group in groups_of_losses().items() if rank in group)
    for name, group in groups_of_losses().items():  # each rank must make all meshes
        made = mesh_of(LOSSES[name].ranks, LOSSES[name].case.replicas, begin=group.start)
        if name == mine:
            mesh, loss = made, LOSSES[name]
    case = loss.case
    model = make_model(case)
    sharded = matrix_fully_shard(model, mesh, **case.sharding)
    optimizer = make_optimizer(model, case)
    at = rank - groups_of_losses()[mine].start
    train(sharded, optimizer, range(1), at, loss.ranks, case)
    if loss.within == "silence":
        sharded.links.timeout = timedelta(seconds=1)
    if at == loss.dies:
        if loss.within == "silence":
            return ()
        _die_within(model, loss.within)
    try:
        each = loss_of(model, 1, slice(at, at + 1), loss.ranks)
        each.backward()  # type: ignore[no-untyped-call]
        if loss.within == "clipping" and at == loss.dies:
            os._exit(9)
        clip_grad_norm_(model, 1.0)
        for step in range(2, 20):  # of another replica, it may be missed only now
            train(sharded, optimizer, range(step, step + 1), at, loss.ranks, case)
    except RankLost as error:
        return error.ranks
    raise AssertionError("nobody was missed")


def _die_within(model: nn.Module, within: str) -> None:
    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        if within == "forward":
            os._exit(9)
        if within == "backward":
            output.register_hook(lambda gradient: os._exit(9))  # type: ignore[no-untyped-call]

    model.get_submodule("model.layers.0.mlp").register_forward_hook(watch)
