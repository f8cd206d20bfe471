"""What stands in a model: its units, its parameters with all their places, and which of them are hidden matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from peerloom.optim.matrix_fsdp.errors import ShardingError

ROOT = "rest"  # the unit of everything outside the blocks

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Found:
    """One parameter and every (module, attribute) it stands at: several where it is tied."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass(slots=True)
class UnitModules:
    """One unit before sharding: the module whose calls open and close it, and its parameters in model order."""

    name: str
    module: nn.Module
    found: list[Found]


def find_units(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> list[UnitModules]:
    """The rest of the model first, then one unit a block; a parameter that two units share belongs to the rest.

    Without `blocks` they are the elements of the model's largest ModuleList of equal classes, as in decoders; a model
    with no such list is one unit. Raises ShardingError for a block that is not in the model.
    """
    chosen = list(blocks) if blocks is not None else _decoder_blocks(model)
    names = {id(module): name for name, module in model.named_modules()}
    for block in chosen:
        if id(block) not in names:
            raise ShardingError(f"a block of class {type(block).__name__} is not a part of the model")
    found = _parameters(model)
    inside = [{id(module) for module in block.modules()} for block in chosen]
    homes = {name: _home(each, inside) for name, each in found.items()}
    rest = UnitModules(ROOT, model, [each for name, each in found.items() if homes[name] is None])
    return [rest] + [
        UnitModules(names[id(block)], block, [each for name, each in found.items() if homes[name] == at])
        for at, block in enumerate(chosen)
    ]


def outer_matrices(model: nn.Module) -> set[str]:
    """Names of the embeddings' and the output head's weights, which AdamW trains."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outer.add(id(head.weight))
    return {name for name, parameter in model.named_parameters() if id(parameter) in outer}


def problem_of(units: Sequence[UnitModules]) -> str:
    """A sentence about the first parameter that cannot be sharded, "" when all can."""
    memory: dict[int, str] = {}
    for unit in units:
        for each in unit.found:
            if reason := _reason(each.parameter):
                return f"parameter {each.name} {reason}"
            other = memory.setdefault(each.parameter.data_ptr(), each.name) if each.parameter.numel() else each.name
            if other != each.name:
                return f"parameter {each.name} shares its memory with {other}; tie them as one parameter object"
        dtypes = {each.parameter.dtype for each in unit.found}
        if len(dtypes) > 1:
            listed = ", ".join(sorted(str(dtype) for dtype in dtypes))
            return f"unit {unit.name} mixes {listed}; convert the model to one dtype"
    return ""


def _reason(parameter: nn.Parameter) -> str:
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        return "is a DTensor: another scheme shards it already"
    if tensor.layout != torch.strided:
        return "is sparse; only dense parameters can be owned"
    if tensor.is_complex():
        return "is complex; split it into two real parameters"
    if tensor.dtype not in _DTYPES:
        return f"is of {tensor.dtype}; only floating-point parameters can be owned"
    if tensor.is_meta:
        return "is on the meta device; give it values first"
    if tensor.dim() == 0:
        return "has no dimension; make it a vector of one element"
    if not tensor.is_contiguous():
        return "is not contiguous; call .contiguous() on it first"
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        return "is a view into a larger tensor; shard the model before its parameters are flattened"
    return ""


def _parameters(model: nn.Module) -> dict[str, Found]:
    """By first name, each parameter object once."""
    found: dict[str, Found] = {}
    names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = names.setdefault(id(parameter), f"{prefix}.{attribute}" if prefix else attribute)
            found.setdefault(name, Found(name, parameter)).places.append((module, attribute))
    return found


def _home(found: Found, inside: Sequence[set[int]]) -> int | None:
    """The one block that holds every place of a parameter."""
    homes = {next((at for at, ids in enumerate(inside) if id(module) in ids), None) for module, _ in found.places}
    return homes.pop() if len(homes) == 1 else None


def _decoder_blocks(model: nn.Module) -> list[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(each) for each in module}) == 1
    ]
    return max(lists, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters()), default=[])
