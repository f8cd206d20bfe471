"""What a unit needs of the memory that it lies in, and of the way to other ranks: `wired` and `boarded` are two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from peerloom.optim.matrix_fsdp.layout import Parcel
from peerloom.optim.matrix_fsdp.planner import Piece, Shape

_CPU_CHUNK = 1 << 15  # elements

PartsOf: TypeAlias = Callable[[Parcel], list[Tensor]]  # the gradients of a parcel's pieces, flat, once


class Carrier(Protocol):
    """Holds a unit's values and brings them, and its gradients, to where they are needed.

    All but `at_rest`, `whole` and `publish` raise RankLost.
    """

    def at_rest(self, piece: Piece, start: int) -> Tensor:
        """Where an owned piece rests, in its shape; `start` is its place in `UnitLayout.owned`."""

    def whole(self, start: int, shape: Shape) -> Tensor:
        """A parameter in the full buffer, with a version counter of its own."""

    def publish(self) -> None:
        """Before a forward pass: makes what rests here ready for others to look at."""

    def begin_fill(self) -> None:
        """Begins to bring the whole values into the full buffer."""

    def fill(self) -> None:
        """Returns when they are there."""

    def empty(self) -> None:
        """The full buffer is not needed for now."""

    def send(self, parcels: Sequence[Parcel], parts_of: PartsOf) -> None:
        """Begins to bring gradients to their owners."""

    def add_up(self, by: int) -> Tensor:
        """What all ranks have sent of the owned pieces, in `Dtypes.sum`, added up in rank order and divided."""

    def drop(self) -> None:
        """Forgets what was sent, once it can meet nothing else."""


def add_in_order(addends: Sequence[Tensor], total: Tensor, by: int) -> None:
    """Their sum, divided, in `total`: given in rank order, whatever rank adds, it is the same bit for bit.

    `total` may be one of the first two.
    """
    first, second = addends[:2]
    if first.dtype == second.dtype == total.dtype:
        torch.add(first, second, out=total)
    else:
        total.copy_(first).add_(second)
    for each in addends[2:]:
        total.add_(each)
    if by > 1:
        total.div_(by)


def joined(parts: list[Tensor]) -> Tensor:
    """As one: a single one without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new flat tensor, its content undefined."""
    return torch.empty(numel, dtype=dtype, device=device)


def chunks(count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of elements: on the CPU as many as stay in its cache while all ranks' are added up."""
    size = _CPU_CHUNK if device.type == "cpu" else max(1, count)
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))
