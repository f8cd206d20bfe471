"""One run: local AdamW steps of all workers at once, the method after each of them, held-out loss on the way."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.gasloc_methods import Setting, copies_per_step, method_of
from tests.benchmarks.gasloc_model import EMBEDDING, Shape, Stacked, Text, read_text

BETAS, EPSILON, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
CURVE_WINDOWS, FINAL_WINDOWS = 128, 1024
Result = dict[str, Any]


class AdamW:
    """AdamW of each row of `params` (n, numel) on its own; rows may skip steps."""

    def __init__(self, params: Tensor) -> None:
        self._params = params
        self._m, self._v = torch.zeros_like(params), torch.zeros_like(params)
        self._steps = [torch.zeros(()) for _ in params]

    def step(self, gradients: Tensor, lr: float, rows: Sequence[int] | None = None) -> None:
        """One step of these rows, of all without."""
        chosen = range(len(self._params)) if rows is None else rows
        rows_of = [[tensor[i] for i in chosen] for tensor in (self._params, gradients, self._m, self._v)]
        steps = [self._steps[i] for i in chosen]
        torch._foreach_add_(steps, 1)
        p, g, m, v = rows_of
        (b1, b2), decay, eps = BETAS, WEIGHT_DECAY, EPSILON
        torch._fused_adamw_(
            p, g, m, v, [], steps, lr=lr, beta1=b1, beta2=b2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False
        )


def learning_rate(peak: float, step: int, steps: int) -> float:
    """Linear for 5 % of the steps, then half a cosine down to a tenth; `step` counts from 0."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


@cache
def text() -> Text:
    return read_text()


def run(setting: Setting, seed: int) -> Result:
    """Trains and measures: held-out loss of the average, by how much the worst worker is over it, copies, curve."""
    started = time.process_time()
    stacked = Stacked(Shape(), setting.workers, seed)
    params = stacked.flat.detach()
    method, inner = method_of(setting, seed, params), AdamW(params)
    every = max(setting.h, setting.steps // 14 // setting.h * setting.h)
    curve: list[tuple[int, float]] = []
    for step in range(setting.steps):
        stacked.backward(text().batch(setting.workers, setting.batch, stacked.shape.length, seed, step))
        if setting.method == "sync":
            stacked.gradients.copy_(stacked.gradients.mean(0, keepdim=True).expand_as(stacked.gradients))
        inner.step(stacked.gradients, learning_rate(setting.lr, step, setting.steps))
        method.after(step + 1)
        if (step + 1) % every == 0 or step + 1 == setting.steps:
            curve.append((step + 1, average_loss(stacked, CURVE_WINDOWS)))
            if not math.isfinite(curve[-1][1]):
                break
    return {
        "loss": average_loss(stacked, FINAL_WINDOWS),
        "worst_gap": worst_loss(stacked) - average_loss(stacked, CURVE_WINDOWS),
        "consensus": float((params - params.mean(0)).norm(dim=1).mean() / params.mean(0).norm()),
        "copies": copies_per_step(setting) * setting.steps,
        "curve": [[step, round(loss, 5)] for step, loss in curve],
        "cpu_s": round(time.process_time() - started, 1),
    }


def average_loss(stacked: Stacked, windows: int) -> float:
    """Held-out loss of the averaged model."""
    average = stacked.flat.detach().mean(0, keepdim=True)
    tokens = text().evaluation(stacked.shape.length, windows)
    pieces = [stacked.losses_of(average, piece).item() * len(piece) for piece in torch.split(tokens, 64)]
    return sum(pieces) / windows


def worst_loss(stacked: Stacked) -> float:
    """Held-out loss of the worst worker."""
    tokens = text().evaluation(stacked.shape.length, CURVE_WINDOWS)
    pieces = [stacked.losses_of(stacked.flat.detach(), piece) * len(piece) for piece in torch.split(tokens, 8)]
    return float(torch.stack(pieces).sum(0).max() / CURVE_WINDOWS)


class Store:
    """Finished runs as JSON lines, so that a sweep goes on where it stopped; several processes may append.

    Runs of another model than today's are not found.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._runs: dict[str, Result] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry.get("model") == model():
                    self._runs[key(Setting(**entry["setting"]), entry["seed"])] = entry["result"]

    def get(self, setting: Setting, seed: int) -> Result | None:
        return self._runs.get(key(setting, seed))

    def put(self, setting: Setting, seed: int, result: Result) -> None:
        self._runs[key(setting, seed)] = result
        if self.path is not None:
            entry = {"model": model(), "setting": asdict(setting), "seed": seed, "result": result}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def key(setting: Setting, seed: int) -> str:
    """Names a run of the model by all that it depends on but for the label."""
    content = {name: value for name, value in asdict(setting).items() if name != "label"}
    return hashlib.sha256(json.dumps([content, seed], sort_keys=True).encode()).hexdigest()[:16]


def model() -> dict[str, float]:
    """What all runs share: the model's shape and the deviation of its embedding at the start."""
    return {**asdict(Shape()), "embedding": EMBEDDING}
