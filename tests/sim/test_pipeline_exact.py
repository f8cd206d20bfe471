"""Whole nodes in virtual time whose workers compute for real: exact to the delayed-gradient reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from peerloom.node.memory_stage_worker import MemoryStageWorker
from peerloom.node.pipeline_trainer import lane_of
from peerloom.node.worker.memory import anonymous_file
from peerloom.node.worker.tasks.stage import StageTask
from peerloom.node.worker_seams import WorkerReady, WorkerSetup
from peerloom.optim.flat import FlatParameters
from tests.sim.swarm import Plan, Swarm, play
from tests.unit.node.stage_tasks import reference, stage_spec
from tests.unit.node.tiny import write_text

A = TypeVar("A")
STAGES, UPDATES = 4, 50


class ComputingWorker(MemoryStageWorker):
    """A stage's own task in this process, in the time that passes."""

    task: StageTask

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> WorkerReady:
        await super().start(setup, progress)
        setup = replace(setup, cache_dir=setup.run_dir.parent / "cache", threads=1, device="cpu")
        self.task = StageTask(setup, anonymous_file(), progress)
        return self.task.ready()

    def inbox(self, pieces: tuple[int, int] = (0, 1)) -> memoryview:
        return self.task._block.view("inbox")

    def outbox(self, pieces: tuple[int, int] = (0, 1)) -> memoryview:
        return self.task._block.view("outbox").toreadonly()

    async def ask(self, command: Any, answer: type[A]) -> A:
        self._check()
        result = self.task.obey(command, lambda round: False)
        assert isinstance(result, answer)
        return result


def test_four_nodes_are_the_delayed_gradient_reference(tmp_path: Path) -> None:
    """With basis-rotated Adam, each stage's bases refreshed in its own rhythm; real processes do it with AdamW."""
    spec = stage_spec(write_text(tmp_path / "text"), optimizer="basis_rotated")
    budget = UPDATES * spec.train.batch_size * spec.data.sequence_length
    spec = replace(spec, token_budget=budget, train=replace(spec.train, rotation_freq=3))
    tasks: dict[int, StageTask] = {}
    lanes: dict[int, int] = {}

    def over(swarm: Swarm) -> bool:
        return all(member.workers and member.running is None for member in swarm.members)

    async def scenario(swarm: Swarm) -> None:
        swarm.start_all()
        await swarm.until("the end of the run", lambda: over(swarm))
        for member in swarm.members:
            (worker,) = member.workers
            assert isinstance(worker, ComputingWorker) and member.failure is None
            tasks[worker.stage] = worker.task
            lanes[worker.stage] = lane_of(member.peer_id)

    play(Plan(count=STAGES, spec=spec, worker=ComputingWorker, home=tmp_path, checkpoint_every_s=1e6), scenario)
    stages, _ = reference(spec, tmp_path / "cache", UPDATES, lanes[0])
    for number, stage in enumerate(stages):
        flat = FlatParameters(stage.named_in_whole()).flat  # type: ignore[operator]
        assert tasks[number]._weights.newest == UPDATES
        assert float((tasks[number]._flat.flat - flat).abs().max()) <= 1e-6
