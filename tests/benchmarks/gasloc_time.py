"""Real training in virtual time: one link ten times slower, or one machine four times slower, than the other fifteen.

A tick is a local step of a fast machine. `COPY_TICKS` is what one model copy takes over a usual link, both ways at
once. DiLoCo waits for the slowest machine and sends 2 (1 - 1/n) copies through the slowest link each round, so its loss
is that of the plain run and only its clock differs. GASLoC goes by the clock (`round_s`): each fragment comes up every
H ticks, whoever is free then pairs up at random, trains on while the exchange is under way and adds the mixing term
when it arrives. Who is still exchanging sits a fragment out, whose round then lasts on, and holds nobody.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from peerloom.optim.fragments import due_after
from tests.benchmarks.gasloc_methods import Outer, Setting
from tests.benchmarks.gasloc_model import Shape, Stacked
from tests.benchmarks.gasloc_train import CURVE_WINDOWS, AdamW, Result, average_loss, learning_rate, text

COPY_TICKS = 4.0
SLOW_LINK, SLOW_MACHINE = 10.0, 4


@dataclass(frozen=True, slots=True)
class World:
    """What is wrong with worker 0."""

    link: float = 1.0  # its exchanges take this many times as long
    machine: int = 1  # it takes this many ticks a step

    def diloco_ticks(self, setting: Setting, rounds: float) -> float:
        """What so many rounds take with a barrier each, blocking: all steps, then all bytes."""
        copies = 2 * (1 - 1 / setting.workers)
        return rounds * (setting.h * self.machine + copies * COPY_TICKS * self.link)

    def exchange_ticks(self, pair: tuple[int, int], setting: Setting) -> int:
        """What a pair's exchange of one fragment takes, at least a tick."""
        slowed = self.link if 0 in pair else 1.0
        return max(1, math.ceil(COPY_TICKS / setting.fragments * slowed))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A pair's fragment under way, to be mixed at the end of tick `arrives`."""

    arrives: int
    pair: tuple[int, int]
    part: slice
    y: Tensor


def run_in_time(setting: Setting, seed: int, world: World, target: float) -> Result:
    """Trains for `setting.steps` ticks: when the average had the loss `target`, and the share of ticks computed."""
    stacked = Stacked(Shape(), setting.workers, seed)
    params = stacked.flat.detach()
    outer, inner = Outer(setting, seed, params), AdamW(params)
    exchanges: list[Exchange] = []
    curve: list[tuple[int, float]] = []
    computed = 0
    for tick in range(1, setting.steps + 1):
        rows = [i for i in range(setting.workers) if i > 0 or tick % world.machine == 0]
        stacked.backward(text().batch(setting.workers, setting.batch, stacked.shape.length, seed, tick - 1))
        inner.step(stacked.gradients, learning_rate(setting.lr, tick - 1, setting.steps), rows)
        computed += sum(i > 0 for i in rows)
        for exchange in [e for e in exchanges if e.arrives <= tick or tick == setting.steps]:
            exchanges.remove(exchange)
            _arrive(outer, exchange)
        for f in due_after(tick, setting.h, setting.fragments):
            exchanges += _depart(outer, outer.parts[f], tick, world, {i for e in exchanges for i in e.pair})
        if tick % setting.h == 0:
            curve.append((tick, average_loss(stacked, CURVE_WINDOWS)))
    reached = [tick for tick, loss in curve if loss <= target]
    return {
        "ticks": reached[0] if reached else None,
        "loss": curve[-1][1],
        "utilization": computed / (setting.steps * (setting.workers - 1)),
        "curve": [[tick, round(loss, 5)] for tick, loss in curve],
    }


def _depart(outer: Outer, part: slice, tick: int, world: World, busy: set[int]) -> list[Exchange]:
    """Pairs those who are free; one left over ends the fragment's round alone."""
    setting = outer.setting
    free = [i for i in range(setting.workers) if i not in busy]
    free.sort(key=lambda i: hashlib.sha256(f"{outer.seed}:{tick}:{i}".encode()).digest())
    started = []
    for pair in zip(free[0::2], free[1::2], strict=False):
        rows = torch.tensor(pair)
        y = outer.theta[rows, part].lerp(outer.params[rows, part], setting.eta)
        outer.params[rows, part] = y
        started.append(Exchange(tick + world.exchange_ticks(pair, setting), pair, part, y))
    if len(free) % 2:
        row = torch.tensor(free[-1:])
        y = outer.theta[row, part].lerp(outer.params[row, part], setting.eta)
        outer.params[row, part] = y
        outer.mix(part, y, y, row)
    return started


def _arrive(outer: Outer, exchange: Exchange) -> None:
    mixed = exchange.y + outer.setting.alpha * (exchange.y.mean(0) - exchange.y)
    outer.mix(exchange.part, exchange.y, mixed, torch.tensor(exchange.pair))
