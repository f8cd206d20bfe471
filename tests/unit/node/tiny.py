"""A run so small that a step takes milliseconds, and its text."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from peerloom.node.worker.memory import anonymous_file
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.node.worker_seams import WorkerSetup
from peerloom.protocol.runspec import DataSpec, ModelSpec, RunSpec, TrainSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import Encoding, PeerId

Optimizer = Literal["adamw", "muon", "soap", "basis_rotated"]
MODEL = ModelSpec(hidden_size=16, intermediate_size=24, layers=1, heads=2, kv_heads=2)
WORDS = "the of and to in is was he for it with as his on be at by had not are but from or have an they".split()


def write_text(folder: Path, documents: int = 60) -> Path:
    """A folder of small text files."""
    folder.mkdir(parents=True)
    for number in range(documents):
        rng = random.Random(number)
        (folder / f"{number:03}.txt").write_text(" ".join(rng.choice(WORDS) for _ in range(200)))
    return folder


def tiny_spec(source: Path, *, encoding: Encoding = "fp32", local_steps: int = 3) -> RunSpec:
    """A run over that text."""
    return RunSpec(
        name="tiny",
        model=MODEL,
        data=DataSpec(source=str(source), sequence_length=16, held_out=0.2),
        train=TrainSpec(
            batch_size=2,
            learning_rate=1e-2,
            warmup_steps=4,
            total_steps=50,
            eval_batches=2,
            eval_every_rounds=2,
        ),
        gasloc=GaslocSpec(local_steps=local_steps, encoding=encoding),
    )


def setup(spec: RunSpec, home: Path, peer: str = "peer-a") -> WorkerSetup:
    """Settings of one node, its run folder under `home`."""
    return WorkerSetup(
        spec=spec, peer_id=PeerId(peer), run_dir=home / peer, cache_dir=home / "cache", device="cpu", threads=1
    )


def task(
    spec: RunSpec,
    home: Path,
    peer: str = "peer-a",
    progress: Callable[[str, float], None] = lambda what, share: None,
    clock: Callable[[], float] = time.perf_counter,
) -> GaslocTask:
    """A training task in this very process; its memory is freed with it."""
    return GaslocTask(setup(spec, home, peer), anonymous_file(), progress, clock)


def never() -> bool:
    """No interrupt."""
    return False
