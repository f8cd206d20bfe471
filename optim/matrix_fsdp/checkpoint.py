"""What a rank saves of a sharded model: whole tensors by name, apart from its plan, for any world size to take up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from peerloom.optim.matrix_fsdp.links import Links
from peerloom.optim.matrix_fsdp.optimizers import OwnerOptimizer
from peerloom.optim.matrix_fsdp.runtime import Owned, holdings, sharding_of


class Reader(Protocol):
    """Whole tensors by key, of which rows can be read alone; both raise KeyError for a key that is not there."""

    def shape(self, key: str) -> tuple[int, ...]: ...
    def read(self, key: str, first: int = 0, rows: int | None = None) -> Tensor: ...


def owned_moments(model: nn.Module, optimizer: OwnerOptimizer | None) -> dict[str, Tensor]:
    """This rank's share of the optimizer's tensors, whole, by "parameter/what".

    Every rank must call it, since rows of spread parameters are brought together on one of them; the shares of all
    ranks are disjoint. Raises RankLost.
    """
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
    """Names of the parameters whose tensors are in this rank's share, without a word to the others.

    Those of all ranks are every parameter once, under its first name.
    """
    whole = [owned.name for owned in holdings(model) if owned.is_whole]
    return whole + [name for name, holders in _spread(model).items() if holders.writes]


def take_up_moments(model: nn.Module, optimizer: OwnerOptimizer, moments: Reader, kept: Iterable[str]) -> None:
    """Fills the state of `optimizer` as far as it is owned here; what it had is gone. No rank needs another for it.

    `kept` are the keys of `moments`, "parameter/what".
    """
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
