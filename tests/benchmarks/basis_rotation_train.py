"""One batch of runs: a method at several rates, depths and seeds, each with exactly delayed gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from peerloom.optim.basis_rotation import BasisRotatedAdam, stage_frequencies
from peerloom.optim.delayed import DelayedWeights
from tests.benchmarks.basis_rotation_model import Size, StackedRuns, byte_frequencies
from tests.benchmarks.basis_rotation_soap import SoapForm
from tests.benchmarks.gasloc_model import Text

Kind = Literal[
    "adamw", "pipedream_lr", "nesterov", "soap", "1st_uni", "1st_bi", "2nd_uni", "2nd_bi", "stage_aware", "reversed"
]
METHODS: tuple[Kind, ...] = (
    "adamw", "2nd_bi", "nesterov", "1st_bi", "2nd_uni", "1st_uni", "pipedream_lr", "stage_aware", "reversed", "soap"
)  # fmt: skip
SAME_ALONE: dict[str, Kind] = {"pipedream_lr": "adamw", "stage_aware": "2nd_bi", "reversed": "2nd_bi"}  # at depth 1
ELEMENTWISE = ("adamw", "pipedream_lr", "nesterov")  # rotate nothing
FREQ = 10
BETAS = (0.9, 0.999)
NESTEROV_BETA1 = 0.99  # arXiv 2505.01099 wants more momentum than Adam; 0.9 is worse here
WEIGHT_DECAY = 0.01
CLIP = 1.0
ANNEALED = 0.12  # of the steps, over which PipeDream-LR's correction fades: 7/3 of the warm-up, as in the paper's code
FORMS = {  # of methods that were not always what they are now: kept runs of another form are not theirs
    "pipedream_lr": f"annealed over {ANNEALED:g}",
    "soap": "the first step not counted",
    "1st_bi": "beyond the moment's range the last basis kept",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What all runs of a sweep share."""

    size: Size = Size()
    depth: int = 32
    steps: int = 4000
    warmup: int = 200
    eval_every: int = 25
    windows: int = 32


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a batch; `depth` 1 has no delay."""

    lr: float
    depth: int
    seed: int


def train(plan: Plan, kind: Kind, runs: Sequence[Run], text: Text, tell: Callable[[str], None] = print) -> list[Any]:
    """Each run with its `curve`: the held-out loss at the newest weights every `eval_every` steps, from step 0."""
    size = plan.size
    stacked = StackedRuns(size, [run.seed for run in runs], byte_frequencies(text))
    delayed = _delayed(size, runs, stacked)
    optimizer, rates = _optimizer(plan, kind, runs, stacked)
    windows = text.evaluation(size.length, plan.windows)
    seeds = sorted({run.seed for run in runs})
    curves = [stacked.evaluate(windows)]
    for step in range(plan.steps):
        drawn = {seed: text.batch(1, size.batch, size.length, seed, step)[0] for seed in seeds}
        tokens = torch.stack([drawn[run.seed] for run in runs])
        delayed.backward(lambda tokens=tokens: stacked.loss(tokens))  # type: ignore[misc]
        stacked.take_gradients()
        stacked.clip(CLIP)
        for group, rate in zip(optimizer.param_groups, rates(step), strict=True):
            group["lr"] = rate
        optimizer.step()
        delayed.commit()
        if (step + 1) % plan.eval_every == 0:
            curves.append(stacked.evaluate(windows))
            if (step + 1) % (plan.eval_every * 20) == 0:
                tell(f"{kind} {step + 1}: {' '.join(f'{loss:.3f}' for loss in curves[-1].tolist())}")
    columns = torch.stack(curves).T.tolist()
    form = {"form": FORMS[kind]} if kind in FORMS else {}
    rounded = [[round(loss, 5) if math.isfinite(loss) else 99.0 for loss in column] for column in columns]
    return [{"kind": kind, **form, **asdict(run), "curve": curve} for run, curve in zip(runs, rounded, strict=True)]


def _delayed(size: Size, runs: Sequence[Run], stacked: StackedRuns) -> DelayedWeights:
    """Neighbouring runs of one depth share their copies."""
    stages, delays, start = [], [], 0
    for depth, alike in itertools.groupby(runs, key=lambda run: run.depth):
        stop = start + len(list(alike))
        stages += [[flat[start:stop]] for flat in stacked.flats]
        delays += size.delays(depth)
        start = stop
    return DelayedWeights(stages, delays)


def schedule(plan: Plan, step: int) -> float:
    """Linear warm-up, cosine to a tenth."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    share = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


def _optimizer(
    plan: Plan, kind: Kind, runs: Sequence[Run], stacked: StackedRuns
) -> tuple[torch.optim.Optimizer, Callable[[int], list[float]]]:
    """The optimizer with a group for each run and stage, rotated and not, and the groups' rates at a step."""
    groups: list[dict[str, Any]] = []
    owners: list[tuple[float, int]] = []  # (lr, delay) of each group
    for number, run in enumerate(runs):
        delays = plan.size.delays(run.depth)
        frequencies = _frequencies(plan, kind, run.depth)
        for stage, delay in enumerate(delays):
            if kind in ELEMENTWISE:
                groups.append({"params": [stacked.whole(number, stage)]})
                owners.append((run.lr, delay))
                continue
            for rotated in (True, False):
                parameters = stacked.parameters(number, stage, rotated=rotated)
                if parameters:
                    groups.append({"params": parameters, **_options(kind, frequencies[stage])})
                    owners.append((run.lr, delay))

    def rates(step: int) -> list[float]:
        scale = schedule(plan, step)
        if kind != "pipedream_lr":
            return [lr * scale for lr, _ in owners]
        power = 1 - min(step / (ANNEALED * plan.steps), 1.0)
        return [lr * scale / max(delay, 1) ** power for lr, delay in owners]

    if kind == "nesterov":
        betas = (NESTEROV_BETA1, BETAS[1])
        nadam = torch.optim.NAdam(
            groups, betas=betas, weight_decay=WEIGHT_DECAY, decoupled_weight_decay=True, foreach=True
        )
        return nadam, rates
    maker = SoapForm if kind == "soap" else BasisRotatedAdam
    return maker(groups, betas=BETAS, weight_decay=WEIGHT_DECAY), rates


def _options(kind: Kind, freq: int) -> dict[str, Any]:
    """What is said of flat pieces too, which are not rotated."""
    source = "1st" if kind.startswith("1st") else "2nd"
    geometry = "unilateral" if kind.endswith("_uni") else "bilateral"
    return {"source": source, "geometry": geometry, "freq": freq}


def _frequencies(plan: Plan, kind: Kind, depth: int) -> list[int]:
    """Of each stage: that of its place among `depth` stages, which its delay tells."""
    delays = plan.size.delays(depth)
    if kind not in ("stage_aware", "reversed"):
        return [FREQ] * len(delays)
    every = stage_frequencies(depth, FREQ)
    return [every[delay if kind == "reversed" else depth - 1 - delay] for delay in delays]


def steps_to(target: float, curve: Sequence[float], eval_every: int, mean_of: int) -> float | None:
    """The first evaluated step at which the mean of the last `mean_of` evaluations is at most `target`."""
    for last in range(mean_of, len(curve)):
        if sum(curve[last - mean_of + 1 : last + 1]) / mean_of <= target:
            return last * eval_every
    return None


def smoothed(curve: Sequence[float], mean_of: int) -> list[float]:
    """The mean of the last `mean_of` evaluations, NaN before there are as many."""
    window: Tensor = torch.tensor(curve).unfold(0, mean_of, 1).mean(1)
    return [math.nan] * (mean_of - 1) + window.tolist()
