"""Sharding a model: plan, comparison between the ranks, and only then the weights."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy

from peerloom.optim.matrix_fsdp.agreement import agree
from peerloom.optim.matrix_fsdp.board import Board, BoardLayout, lay_out_board
from peerloom.optim.matrix_fsdp.boarded import Boarded
from peerloom.optim.matrix_fsdp.carrier import Carrier
from peerloom.optim.matrix_fsdp.dtypes import dtypes_of
from peerloom.optim.matrix_fsdp.errors import ShardingError
from peerloom.optim.matrix_fsdp.host import UNWANTED, Common, common
from peerloom.optim.matrix_fsdp.layout import UnitLayout, lay_out
from peerloom.optim.matrix_fsdp.lifeline import lifeline_of, sever
from peerloom.optim.matrix_fsdp.links import FAN_OUTS, FanOut, Links, ReplicaLinks
from peerloom.optim.matrix_fsdp.memory import needed
from peerloom.optim.matrix_fsdp.modules import UnitModules, find_units, outer_matrices, problem_of
from peerloom.optim.matrix_fsdp.planner import Cost, OwnerPlan, Policy, plan_owners
from peerloom.optim.matrix_fsdp.runtime import ShardedModel, sharding_of
from peerloom.optim.matrix_fsdp.unit import Unit, trained
from peerloom.optim.matrix_fsdp.wired import Wired
from peerloom.optim.matrix_fsdp.wires import wires_of

log = logging.getLogger("peerloom.optim")

Sharing: TypeAlias = Literal["auto", "never"]


def matrix_fully_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    mp: MixedPrecisionPolicy | None = None,
    policy: Policy = "role_greedy",
    cost: Cost = "numel",
    spread_outer: bool = True,
    blocks: Sequence[nn.Module] | None = None,
    fan_out: FanOut | None = None,
    sharing: Sharing = "auto",
    timeout_s: float = 60.0,
    memory_limit: int | None = None,
) -> ShardedModel:
    """Shards `model` in place over the last dimension of `mesh`, whole matrices to owners; every rank must call it.

    A mesh of two dimensions is (replicas, shard): gradients are also averaged over the replicas. Units are one a block
    (`blocks`, by default the model's decoder layers) and one for the rest, which stays open from its forward to its
    backward pass, as the last block does. Without `reshard_after_forward` all do: less is sent, a replica is in memory.
    Each rank's own values of what it owns are kept, so all ranks start from one model if they built equal ones.
    Embeddings and head lie in even shares of rows on all ranks, or with `spread_outer=False` on owners.
    With `mp.param_dtype` owners keep the model's dtype and send the other; gradients travel in `mp.reduce_dtype`.
    With `sharing="auto"` ranks that are all processes on one host's CPU share memory: the model is there once for all
    of them, nothing is gathered, and gradients are read where they were computed (`board`); all forms then need equal
    memory. They try it first: where one rank cannot open the memory of another, all send instead, and the first logs
    why. With "never" they send, as ranks on several hosts or on GPUs do.
    `fan_out` is how a unit is gathered where it is sent, by default as its backend is faster: all sends and receives of
    a unit begun at once, on NCCL as the paper does it; on gloo a broadcast an owner is no faster (the 17 M parameters
    of 16 blocks of width 256, two cores: 84 against 82 ms with 2 ranks, 183 against 156 ms with 4).
    Create optimizers afterwards (`build_optimizer`). `timeout_s` bounds every wait for another rank; on NCCL it
    becomes the timeout of the mesh's groups.
    `memory_limit` is what this rank may use for parameters, gradients, moments and buffers, in bytes (default: a CUDA
    device's free memory; on the CPU no limit).

    Raises ShardingError, the same sentence on all ranks and before any weight is touched: another torch version, model,
    plan or setting on some rank, a parameter that cannot be owned, too little memory. Raises RankLost.
    """
    policy_mp = mp or MixedPrecisionPolicy()
    units, plan, problem = _planned(model, mesh.size(-1), policy, cost, spread_outer, blocks)
    if sharing not in get_args(Sharing):
        problem = problem or f"sharing {sharing!r} is neither auto nor never"
    groups = _links(mesh, timeout_s, fan_out)
    links, device = groups[0], _device(mesh)
    dtypes = [dtypes_of(unit, policy_mp) for unit in units]
    layouts = _layouts(plan, units)
    with common(links, sharing == "auto", device) as there:
        board: Board | None = None
        if plan is not None and not problem:
            layout = lay_out_board(layouts, dtypes, links.world_size) if there.words is not None else None
            limit = memory_limit if memory_limit is not None else _free_memory(device)
            problem = _too_large(needed(layouts, dtypes, links.rank, reshard_after_forward, layout), limit)
            if layout is not None and not problem:
                board, problem = _mapped(there, layout, links.rank)
        agree(groups, device, _facts(units, plan, policy_mp, reshard_after_forward, fan_out, sharing), problem)
    assert plan is not None  # ours: without a plan there was a problem, which agree() has raised
    _watch_over(mesh, groups, board)
    if there.reason not in ("", UNWANTED) and links.rank == 0:
        log.warning("the ranks share no memory and send over gloo instead: %s", there.reason)
    outer = frozenset(outer_matrices(model))
    replicas = ReplicaLinks(mesh.get_group(0), links) if len(groups) > 1 else None
    made = []
    for index, unit in enumerate(units):
        ways = (index, unit.name, layouts[index], dtypes[index])
        carrier: Carrier = Wired(*ways, device, links) if board is None else Boarded(*ways, board, links)
        made.append(Unit(unit, plan.units[index], layouts[index], dtypes[index], links.rank, device, carrier, replicas))
    _move_buffers(model, device)
    return ShardedModel(
        model, plan, made, links, board, reshard_after_forward=reshard_after_forward, mp=policy_mp, outer=outer
    )


def _mapped(there: Common, layout: BoardLayout, rank: int) -> tuple[Board | None, str]:
    """The board, of which nothing is touched yet; or why it cannot be."""
    try:
        return Board(there, layout, rank), ""
    except OSError as error:
        return None, f"{layout.nbytes / 2**30:.2f} GiB of memory for all ranks cannot be mapped: {error}"


def _layouts(plan: OwnerPlan | None, units: Sequence[UnitModules]) -> list[tuple[UnitLayout, UnitLayout]]:
    """Of each unit's parameters, and of its gradients."""
    if plan is None:
        return []
    return [
        (lay_out(planned, planned.shapes), lay_out(planned, trained(unit)))
        for planned, unit in zip(plan.units, units, strict=True)
    ]


def _planned(
    model: nn.Module,
    world_size: int,
    policy: Policy,
    cost: Cost,
    spread_outer: bool,
    blocks: Sequence[nn.Module] | None,
) -> tuple[list[UnitModules], OwnerPlan | None, str]:
    """Units, their plan, and what is wrong with them: it is raised only when all ranks know."""
    if sharding_of(model) is not None:
        return [], None, "this model is sharded already"
    try:
        units = find_units(model, blocks)
        if problem := problem_of(units):
            return units, None, problem
        shapes = {unit.name: {found.name: tuple(found.parameter.shape) for found in unit.found} for unit in units}
        frozen = {found.name for unit in units for found in unit.found if not found.parameter.requires_grad}
        outer = outer_matrices(model) & {name for named in shapes.values() for name in named}
        spread = outer if spread_outer and world_size > 1 else set()
        plan = plan_owners(shapes, world_size, policy, cost=cost, spread=spread, outer=outer, frozen=frozen)
        return units, plan, ""
    except ShardingError as error:
        return [], None, str(error)


def _links(mesh: DeviceMesh, timeout_s: float, fan_out: FanOut | None) -> list[Links]:
    """Of the shard dimension, and of the replicas if there are any."""
    if mesh.ndim not in (1, 2):
        raise ShardingError(f"a mesh has one dimension (shard) or two (replicas, shard), not {mesh.ndim}")
    timeout = timedelta(seconds=timeout_s)
    groups = [mesh.get_group(dimension) for dimension in reversed(range(mesh.ndim))]
    return [Links(group, timeout, fan_out or FAN_OUTS.get(dist.get_backend(group), "p2p")) for group in groups]


def _watch_over(mesh: DeviceMesh, groups: Sequence[Links], board: Board | None) -> None:
    """Bounds what is waited for a rank that is gone, and lets its absence be noticed, all over the mesh."""
    for links in groups:
        if not links.on_gloo:  # whose watchdog has known only the time that ranks may take to meet
            _set_pg_timeout(links.timeout, links.group)
    if mesh.size() > 1 and dist.is_gloo_available():
        lifeline = lifeline_of(mesh.mesh.flatten().tolist(), groups[0].timeout)
        if groups[0].on_gloo and groups[0].world_size > 1:
            groups[0].wires = wires_of(groups[0].group, groups[0].timeout)
        carrying = [links.group for links in groups if links.on_gloo]
        carrying += [links.wires.group for links in groups if links.wires is not None]
        severing: list[Callable[[], None]] = [partial(sever, group) for group in carrying]
        if board is not None:
            severing.append(board.words.close)
        for links in groups:
            links.watch_over(lifeline, severing)


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _facts(
    units: list[UnitModules], plan: OwnerPlan | None, mp: MixedPrecisionPolicy, reshard: bool, *others: str | None
) -> Mapping[str, str]:
    listed = [
        (found.name, tuple(found.parameter.shape), str(found.parameter.dtype), found.parameter.requires_grad)
        for unit in units
        for found in unit.found
    ]
    settings = (reshard, *others, str(mp))
    return {
        "torch version": str(torch.__version__),
        "model": hashlib.sha256(repr(listed).encode()).hexdigest(),
        "plan": plan.checksum() if plan is not None else "",
        "sharding setting": hashlib.sha256(repr(settings).encode()).hexdigest(),
    }


def _too_large(needed: int, limit: int | None) -> str:
    """A sentence when this rank's share cannot fit."""
    if limit is None or needed <= limit:
        return ""
    gib = f"{needed / 2**30:.2f} GiB where {limit / 2**30:.2f} GiB are free"
    return f"the model takes {gib}; use more ranks, a smaller model or a 16-bit param_dtype"


def _free_memory(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
