"""All clients of a zeroth-order swarm in one process: estimates of all for a step, and messages applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peerloom.optim.subcge import FRACTION_BITS, MeZO, SubCGE
from tests.benchmarks.seedflow_last import LastLayer
from tests.benchmarks.seedflow_upper import Cached, UpperLayers

Messages = Sequence[tuple[int, int, int, int]]


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
    """MeZO, one client after the other, as it is."""

    def __init__(self, mezo: MeZO, upper: UpperLayers, train: Cached) -> None:
        self._mezo, self._upper, self._train = mezo, upper, train

    def estimate(self, step: int, picked: Sequence[Tensor], share: float) -> list[int]:
        scalars = []
        for client, rows in enumerate(picked):
            batch = self._train.pick(rows)

            def loss(batch: Cached = batch) -> Tensor:
                return F.cross_entropy(self._upper(batch), batch.labels)

            scalars.append(self._mezo.estimate(loss, self._mezo.seed_of(client, step), share))
        return scalars

    def apply(self, messages: Messages) -> None:
        self._mezo.apply(messages)


class TableMeZO(MeZO):
    """MeZO whose directions are stretches of one table of normals, begun at the seed (Salimans et al. 2017).

    Drawing a direction of all its own four times a step would be most of the time; two stretches that overlap do so
    shifted, so that directions stay uncorrelated.
    """

    _table = torch.empty(0)

    def _add(self, seed: int, weight: float) -> None:
        table = type(self).table()
        start = seed % (len(table) - sum(tensor.numel() for tensor in self._tensors))
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.add_(table[start : start + tensor.numel()].view_as(tensor), alpha=weight)
                start += tensor.numel()

    @classmethod
    def table(cls) -> Tensor:
        """2^25 normals."""
        if not len(cls._table):
            cls._table = torch.randn(1 << 25, generator=torch.Generator().manual_seed(0))
        return cls._table
