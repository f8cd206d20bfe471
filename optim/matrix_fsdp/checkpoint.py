"""A sharded model as whole tensors by name, apart from its plan: what one world size saves another takes up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from peerloom.optim.matrix_fsdp.links import Links
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
    parameters = {owned.name: owned.parameter.detach() for owned in holdings(model) if owned.is_whole}
    for name, holders in _spread(model).items():
        for held in holders.here:
            whole = holders.bring(held.parameter.detach())
            if whole is not None:
                parameters[name] = whole
    return Share(parameters=parameters, moments=owned_moments(model, optimizer))


def owned_moments(model: nn.Module, optimizer: OwnerOptimizer | None) -> dict[str, Tensor]:
    """The optimizer tensors of this rank's share, for a caller that has the parameters elsewhere; as `owned_share`."""
    moments: dict[str, Tensor] = {}
    for owned in holdings(model):
        if owned.is_whole:
            moments |= {f"{owned.name}/{what}": value for what, value in _state(optimizer, owned.parameter).items()}
    for name, holders in _spread(model).items():
        for held in holders.here:
            for what, value in sorted(_state(optimizer, held.parameter).items()):
                by_rows = value.shape == held.parameter.shape
                whole = holders.bring(value) if by_rows else value if holders.writes else None
                if whole is not None:
                    moments[f"{name}/{what}"] = whole
    return moments


def written_here(model: nn.Module) -> list[str]:
    """Names of the parameters in this rank's share, without a word to the others."""
    whole = [owned.name for owned in holdings(model) if owned.is_whole]
    return whole + [name for name, holders in _spread(model).items() if holders.writes]


def take_up(
    model: nn.Module, optimizer: OwnerOptimizer | None, parameters: Reader, moments: Reader, kept: Iterable[str]
) -> None:
    """Fills what is here of `model`, and the state of `optimizer`, from whole tensors; no rank needs another for it.

    `kept` are the keys of `moments`, "parameter/what". Raises KeyError for a parameter that is not there, ValueError,
    naming it, for one of another shape; nothing is changed then.
    """
    for name, shape in whole_shapes(model).items():
        if (there := parameters.shape(name)) != shape:
            raise ValueError(f"{name} has shape {there} in the checkpoint and {shape} in the model")
    with torch.no_grad():
        for owned in holdings(model):
            owned.parameter.copy_(_part(parameters, owned.name, owned))
    if optimizer is not None:
        take_up_moments(model, optimizer, moments, kept)


def take_up_moments(model: nn.Module, optimizer: OwnerOptimizer, moments: Reader, kept: Iterable[str]) -> None:
    """The optimizer's part of `take_up`: what it had is gone."""
    states: dict[str, list[str]] = {}
    for key in kept:
        states.setdefault(key.rsplit("/", 1)[0], []).append(key)
    for owned in holdings(model):
        if owned.parameter.requires_grad and owned.parameter.numel():
            counters = _counters_device(optimizer, owned.parameter)
            keys = states.get(owned.name, [])
            optimizer.set_state_of(
                owned.parameter, {key.rsplit("/", 1)[1]: _moment(moments, key, owned, counters) for key in keys}
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holders:
    """Who has rows of one spread parameter, and which of them writes it; `here` is what this rank has, if anything."""

    name: str
    here: list[Owned]
    counts: list[int]
    writer: int
    links: Links

    @property
    def writes(self) -> bool:
        return self.links.rank == self.writer

    def bring(self, rows: Tensor) -> Tensor | None:
        """The rows of all, on the writer."""
        whole = self.links.bring_rows(rows, self.counts, self.writer, f"collecting {self.name}")
        return whole if self.writes else None


def _spread(model: nn.Module) -> dict[str, _Holders]:
    """The spread parameters, in an order all ranks have; each goes to one of the ranks with rows of it, in turn."""
    sharded = sharding_of(model)
    if sharded is None:
        return {}
    here = {owned.name: owned for owned in sharded.owned()}
    found: dict[str, _Holders] = {}
    for plan in (unit.plan for unit in sharded.units):
        for name in plan.spread:
            counts = [plan.rows(name, rank).shape[0] for rank in range(sharded.world_size)]
            holders = [rank for rank, count in enumerate(counts) if count]
            found[name] = _Holders(
                name=name,
                here=[here[name]] if name in here else [],
                counts=counts,
                writer=holders[len(found) % len(holders)],
                links=sharded.links,
            )
    return found


def _state(optimizer: OwnerOptimizer | None, parameter: nn.Parameter) -> dict[str, Tensor]:
    return dict(optimizer.state_of(parameter)) if optimizer is not None else {}


def _part(reader: Reader, key: str, owned: Owned) -> Tensor:
    return reader.read(key) if owned.is_whole else reader.read(key, owned.piece.first_row, owned.piece.shape[0])


def _moment(reader: Reader, key: str, owned: Owned, counters: torch.device) -> Tensor:
    """Counters and bases are whole on every rank that holds rows; what has the parameter's shape is cut like it."""
    if reader.shape(key) != owned.whole_shape:
        value = reader.read(key)
        return value.clone().to(counters) if value.dim() == 0 else value.to(owned.parameter.device)
    return _part(reader, key, owned).to(owned.parameter.device)


def _counters_device(optimizer: OwnerOptimizer, parameter: nn.Parameter) -> torch.device:
    """Where the optimizer wants a count of steps: a fused one with the parameter, others on the CPU."""
    for group in optimizer.param_groups:
        if group.get("fused") and any(each is parameter for each in group["params"]):
            return parameter.device
    return torch.device("cpu")
