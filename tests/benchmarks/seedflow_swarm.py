"""All clients of a zeroth-order swarm in one process: estimates of all for a step, and messages applied."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from peerloom.optim.subcge import FRACTION_BITS, MeZO, SubCGE
from peerloom.optim.subcge_estimate import fixed
from tests.benchmarks.seedflow_last import LastLayer
from tests.benchmarks.seedflow_table import TableLast
from tests.benchmarks.seedflow_upper import Cached, UpperLayers

Messages = Sequence[tuple[int, int, int, int]]
BLOCK = 1 << 16  # elements that stay in the cache


class Swarm(Protocol):
    """Clients 0, 1, 2 … that hold one model."""

    def estimate(self, step: int, picked: Sequence[Tensor], share: float) -> list[int]:
        """The clients' scalars on their rows of the training examples, times `share`."""

    def apply(self, messages: Messages) -> None:
        """Moves the model."""


class SubCGESwarm:
    """SeedFlow: estimates of all clients in one pass. `period` must hold whole flushes."""

    def __init__(self, flow: SubCGE, upper: UpperLayers, train: Cached, period: int, lr: float) -> None:
        self._flow, self._period = flow, period
        self._last = LastLayer(upper, train, lr / 2**FRACTION_BITS)

    def estimate(self, step: int, picked: Sequence[Tensor], share: float) -> list[int]:
        flow = self._flow
        flow.advance(step)
        if step % self._period == 0:
            self._last.begin(flow)
        seeds = [flow.seed_of(client, step) for client in range(len(picked))]
        return self._last.estimate(flow, torch.cat(list(picked)), seeds, share)

    def apply(self, messages: Messages) -> None:
        self._flow.apply(messages)
        self._last.follow(self._flow, self._flow.step // self._period)


class MeZOSwarm:
    """MeZO: estimates of all clients in one pass too."""

    def __init__(self, mezo: TableMeZO, upper: UpperLayers, train: Cached) -> None:
        self._mezo = mezo
        self._last = TableLast(upper, train)

    def estimate(self, step: int, picked: Sequence[Tensor], share: float) -> list[int]:
        mezo = self._mezo
        directions = [mezo.directions(mezo.seed_of(client, step)) for client in range(len(picked))]
        slopes = self._last.slopes(torch.stack(list(picked)), directions, mezo.eps)
        return [fixed(slope, mezo.bound, FRACTION_BITS, share) for slope in slopes]

    def apply(self, messages: Messages) -> None:
        self._mezo.apply(messages)


class TableMeZO(MeZO):
    """MeZO whose directions are stretches of one table of normals, begun at the seed (Salimans et al. 2017).

    Drawing a direction of all its own four times a step would be most of the time; two stretches that overlap do so
    shifted, so that directions stay uncorrelated.
    """

    _table = torch.empty(0)

    def __init__(self, model: nn.Module, *, bound: int, trainable: str, **rest: Any) -> None:
        super().__init__(model, bound=bound, trainable=trainable, **rest)
        self.bound = bound
        self._names = [name for name, _ in model.named_parameters() if re.search(trainable, name)]

    def directions(self, seed: int) -> dict[str, Tensor]:
        """Z by the parameter's name, where it lies in the table."""
        sizes = [tensor.numel() for tensor in self._tensors]
        table = type(self).table()
        start = seed % (len(table) - sum(sizes))
        parts = table[start : start + sum(sizes)].split(sizes)
        return {
            name: part.view_as(tensor)
            for name, tensor, part in zip(self._names, self._tensors, parts, strict=True)
        }

    def apply(self, messages: Messages) -> None:
        """As MeZO's, block by block of the weights, so that each block is fetched once for all messages."""
        weights = [-self._lr * scalar / 2**FRACTION_BITS for *_, scalar in messages]
        found = [self.directions(self.seed_of(origin, sequence)) for origin, sequence, *_ in messages]
        for name, tensor in zip(self._names, self._tensors, strict=True):
            blocks = [tensor.view(-1).split(BLOCK), *(one[name].reshape(-1).split(BLOCK) for one in found)]
            for block, *moves in zip(*blocks, strict=True):
                for move, weight in zip(moves, weights, strict=True):
                    block.add_(move, alpha=weight)

    def _add(self, seed: int, weight: float) -> None:
        for tensor, direction in zip(self._tensors, self.directions(seed).values(), strict=True):
            tensor.add_(direction, alpha=weight)

    @classmethod
    def table(cls) -> Tensor:
        """2^25 normals."""
        if not len(cls._table):
            cls._table = torch.randn(1 << 25, generator=torch.Generator().manual_seed(0))
        return cls._table
