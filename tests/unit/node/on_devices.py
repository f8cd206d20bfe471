"""What the tests of a node with several devices share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peerloom.node.worker_seams import WorkerSetup
from peerloom.protocol.runspec import RunSpec
from tests.unit.node.tiny import Optimizer, tiny_spec


def quiet(what: str, share: float) -> None:
    """No progress shown."""


def spec_of(source: Path, optimizer: Optimizer = "adamw", batch_size: int = 4, **gasloc: Any) -> RunSpec:
    spec = tiny_spec(source)
    return replace(
        spec,
        train=replace(spec.train, optimizer=optimizer, batch_size=batch_size),
        gasloc=replace(spec.gasloc, **gasloc),
    )


def on_cpus(given: WorkerSetup, count: int) -> WorkerSetup:
    return replace(given, devices=("cpu",) * count)


def apart(ones: list[Tensor], others: list[Tensor]) -> float:
    pairs = [
        (a.view(torch.float32), b.view(torch.float32)) if a.dtype == torch.uint8 else (a, b)
        for a, b in zip(ones, others, strict=True)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)
