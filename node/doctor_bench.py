"""The self-benchmark of `peer doctor`: how fast this machine takes local steps of a run's model."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.model import build_model
from peerloom.protocol.runspec import RunSpec

WARM_UP = 2  # steps that are not counted
BYTES_A_NUMBER = {"fp32": 4.0, "bf16": 2.0, "int8": 1.03}  # int8: with its blocks' scales


@dataclass(frozen=True, slots=True)
class Speed:
    """One step's seconds and tokens, and what an exchange of the model would move each way."""

    device: str
    step_s: float
    tokens_per_step: int
    payload_bytes: int


def measure_speed(spec: RunSpec, *, device: str, threads: int, seconds: float) -> Speed:
    """Takes real optimizer steps on random tokens for about `seconds`; raises SpecError."""
    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(spec).to(device)
    vocabulary = int(getattr(model.config, "vocab_size", 2))
    inner = InnerLoop(model, spec.train)
    size = (spec.train.batch_size, spec.data.sequence_length + 1)
    windows = torch.randint(vocabulary, size, generator=torch.Generator().manual_seed(1))
    for _ in range(WARM_UP):
        inner.step(windows, 1e-4).item()
    steps, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or not steps:
        inner.step(windows, 1e-4).item()
        steps += 1
    numel = sum(parameter.numel() for parameter in model.parameters())
    payload = int(numel * BYTES_A_NUMBER[spec.gasloc.encoding])
    return Speed(device, spent / steps, spec.train.batch_size * spec.data.sequence_length, payload)
