"""MatrixFSDP (arXiv 2607.05895): whole matrices, each at rest on one rank, gathered around a unit's computation.

A step: a unit is gathered from its owners before its forward pass, and again before its backward pass if it was freed;
gradients go to the owners, as a mean, while the next unit computes; the optimizer then has nothing to send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from peerloom.optim.matrix_fsdp.agreement import agree
from peerloom.optim.matrix_fsdp.errors import ShardingError
from peerloom.optim.matrix_fsdp.links import FanOut, Links, ReplicaLinks, Traffic
from peerloom.optim.matrix_fsdp.modules import UnitModules, find_units, outer_matrices, problem_of
from peerloom.optim.matrix_fsdp.planner import Cost, OwnerPlan, Piece, Policy, plan_owners
from peerloom.optim.matrix_fsdp.unit import Dtypes, Unit

_ATTRIBUTE = "_matrix_fsdp"
_NO_BACKWARD = -1  # the id of the graph task outside of any backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """One parameter, or the rows of it, that this rank owns: what the optimizer sees."""

    name: str
    piece: Piece
    whole_shape: tuple[int, ...]
    parameter: nn.Parameter

    @property
    def is_whole(self) -> bool:
        return self.piece.shape == self.whole_shape


class ShardedModel:
    """A model whose parameters rest on their owners; call the model itself, as before."""

    def __init__(
        self, model: nn.Module, plan: OwnerPlan, units: list[Unit], links: Links, *, reshard_after_forward: bool,
        mp: MixedPrecisionPolicy, outer: frozenset[str], replica_rank: int,
    ) -> None:  # fmt: skip
        self.model, self.plan, self.units, self.links = model, plan, units, links
        self.outer, self.replica_rank = outer, replica_rank
        self._reshard, self._mp = reshard_after_forward, mp
        self._in_backward = False
        self._sync = True
        self._reducing: Unit | None = None
        self._awaited: dict[int, set[str]] = {}  # of each unit: gradients of this backward pass still to come
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._before_forward(index), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self._after_forward(index))
            unit.on_gradient(self._when_taken(index))

    @property
    def rank(self) -> int:
        return self.links.rank

    @property
    def world_size(self) -> int:
        return self.links.world_size

    @property
    def device(self) -> torch.device:
        return self.units[0].device

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far."""
        return self.links.traffic

    def owned(self) -> list[Owned]:
        """What this rank owns, in model order of the units; empty where there are more ranks than roles."""
        return [
            Owned(name=name, piece=piece, whole_shape=unit.plan.shapes[name], parameter=unit.sharded[name])
            for unit in self.units
            for name, piece in unit.pieces.items()
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add to the local gradients; the next one outside sends the sum to the owners."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # ---- forward

    def _before_forward(self, index: int) -> Callable[..., Any]:
        unit = self.units[index]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index == 0 and torch._C._current_graph_task_id() == _NO_BACKWARD:
                self._reset()
            self._open(index, -1 if self._in_backward else 1)  # in a backward pass this is a recomputation
            if unit.has_frozen and not self._in_backward and torch.is_grad_enabled():
                self._watch_inputs(unit, [*_tensors(args), *_tensors(kwargs)])
            if self._mp.param_dtype is None or not self._mp.cast_forward_inputs:
                return None
            return _cast(args, self._mp.param_dtype), _cast(kwargs, self._mp.param_dtype)

        return hook

    def _after_forward(self, index: int) -> Callable[..., Any]:
        unit = self.units[index]

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if self._in_backward:
                return None
            with_graph = torch.is_grad_enabled()
            if index == 0 and self._mp.output_dtype is not None:
                output = _cast(output, self._mp.output_dtype)
            for tensor in _tensors(output) if with_graph else ():
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._before_backward(index))
            # the rest of the model, with its head, is needed again at once, as in FSDP2
            if not with_graph or (self._reshard and index > 0):
                unit.close()
            return output

        return hook

    def _open(self, index: int, towards: int) -> None:
        """Opens a unit and starts to gather the one that comes after it."""
        self.units[index].open()
        following = index + towards
        if towards < 0 and index == 0:
            following = len(self.units) - 1
        if 0 <= following < len(self.units) and following != index and not (towards < 0 and following == 0):
            self.units[following].start_open()

    def _reset(self) -> None:
        """Closes what an unfinished pass left open: its values may be old by now, its gradients are not whole."""
        for unit in self.units:
            unit.close()
            if self._in_backward:
                unit.drop_gradients()
        self._in_backward, self._reducing = False, None

    # ---- backward

    def _before_backward(self, index: int) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._awaited = {at: set(unit.trainable) for at, unit in enumerate(self.units)}
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # type: ignore[attr-defined]
        self._open(index, -1)

    def _when_taken(self, index: int) -> Callable[[str], None]:
        unit = self.units[index]

        def taken(name: str) -> None:
            awaited = self._awaited.get(index, set())
            awaited.discard(name)
            if awaited:
                return
            if self._sync:
                self._reduce(unit)
            if not unit.has_frozen:  # a frozen parameter may still be needed for the gradient of the input
                unit.close()

        return taken

    def _watch_inputs(self, unit: Unit, tensors: list[Tensor]) -> None:
        """Closes a unit with frozen parameters once the gradients of all its inputs are there."""
        waiting = [tensor for tensor in tensors if tensor.requires_grad]
        left = len(waiting)

        def hook(gradient: Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0 and unit is not self.units[0]:
                unit.close()

        for tensor in waiting:
            tensor.register_hook(hook)

    def _reduce(self, unit: Unit) -> None:
        """One reduction is under way at a time, so that at most two units' gradients are in memory."""
        if unit.has_reduced:
            return
        before, self._reducing = self._reducing, unit
        unit.start_reduce()
        if before is not None:
            before.finish_reduce()

    def _after_backward(self) -> None:
        self._in_backward = False
        if self._sync:
            for unit in reversed(self.units):
                if self._awaited_by(unit):
                    self._reduce(unit)
            if self._reducing is not None:
                self._reducing.finish_reduce()
                self._reducing = None
        for unit in self.units:
            unit.close()

    def _awaited_by(self, unit: Unit) -> bool:
        """Whether a unit's gradients are incomplete at the end: a parameter was not used, on this rank at least."""
        return bool(self._awaited[self.units.index(unit)])


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
    timeout_s: float = 60.0,
    memory_limit: int | None = None,
) -> ShardedModel:
    """Shards `model` in place over the last dimension of `mesh`, whole matrices to owners; every rank must call it.

    A mesh of two dimensions is (replicas, shard): gradients are also averaged over the replicas. Units are one a block
    (`blocks`, by default the model's decoder layers) and one for the rest, which stays open from its forward to its
    backward pass. Each rank's own values of what it owns are kept, so all ranks start from one model if they built
    equal ones. Embeddings and head lie in even shares of rows on all ranks, or with `spread_outer=False` on owners. With
    `mp.param_dtype` owners keep the model's dtype and send the other; gradients travel in `mp.reduce_dtype`. Create
    optimizers afterwards (`build_optimizer`). `timeout_s` bounds every wait for another rank on gloo. `memory_limit`
    is what this rank may use for parameters, gradients, moments and buffers, in bytes (default: a CUDA device's free
    memory; on the CPU no limit).

    Raises ShardingError, the same sentence on all ranks and before any weight is touched: another torch version, model,
    plan or setting on some rank, a parameter that cannot be owned, too little memory. Raises RankLost.
    """
    policy_mp = mp or MixedPrecisionPolicy()
    units, plan, problem = _planned(model, mesh.size(-1), policy, cost, spread_outer, blocks)
    groups = _links(mesh, timeout_s, fan_out)
    device = _device(mesh)
    if plan is not None and not problem:
        limit = memory_limit if memory_limit is not None else _free_memory(device)
        problem = _too_large(plan, units, policy_mp, groups[0].rank, limit)
    agree(groups, device, _facts(units, plan, policy_mp, reshard_after_forward, fan_out), problem)
    assert plan is not None  # ours: without a plan there was a problem, which agree() has raised
    outer = frozenset(outer_matrices(model))
    replicas = ReplicaLinks(mesh.get_group(0), groups[0]) if mesh.ndim == 2 else None
    made = [
        Unit(index, unit, plan.units[index], _dtypes(unit, policy_mp), device, groups[0], replicas)
        for index, unit in enumerate(units)
    ]
    _move_buffers(model, device)
    sharded = ShardedModel(
        model, plan, made, groups[0], reshard_after_forward=reshard_after_forward, mp=policy_mp, outer=outer,
        replica_rank=mesh.get_local_rank(0) if mesh.ndim == 2 else 0,
    )  # fmt: skip
    setattr(model, _ATTRIBUTE, sharded)
    return sharded


