"""A sharded model as whole tensors by name, apart from its plan: what one world size saves another takes up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from peerloom.optim.matrix_fsdp.optimizers import OwnerOptimizer
from peerloom.optim.matrix_fsdp.runtime import Owned, holdings, sharding_of, whole_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank is to write: whole parameters by name, and optimizer tensors by "parameter/what"."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]


class Reader(Protocol):
    """Whole tensors by key, of which rows can be read alone; both raise KeyError for a key that is not there."""

    def shape(self, key: str) -> tuple[int, ...]: ...
    def read(self, key: str, first: int = 0, rows: int | None = None) -> Tensor: ...


def owned_share(model: nn.Module, optimizer: OwnerOptimizer | None) -> Share:
    """This rank's share; every rank must call it, since rows of spread parameters are brought together on one of them.

    The shares of all ranks are disjoint and hold every parameter once, under its first name. Raises RankLost.
    """
    parameters: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for owned in holdings(model):
        if owned.is_whole:
            parameters[owned.name] = owned.parameter.detach()
            moments |= {f"{owned.name}/{what}": value for what, value in _state(optimizer, owned.parameter).items()}
    _bring_rows_together(model, optimizer, parameters, moments)
    return Share(parameters=parameters, moments=moments)


def take_up(
    model: nn.Module, optimizer: OwnerOptimizer | None, parameters: Reader, moments: Reader, kept: Iterable[str]
) -> None:
    """Fills what is here of `model`, and the state of `optimizer`, from whole tensors; no rank needs another for it.

    `kept` are the keys of `moments`, "parameter/what". Raises KeyError for a parameter that is not there, ValueError,
    naming it, for one of another shape; nothing is changed then.
    """
    states: dict[str, list[str]] = {}
    for key in kept:
        states.setdefault(key.rsplit("/", 1)[0], []).append(key)
    for name, shape in whole_shapes(model).items():
        if (there := parameters.shape(name)) != shape:
            raise ValueError(f"{name} has shape {there} in the checkpoint and {shape} in the model")
    with torch.no_grad():
        for owned in holdings(model):
            owned.parameter.copy_(_part(parameters, owned.name, owned))
            if optimizer is not None and owned.parameter.requires_grad and owned.parameter.numel():
                keys = states.get(owned.name, [])
                optimizer.set_state_of(
                    owned.parameter, {key.rsplit("/", 1)[1]: _moment(moments, key, owned) for key in keys}
                )


def _bring_rows_together(
    model: nn.Module, optimizer: OwnerOptimizer | None, parameters: dict[str, Tensor], moments: dict[str, Tensor]
) -> None:
    """Each spread parameter goes to one of the ranks that hold rows of it, in turn."""
    sharded = sharding_of(model)
    if sharded is None:
        return
    here = {owned.name: owned.parameter for owned in sharded.owned()}
    spread = [(name, unit.plan) for unit in sharded.units for name in unit.plan.spread]
    for at, (name, plan) in enumerate(spread):
        counts = [plan.rows(name, rank).shape[0] for rank in range(sharded.world_size)]
        holders = [rank for rank, count in enumerate(counts) if count]
        if name not in here:
            continue
        parameter, writer = here[name], holders[at % len(holders)]
        tensors = {"": parameter.detach(), **_state(optimizer, parameter)}
        for what, value in sorted(tensors.items()):
            by_rows = value.shape == parameter.shape
            whole = sharded.links.bring_rows(value, counts, writer, f"collecting {name}") if by_rows else value
            if sharded.rank == writer:
                target, key = (moments, f"{name}/{what}") if what else (parameters, name)
                target[key] = whole


def _state(optimizer: OwnerOptimizer | None, parameter: nn.Parameter) -> dict[str, Tensor]:
    return dict(optimizer.state_of(parameter)) if optimizer is not None else {}


def _part(reader: Reader, key: str, owned: Owned) -> Tensor:
    return reader.read(key) if owned.is_whole else reader.read(key, owned.piece.first_row, owned.piece.shape[0])


def _moment(reader: Reader, key: str, owned: Owned) -> Tensor:
    """Counters and bases are whole on every rank that holds rows; what has the parameter's shape is cut like it."""
    if reader.shape(key) != owned.whole_shape:
        value = reader.read(key)
        return value.clone() if value.dim() == 0 else value.to(owned.parameter.device)
    return _part(reader, key, owned).to(owned.parameter.device)
