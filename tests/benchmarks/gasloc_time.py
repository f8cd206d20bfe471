"""Real training in virtual time: one link ten times slower, or one machine four times slower, than the other fifteen.

A tick is a local step of a fast machine. `COPY_TICKS` is what one model copy takes over a usual link, both ways at
once. DiLoCo waits for the slowest machine and sends 2 (1 - 1/n) copies through the slowest link each round, so its loss
is that of the plain run and only its clock differs.

GASLoC is not modelled but run: sixteen of the product's nodes, with their gossip machines, drivers, rounds and records,
on a network in memory, under a spec that passes `check()`: rounds by the clock (`round_s`), one partner a round from
"rendezvous", the whole model at once, the exchange beneath the next local steps (`overlap`). A node that waits, for a
partner or for the end of a slow exchange, takes no steps: those are the ticks that it loses. So it does with every
exchange before a checkpoint, of which there is one in ten minutes.

The model stands for one `MODEL_SHARE` times as large, which takes as long over links that are as many times faster: the
sizes of chunks and the least rates, which are in bytes, are divided by it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from peerloom.node import exchange, payload, place
from peerloom.node.memory_worker import MemoryDisk, MemoryWorker
from peerloom.node.worker.schedule import learning_rate
from peerloom.node.worker_seams import RoundFinished, WorkerSetup
from peerloom.protocol import bucket
from peerloom.protocol.runspec import RunSpec, TrainSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from tests.benchmarks.gasloc_methods import Setting
from tests.benchmarks.gasloc_model import Shape, Stacked
from tests.benchmarks.gasloc_train import CURVE_WINDOWS, AdamW, Result, model, text
from tests.sim.swarm import Member, Plan, Swarm, identity, play

COPY_TICKS = 4.0
SLOW_LINK, SLOW_MACHINE = 10.0, 4
TICK_S = 1.0
LATENCY_S = 0.02
CHECKPOINT_S = 600.0
MODEL_SHARE = 64
OWN_WINDOWS = 16  # of held-out text that a node judges itself and others by
_IN_BYTES = (
    (payload, "FIRST_CHUNK_BYTES"),
    (payload, "LEAST_CHUNK_BYTES"),
    (bucket, "CHUNK_BYTES"),
    (exchange, "LEAST_RATE"),
    (place, "CATCH_UP_RATE"),
)
FORM = "nodes by the clock, overlapped, late by a quarter on average"  # another one makes the stored runs new ones


@dataclass(frozen=True, slots=True)
class World:
    """What is wrong with worker 0."""

    link: float = 1.0  # its exchanges take this many times as long
    machine: int = 1  # it takes this many ticks a step

    def diloco_ticks(self, setting: Setting, rounds: float) -> float:
        """What so many rounds take with a barrier each, blocking: all steps, then all bytes."""
        copies = 2 * (1 - 1 / setting.workers)
        return rounds * (setting.h * self.machine + copies * COPY_TICKS * self.link)


def run_spec(setting: Setting, seed: int) -> RunSpec:
    """The setting as a run of the product, checked; raises SpecError for one that it refuses."""
    spec = RunSpec(
        seed=seed,
        gasloc=GaslocSpec(
            round_s=setting.h * TICK_S,
            eta=setting.eta,
            alpha=setting.alpha,
            gamma=setting.gamma,
            momentum=setting.momentum,
            fragments=setting.fragments,
            overlap=setting.delay > 0,
            match_timeout_s=setting.h * TICK_S,  # the time of a round, as README advises
        ),
        train=TrainSpec(
            batch_size=setting.batch,
            learning_rate=setting.lr,
            warmup_steps=max(1, setting.steps // 20),
            total_steps=setting.steps,
            min_lr_ratio=0.1,
        ),
    )
    spec.check()
    return spec


class Machine(MemoryWorker):
    """A worker that trains the benchmark's model; as in the product, it heeds an interruption after the step."""

    def __init__(self, index: int, setting: Setting, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._index, self._of = index, setting
        self._adopted_at: int | None = None
        self.began: float | None = None

    @property
    def live(self) -> Tensor:
        """The parameters as they stand, flat."""
        return self._params

    @property
    def steps(self) -> int:
        """Taken so far."""
        return self._taken

    def _model(self, setup: WorkerSetup) -> Tensor:
        self._stacked = Stacked(Shape(), 1, setup.spec.seed)
        self._inner = AdamW(self._stacked.flat.detach())
        return self._stacked.flat.detach()[0]

    async def _one_step(self) -> bool:
        if self.began is None:
            self.began = asyncio.get_running_loop().time()
        await asyncio.sleep(self._step_s)
        self._check()
        self._stepped_once()
        return not self._interrupted.is_set()

    def _pull(self) -> None:
        spec, s = self._setup.spec, self._of
        tokens = text().batch(s.workers, s.batch, self._stacked.shape.length, spec.seed, self._disk.cursor)
        self._losses = self._stacked.backward(tokens[self._index : self._index + 1])
        self._inner.step(self._stacked.gradients, learning_rate(self._step, spec.train, adopted_at=self._adopted_at))
        self._disk.cursor += 1
        self._step += 1
        self._tokens += s.batch * self._stacked.shape.length

    def _train_loss(self) -> float:
        return float(self._losses[0])

    def _loss(self) -> float:
        return held_out_loss(self._stacked, self._params, OWN_WINDOWS)

    async def adopt(self, round: int, step: int, theta: memoryview) -> RoundFinished:
        self._inner, self._adopted_at = AdamW(self._stacked.flat.detach()), step
        return await super().adopt(round, step, theta)


def held_out_loss(stacked: Stacked, params: Tensor, windows: int) -> float:
    """Of one model, flat."""
    tokens = text().evaluation(stacked.shape.length, windows)
    pieces = [stacked.losses_of(params[None], piece).item() * len(piece) for piece in torch.split(tokens, 64)]
    return sum(pieces) / windows


def run_in_time(setting: Setting, seed: int, world: World, kind: Callable[..., Machine] = Machine) -> Result:
    """Runs the swarm for `setting.steps` ticks: the average's curve, and the share of the fast ones' ticks computed."""
    curve: list[tuple[int, float]] = []
    disks: list[MemoryDisk] = []
    found: Result = {}

    def worker(*, disk: MemoryDisk, **arguments: Any) -> Machine:
        index = next(i for i, each in enumerate(disks) if each is disk)
        return kind(index, setting, disk=disk, **arguments)

    async def scenario(swarm: Swarm) -> None:
        disks.extend(member.disk for member in swarm.members)
        for other in range(1, setting.workers):
            swarm.hub.set_link(identity(0), identity(other), latency_s=LATENCY_S, bandwidth=usual / world.link)
        swarm.start_all()
        await swarm.until("training", lambda: all(_began(m) is not None for m in swarm.members), every_s=0.01)
        since = swarm.clock.monotonic()
        stacked = Stacked(Shape(), 1, seed)
        for tick in range(setting.h, setting.steps + 1, setting.h):
            await asyncio.sleep(max(0.0, since + tick * TICK_S - swarm.clock.monotonic()))
            average = torch.stack([_machine(member).live for member in swarm.members]).mean(0)
            curve.append((tick, held_out_loss(stacked, average, CURVE_WINDOWS)))
        found.update(_measured(swarm, swarm.clock.monotonic()))
        await swarm.drain()

    usual = 4 * Shape().numel / (COPY_TICKS * TICK_S)
    plan = Plan(
        count=setting.workers, seed=seed, spec=run_spec(setting, seed), worker=worker, worker_start_s=0.0,
        step_s=lambda index: TICK_S * (world.machine if index == 0 else 1), latency_s=LATENCY_S, bandwidth=usual,
        checkpoint_every_s=CHECKPOINT_S,
    )  # fmt: skip
    with ExitStack() as stack:
        for module, name in _IN_BYTES:
            stack.enter_context(patch.object(module, name, getattr(module, name) // MODEL_SHARE))
        play(plan, scenario)
    return {**found, "loss": curve[-1][1], "curve": [[tick, round(loss, 5)] for tick, loss in curve]}


def _machine(member: Member) -> Machine:
    assert isinstance(member.worker, Machine)
    return member.worker


def _began(member: Member) -> float | None:
    return _machine(member).began if member.workers else None


def _measured(swarm: Swarm, now: float) -> Result:
    """From each node's first step to now: the share of time in which the fast ones computed, and what became of all."""
    ticks, steps = 0.0, 0
    for member in swarm.members[1:]:
        machine = _machine(member)
        assert machine.began is not None
        ticks += (now - machine.began) / TICK_S
        steps += machine.steps
    return {
        "utilization": steps / ticks,
        "alone": swarm.alone_share(),
        "alone_slow": _alone(swarm.members[0]),
        "adopted": len(swarm.members[0].adopted),
        "rounds": [len(member.rounds) for member in swarm.members],
    }


def _alone(member: Member) -> float:
    return sum(line["partner"] is None for line in member.rounds) / max(1, len(member.rounds))


def ticks_to(result: Result, target: float) -> int | None:
    """The first tick of the curve at which the loss was down to the target."""
    return next((tick for tick, loss in result["curve"] if loss <= target), None)


def stored_run(setting: Setting, seed: int, world: World, path: Path | None) -> Result:
    """The run, from the file if it stands there, else run and added to it."""
    content = {name: value for name, value in asdict(setting).items() if name != "label"}
    named = json.dumps([FORM, model(), content, seed, asdict(world)], sort_keys=True)
    key = hashlib.sha256(named.encode()).hexdigest()[:16]
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry: dict[str, Any] = json.loads(line)
            if entry["key"] == key:
                return dict(entry["result"])
    result = run_in_time(setting, seed, world)
    if path is not None:
        entry = {"key": key, "setting": asdict(setting), "world": asdict(world), "seed": seed, "result": result}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    return result
