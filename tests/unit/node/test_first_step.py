"""A worker says once when its first optimizer step is done, the real one and the in-memory one."""

from __future__ import annotations

from pathlib import Path

import torch

from peerloom.node.memory_worker import MemoryWorker
from peerloom.node.worker_seams import FIRST_STEP
from tests.unit.node.tiny import never, setup, task, tiny_spec, write_text


def test_the_task_tells_it_before_the_round_is_over(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    told: list[tuple[str, int]] = []

    def note(what: str, share: float) -> None:
        if what == FIRST_STEP:
            told.append((what, worker._position.step))

    worker = task(tiny_spec(write_text(tmp_path / "text")), tmp_path / "home", progress=note)
    for round in range(2):
        worker.train(round, never)
        worker.finish(mix=False)
    assert told == [(FIRST_STEP, 1)]


async def test_the_in_memory_worker_tells_it_once(tmp_path: Path) -> None:
    told: list[str] = []
    worker = MemoryWorker(step_s=0.0)
    await worker.start(setup(tiny_spec(tmp_path), tmp_path), lambda what, share: told.append(what))
    assert FIRST_STEP not in told
    for round in range(2):
        await worker.train(round)
        await worker.finish(mix=False)
    assert told.count(FIRST_STEP) == 1
