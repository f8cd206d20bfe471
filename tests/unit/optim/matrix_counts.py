"""What ranks count of a step of MatrixFSDP: calls and bytes, the order of gathers, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from peerloom.optim.matrix_fsdp import (
    OwnerOptimizer,
    Sharing,
    clip_grad_norm_,
    holdings,
    matrix_fully_shard,
)
from peerloom.optim.matrix_fsdp.dtypes import dtypes_of
from peerloom.optim.matrix_fsdp.memory import needed
from peerloom.optim.matrix_fsdp.modules import find_units
from peerloom.optim.matrix_fsdp.runtime import sharding_of
from peerloom.optim.matrix_fsdp.unit import Unit
from tests.benchmarks.matrix_fsdp_methods import METHODS, bytes_of
from tests.benchmarks.matrix_fsdp_model import Size
from tests.benchmarks.matrix_fsdp_model import make_model as make_decoder
from tests.benchmarks.matrix_fsdp_peak import peak_of
from tests.benchmarks.matrix_fsdp_ranks import Figures, counted, windows_of
from tests.unit.optim.matrix_cases import (
    Case,
    loss_of,
    make_model,
    make_optimizer,
    mesh_of,
)


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


def counted_step(rank: int, ranks: int, case: Case) -> dict[str, Any] | None:
    """Operations and bytes of one step, part by part, and operations of the second optimizer step."""
    mesh = mesh_of(ranks, case.replicas)
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
    after, full = replace(sharded.traffic), [unit.is_full for unit in sharded.units]
    loss_of(model, 1, slice(rank, rank + 1), ranks).backward()  # type: ignore[no-untyped-call]
    with counted_calls() as second:
        optimizer.step()
    return {
        "passes": passes, "clipping": clipping, "step": step + second,
        "compared": compared, "traffic": before, "after": after,
        "resident": sum(storage.nbytes() for storage in resident.values()),
        "moments": sum(value.nbytes for value in moments), "full": full,
        "plan": sharded.plan,
    }  # fmt: skip


def order_of_a_step(rank: int, ranks: int, layers: int, reshard: bool) -> list[str] | None:
    """When units begin to be gathered, and when their blocks compute."""
    mesh = mesh_of(ranks)
    if rank >= ranks:
        return None
    model = make_model(Case(layers=layers))
    sharded = matrix_fully_shard(model, mesh, reshard_after_forward=reshard, sharing="never")
    seen: list[str] = []
    for index, unit in enumerate(sharded.units):
        unit.start_open = _told(unit, seen, index)  # type: ignore[method-assign]
        if index:
            unit.module.get_submodule("mlp").register_forward_hook(_computes(seen, index))
    loss_of(model, 0, slice(rank, rank + 1), ranks).backward()  # type: ignore[no-untyped-call]
    return seen


def _told(unit: Unit, seen: list[str], index: int) -> Callable[[], None]:
    begin = unit.start_open

    def start_open() -> None:
        if not unit.is_full:
            seen.append(f"gather {index}")
        begin()

    return start_open


def _computes(seen: list[str], index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        seen.append(f"forward {index}")
        output.register_hook(lambda gradient: seen.append(f"backward {index}"))  # type: ignore[no-untyped-call]

    return hook


SMALL = Size(layers=6, width=64, mlp=256, heads=4, tokens=8)  # next to no activations


def beside_stock(rank: int, ranks: int) -> dict[str, Figures] | None:
    """What this method and stock FSDP2 hold, with Muon, and allocate in a step."""
    mesh = mesh_of(ranks)
    if rank >= ranks:
        return None
    windows, found = windows_of(rank, SMALL), {}
    for name in ("ours", "fsdp2"):
        method = METHODS[name](SMALL, mesh)
        counted(method, windows)  # the first makes the moments
        found[name] = counted(method, windows)
    return found


def peak_beside_estimate(
    rank: int, ranks: int, mp: MixedPrecisionPolicy, dtype: torch.dtype, frozen: str, reshard: bool, replicas: int,
    sharing: Sharing,
) -> tuple[int, int] | None:  # fmt: skip
    """Bytes allocated at once in a step with two moments of all that is trained, and what was counted on."""
    mesh = mesh_of(ranks, replicas)
    if rank >= ranks:
        return None
    model = make_decoder(SMALL).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    dtypes = [dtypes_of(unit, mp) for unit in find_units(model)]
    sharded = matrix_fully_shard(model, mesh, mp=mp, reshard_after_forward=reshard, sharing=sharing)
    layouts, board = [(unit.layout, unit.grad_layout) for unit in sharded.units], sharded.board
    counted_on = needed(layouts, dtypes, sharded.rank, reshard, board.layout if board is not None else None)
    optimizer, windows = make_optimizer(model, Case(matrix="adamw")), windows_of(rank, SMALL)
    for step in range(2):
        with peak_of(sharded.device) as peak:
            model(windows).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            before = _resident(model, optimizer)
    if board is not None:
        before += board.layout.resting[sharded.rank] + sum(board.layout.slot_bytes[sharded.rank])
    return before + peak.bytes, counted_on


def _resident(model: nn.Module, optimizer: OwnerOptimizer) -> int:
    """Bytes of parameters and moments but the board's; a view of one flat tensor has those of all, once."""
    moments = [v for owned in holdings(model) for v in optimizer.state_of(owned.parameter).values()]
    kept = [*model.parameters(), *(value for value in moments if value.dim())]
    sharded = sharding_of(model)
    board = sharded.board if sharded is not None else None
    return bytes_of(kept, but=board.address if board is not None else None)