def sharding_of(model: nn.Module) -> ShardedModel | None:
    """What `matrix_fully_shard` made of this model; None for a plain one."""
    found: ShardedModel | None = getattr(model, _ATTRIBUTE, None)
    return found


def _planned(
    model: nn.Module, world_size: int, policy: Policy, cost: Cost, spread_outer: bool, blocks: Sequence[nn.Module] | None
) -> tuple[list[UnitModules], OwnerPlan | None, str]:
    """Units, their plan, and what is wrong with them: it is raised only when all ranks know."""
    if sharding_of(model) is not None:
        return [], None, "this model is sharded already"
    try:
        units = find_units(model, blocks)
        if problem := problem_of(units):
            return units, None, problem
        shapes = {unit.name: {found.name: tuple(found.parameter.shape) for found in unit.found} for unit in units}
        here = {name for named in shapes.values() for name in named}
        spread = outer_matrices(model) & here if spread_outer and world_size > 1 else set()
        return units, plan_owners(shapes, world_size, policy, cost=cost, spread=spread), ""
    except ShardingError as error:
        return [], None, str(error)


def _links(mesh: DeviceMesh, timeout_s: float, fan_out: FanOut | None) -> list[Links]:
    """Of the shard dimension, and of the replicas if there are any."""
    if mesh.ndim not in (1, 2):
        raise ShardingError(f"a mesh has one dimension (shard) or two (replicas, shard), not {mesh.ndim}")
    timeout = timedelta(seconds=timeout_s)
    return [Links(mesh.get_group(dimension), timeout, fan_out or "p2p") for dimension in reversed(range(mesh.ndim))]


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _facts(
    units: list[UnitModules], plan: OwnerPlan | None, mp: MixedPrecisionPolicy, reshard: bool, fan_out: str | None
) -> Mapping[str, str]:
    listed = [
        (found.name, tuple(found.parameter.shape), str(found.parameter.dtype), found.parameter.requires_grad)
        for unit in units
        for found in unit.found
    ]
    settings = (reshard, fan_out, str(mp))
    return {
        "torch version": str(torch.__version__),
        "model": hashlib.sha256(repr(listed).encode()).hexdigest(),
        "plan": plan.checksum() if plan is not None else "",
        "sharding setting": hashlib.sha256(repr(settings).encode()).hexdigest(),
    }


