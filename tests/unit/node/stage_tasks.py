"""Stage machines and worker tasks in one process, without a network: what computes is real, what travels is bytes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from peerloom.node.worker import messages
from peerloom.node.worker.data import Batches, prepare
from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.memory import anonymous_file
from peerloom.node.worker.schedule import learning_rate
from peerloom.node.worker.stage_costs import stage_train
from peerloom.node.worker.stage_model import build_stage
from peerloom.node.worker.tasks.stage import StageTask, lane_name
from peerloom.node.worker.tokenizer import ByteTokenizer
from peerloom.node.worker_seams import WorkerSetup
from peerloom.optim.delayed import DelayedWeights, pipeline_delays
from peerloom.protocol import stage_effects as effects
from peerloom.protocol import stage_events as events
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.replicas import MixingStep
from peerloom.protocol.runspec import DataSpec, ModelSpec, RunSpec, TrainSpec
from peerloom.protocol.spec_pipeline import PipelineSpec
from peerloom.protocol.stages import StageMachine
from peerloom.protocol.types import PeerId

LANE = 7


def stage_spec(source: Path, stages: int = 4, optimizer: str = "adamw", **pipeline: object) -> RunSpec:
    """A run of four layers over that text."""
    return RunSpec(
        name="tiny-pipeline",
        method="pipeline",
        model=ModelSpec(hidden_size=16, intermediate_size=24, layers=4, heads=2, kv_heads=2),
        data=DataSpec(source=str(source), sequence_length=16, held_out=0.2),
        train=TrainSpec(
            batch_size=4, learning_rate=1e-2, warmup_steps=4, total_steps=80, eval_batches=2, optimizer=optimizer
        ),  # type: ignore[arg-type]
        pipeline=PipelineSpec(**{"stages": stages, "encoding": "fp32", **pipeline}),  # type: ignore[arg-type]
    )


def open_stage(spec: RunSpec, home: Path, stage: int) -> StageTask:
    """The task of one stage, of a node of its own."""
    setup = WorkerSetup(
        spec=spec, peer_id=PeerId(f"peer-{stage}"), run_dir=home / f"peer-{stage}", cache_dir=home / "cache", threads=1
    )
    return StageTask(replace(setup, stage=stage), anonymous_file(), lambda what, share: None)


class LocalPipeline:
    """All stages, driven until nothing is left to do; `delays` are (stage, update, updates between passes and it)."""

    def __init__(self, spec: RunSpec, home: Path, *, limit: int, seed: int | None = 0, held_out: int = 0) -> None:
        self.tasks = [open_stage(spec, home, stage) for stage in range(spec.pipeline.stages)]
        self.machines = [
            StageMachine(spec.pipeline, stage, lane=LANE, limit=limit, held_out=held_out)
            for stage in range(spec.pipeline.stages)
        ]
        self.losses: list[float] = []
        self.mixings = self.mixed = 0
        self.held_out: list[float] = []
        self.delays: list[tuple[int, int, int]] = []
        self._rng = None if seed is None else random.Random(seed)
        self._todo: dict[tuple[int, int], deque[events.StageEvent]] = {}  # (from, to): in order within each
        self._bytes: dict[tuple[str, int, Microbatch], torch.Tensor] = {}
        self._version_of: dict[tuple[int, int], int] = {}
        for stage in range(spec.pipeline.stages - 1):
            self._feed(stage, events.DownstreamOpened(_peer(stage + 1), 0))
            self._feed(stage + 1, events.UpstreamOpened(_peer(stage)))
        self._feed(0, events.Ticked())

    def mix(self, times: int) -> None:
        """Every stage takes part in exchanges with nobody, as often in all, whenever its machine lets it."""
        self.mixings = times
        for stage in range(len(self.tasks)):
            self._later(stage, stage, events.MixingWanted("propose", 0))

    def run(self) -> None:
        """Until nothing is left to do; who is next of those that could be is drawn."""
        while busy := [pair for pair, queue in self._todo.items() if queue]:
            pair = self._rng.choice(busy) if self._rng is not None else busy[0]
            queue = self._todo.pop(pair)
            self._feed(pair[1], queue.popleft())
            if queue:
                self._todo.setdefault(pair, deque()).extendleft(reversed(queue))

    def _later(self, sender: int, to: int, event: events.StageEvent) -> None:
        self._todo.setdefault((sender, to), deque()).append(event)

    def _feed(self, stage: int, event: events.StageEvent) -> None:
        for effect in self.machines[stage].handle(event, 0.0):
            self._perform(stage, effect)

    def _perform(self, stage: int, effect: effects.StageEffect) -> None:
        task = self.tasks[stage]
        match effect:
            case effects.RunForward(microbatch, version, update):
                if update is not None:
                    self._version_of[stage, update] = version
                if stage:
                    task._inbox.copy_(self._bytes["activation", stage, microbatch])
                loss = self._ran(task, messages.Forward(microbatch, version, update)).loss
                kind = "gradient" if task._last else "activation"
                self._bytes[kind, stage - 1 if task._last else stage + 1, microbatch] = task._outbox.clone()
                self._later(stage, stage, events.ForwardDone(microbatch, loss))
            case effects.RunBackward(microbatch):
                task._inbox.copy_(self._bytes["gradient", stage, microbatch])
                self._ran(task, messages.Backward(microbatch))
                self._bytes["gradient", stage - 1, microbatch] = task._outbox.clone()
                self._later(stage, stage, events.BackwardDone(microbatch))
            case effects.RunUpdate(update, oldest):
                self.delays.append((stage, update, update - self._version_of[stage, update]))
                self._ran(task, messages.Update(update, oldest))
                self._later(stage, stage, events.UpdateDone(update))
            case effects.RunMixing(step, round):
                task.obey(messages.Mixing(step, round), lambda round: False)
                self.mixed += 1
                self._later(stage, stage, events.MixingDone())
                if self.mixed < self.mixings:
                    following: MixingStep = "alone" if step == "propose" else "propose"
                    self._later(stage, stage, events.MixingWanted(following, round + (step != "propose")))
            case effects.SendActivation(_, microbatch, version):
                self._later(stage, stage + 1, events.ActivationReceived(_peer(stage), microbatch, version))
            case effects.SendGradient(_, microbatch, version, loss):
                self._later(stage, stage - 1, events.GradientReceived(_peer(stage), microbatch, version, loss))
                self._later(stage, stage, events.AnswerSent(_peer(stage - 1)))
            case effects.SendScore(_, microbatch, version, loss):
                self._later(stage, stage - 1, events.ScoreReceived(_peer(stage), microbatch, version, loss))
                self._later(stage, stage, events.AnswerSent(_peer(stage - 1)))
            case effects.SendCredit(_, count):
                self._later(stage, stage - 1, events.CreditReceived(_peer(stage), count))
            case effects.ReportTrained(_, loss) if stage == len(self.tasks) - 1:
                self.losses.append(loss)
            case effects.ReportHeldOut(loss) if stage == 0:
                self.held_out.append(loss)
            case effects.Blame(_, _, detail):
                raise AssertionError(detail)

    @staticmethod
    def _ran(task: StageTask, command: messages.Command) -> messages.Ran:
        ran = task.obey(command, lambda round: False)
        assert isinstance(ran, messages.Ran)
        return ran


def _peer(stage: int) -> PeerId:
    return PeerId(f"peer-{stage}")


def batches(spec: RunSpec, cache: Path, lane: int = LANE) -> Batches:
    """What a lane draws."""
    shards = prepare(spec.data, ByteTokenizer(), cache, lambda what, share: None)
    return Batches(shards.train, spec.seed, lane_name(lane), spec.train.batch_size, spec.data.sequence_length)


def reference(
    spec: RunSpec, cache: Path, updates: int, lane: int = LANE
) -> tuple[list[torch.nn.Module], list[float]]:
    """The same stages in one model, with delayed gradients and no pipeline anywhere."""
    stages = [build_stage(spec, stage) for stage in range(spec.pipeline.stages)]
    loops = [InnerLoop(stage, stage_train(spec, number)) for number, stage in enumerate(stages)]
    delays = pipeline_delays(len(stages)) if spec.pipeline.schedule == "async" else [0] * len(stages)
    weights = DelayedWeights([stage.parameters() for stage in stages], delays, stash=spec.pipeline.stash)
    data, losses = batches(spec, cache, lane), []
    for update in range(updates):
        windows = torch.from_numpy(data[update])

        def loss_fn(windows: torch.Tensor = windows) -> torch.Tensor:
            hidden = windows[:, :-1]
            for stage in stages:
                hidden = stage(hidden)
            return F.cross_entropy(hidden.flatten(0, 1), windows[:, 1:].flatten())

        losses.append(float(weights.backward(loss_fn)))
        for loop in loops:
            loop.update(learning_rate(update, spec.train))
        weights.commit()
    return list(stages), losses