def _dtypes(unit: UnitModules, mp: MixedPrecisionPolicy) -> Dtypes:
    rest = unit.found[0].parameter.dtype if unit.found else torch.float32
    forward = mp.param_dtype or rest
    return Dtypes(rest=rest, forward=forward, reduce=mp.reduce_dtype or forward)


def _too_large(
    plan: OwnerPlan, units: list[UnitModules], mp: MixedPrecisionPolicy, rank: int, limit: int | None
) -> str:
    """A sentence when this rank's share cannot fit: at rest values, gradients and two moments; open, two units."""
    if limit is None:
        return ""
    dtypes = [_dtypes(unit, mp) for unit in units]
    at_rest = sum(4 * unit.owned_numel(rank) * d.rest.itemsize for unit, d in zip(plan.units, dtypes, strict=True))
    full = [unit.numel * (d.forward.itemsize + d.reduce.itemsize) for unit, d in zip(plan.units, dtypes, strict=True)]
    needed = at_rest + full[0] + sum(sorted(full[1:])[-2:])
    if needed <= limit:
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


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists, mappings and dataclasses, a transformers output among them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for slot in fields(value):
            yield from _tensors(getattr(value, slot.name))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with its floating-point tensors in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict) and type(value) is not dict:  # a transformers output: attributes follow its items
        for key in list(value):
            value[key] = _cast(value[key], dtype)
        return value
    if isinstance(value, dict):
        return {key: _cast(each, dtype) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(each, dtype) for each in value)
    return value
