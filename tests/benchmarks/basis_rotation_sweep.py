"""The sweep: every method at several rates without delay and with all of it, until no best rate lies on an edge."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from tests.benchmarks.basis_rotation_train import FORMS, SAME_ALONE, Kind, Plan, Run, smoothed, steps_to, train
from tests.benchmarks.gasloc_model import read_text

MEAN_OF = 5  # the one smoothing rule: a loss is the mean of the last 5 evaluations
FURTHEST = 4  # doublings or halvings that the grid may grow by
RETIRED = {"annealed": 0.3}  # a key that plans had, when files were named by it: `FORMS` has what holds now
Key = tuple[str, float, int, int]  # kind, lr, depth, seed


@dataclass(frozen=True, slots=True)
class Outcome:
    """A method's best rate at a depth: `steps` to the target, None where some seed never got there."""

    kind: Kind
    depth: int
    lr: float
    steps: float | None
    by_seed: tuple[float | None, ...]
    loss: float  # at the end, mean over seeds
    at_edge: bool


class Curves:
    """Finished runs of one plan, one JSON object a line in a file named by the plan; in memory alone without a file."""

    def __init__(self, plan: Plan, folder: Path | None) -> None:
        self.plan = plan
        self._found: dict[Key, list[float]] = {}
        shape = json.dumps({**asdict(plan), **RETIRED}, sort_keys=True)
        name = f"w{plan.size.width}_l{plan.size.layers}_p{plan.depth}_{hashlib.sha256(shape.encode()).hexdigest()[:6]}"
        self.path = None if folder is None else folder / f"{name}.jsonl"
        if self.path is not None and self.path.exists():
            first, *lines = self.path.read_text(encoding="utf-8").splitlines()
            for line in lines:
                self._keep(json.loads(line))
        self._head = f'{{"plan": {shape}}}\n'

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        if self.path is not None and not self.path.exists():
            self.path.write_text(self._head, encoding="utf-8")
        for record in records:
            self._keep(record)
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")

    def _keep(self, record: dict[str, Any]) -> None:
        if record.get("form") != FORMS.get(record["kind"]):
            return
        self._found[record["kind"], record["lr"], record["depth"], record["seed"]] = record["curve"]

    def get(self, kind: Kind, lr: float, depth: int, seed: int) -> list[float] | None:
        if depth == 1:
            kind = SAME_ALONE.get(kind, kind)
        return self._found.get((kind, lr, depth, seed))

    def rates(self, kind: Kind, depth: int, seeds: Sequence[int]) -> list[float]:
        """Those that were run on all of `seeds`, ascending."""
        if depth == 1:
            kind = SAME_ALONE.get(kind, kind)
        known = {lr for name, lr, at, _ in self._found if name == kind and at == depth}
        return sorted(lr for lr in known if all(self.get(kind, lr, depth, seed) is not None for seed in seeds))

    def final(self, kind: Kind, lr: float, depth: int, seed: int) -> float:
        curve = self.get(kind, lr, depth, seed)
        return math.inf if curve is None else smoothed(curve, MEAN_OF)[-1]

    def steps(self, kind: Kind, lr: float, depth: int, seed: int, target: float) -> float | None:
        curve = self.get(kind, lr, depth, seed)
        return None if curve is None else steps_to(target, curve, self.plan.eval_every, MEAN_OF)


def target_loss(curves: Curves, seeds: Sequence[int]) -> float:
    """What AdamW reaches with all of the delay on every seed: its best rate's last loss, up to the next hundredth."""
    rates = curves.rates("adamw", curves.plan.depth, seeds)
    if not rates:
        raise ValueError("AdamW has no finished run at the largest depth")
    found = min(max(curves.final("adamw", lr, curves.plan.depth, seed) for seed in seeds) for lr in rates)
    return math.ceil(found * 100) / 100


def outcome(curves: Curves, kind: Kind, depth: int, seeds: Sequence[int], target: float) -> Outcome | None:
    """At the rate with the fewest steps to the target on average, or else the lowest loss; None before any run."""
    rates = curves.rates(kind, depth, seeds)
    if not rates:
        return None

    def rank(lr: float) -> tuple[float, float]:
        found = [curves.steps(kind, lr, depth, seed, target) for seed in seeds]
        reached = [steps for steps in found if steps is not None]
        losses = mean(curves.final(kind, lr, depth, seed) for seed in seeds)
        return (mean(reached) if len(reached) == len(found) else math.inf, losses)

    best = min(rates, key=rank)
    by_seed = tuple(curves.steps(kind, best, depth, seed, target) for seed in seeds)
    steps, loss = rank(best)
    return Outcome(
        kind, depth, best, None if math.isinf(steps) else steps, by_seed, loss, best in (rates[0], rates[-1])
    )


def missing(
    curves: Curves, kind: Kind, grid: dict[int, Sequence[float]], seed: int, seeds: Sequence[int], grow: bool = True
) -> list[Run]:
    """The runs of a method and seed that the grid asks for, then those that move a best rate off an edge."""
    depths = [curves.plan.depth] if kind in SAME_ALONE else [1, curves.plan.depth]
    wanted = [Run(lr, depth, seed) for depth in depths for lr in grid[depth]]
    lacking = [run for run in wanted if curves.get(kind, run.lr, run.depth, seed) is None]
    if lacking or not grow or not curves.rates("adamw", curves.plan.depth, [seed]):
        return lacking
    for depth in depths:
        done = [known for known in seeds if curves.rates(kind, depth, [known])]
        for judged in {(seed,), tuple(done)}:
            lr = _beyond(curves, kind, depth, judged, grid[depth])
            if lr is not None and curves.get(kind, lr, depth, seed) is None:
                lacking.append(Run(lr, depth, seed))
        for other in done:  # what moved another seed's best is run here too
            rates = curves.rates(kind, depth, [other])
            lacking += [Run(lr, depth, seed) for lr in rates if curves.get(kind, lr, depth, seed) is None]
    return list(dict.fromkeys(lacking))


def _beyond(curves: Curves, kind: Kind, depth: int, seeds: Sequence[int], grid: Sequence[float]) -> float | None:
    judge = [seed for seed in seeds if curves.rates("adamw", curves.plan.depth, [seed])]
    found = outcome(curves, kind, depth, judge, target_loss(curves, judge)) if judge else None
    if found is None or not found.at_edge:
        return None
    rates = curves.rates(kind, depth, judge)
    lr = found.lr * 2 if found.lr == rates[-1] else found.lr / 2
    return lr if grid[0] / 2**FURTHEST <= lr <= grid[-1] * 2**FURTHEST else None


def sweep(
    curves: Curves,
    kinds: Sequence[Kind],
    grid: dict[int, Sequence[float]],
    seeds: Sequence[int],
    processes: int,
    tell: Callable[[str], None],
    *,
    grow: bool = True,
) -> None:
    """Runs what is missing, one seed of all methods before the next; a batch of rates is one process's job.

    One process is this one.
    """
    if processes == 1:
        return _sweep_here(curves, kinds, grid, seeds, tell, grow)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running: dict[Future[list[Any]], tuple[Kind, int]] = {}
        while True:
            for seed in seeds:
                for kind in kinds:
                    if len(running) < processes and (kind, seed) not in running.values():
                        runs = missing(curves, kind, grid, seed, seeds, grow)
                        if runs:
                            running[pool.submit(work, curves.plan, kind, runs)] = (kind, seed)
                            tell(f"{kind}, seed {seed}: {', '.join(f'{run.lr:g}/{run.depth}' for run in runs)}")
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                kind, seed = running.pop(future)
                curves.add(future.result())
                tell(f"{kind}, seed {seed}: done")


def repeat(
    curves: Curves,
    kinds: Sequence[Kind],
    judged: Sequence[int],
    seeds: Sequence[int],
    processes: int,
    tell: Callable[[str], None],
) -> None:
    """Runs the rates that `judged` chose on all of `seeds`; one process is this one, as in `sweep`."""
    target = target_loss(curves, judged)
    jobs: list[tuple[Kind, list[Run]]] = []
    for kind in kinds:
        found = [outcome(curves, kind, depth, judged, target) for depth in (1, curves.plan.depth)]
        runs = [Run(best.lr, best.depth, seed) for best in found if best is not None for seed in seeds]
        runs = [run for run in runs if curves.get(kind, run.lr, run.depth, run.seed) is None]
        if runs:
            jobs.append((kind, runs))
    if processes == 1:
        for kind, runs in jobs:
            curves.add(train(curves.plan, kind, runs, read_text(), tell))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(work, curves.plan, kind, runs) for kind, runs in jobs]):
            curves.add(done.result())
            tell(f"{done.result()[0]['kind']}: done on {len(seeds)} seeds")


def _sweep_here(
    curves: Curves,
    kinds: Sequence[Kind],
    grid: dict[int, Sequence[float]],
    seeds: Sequence[int],
    tell: Callable[[str], None],
    grow: bool,
) -> None:
    found = True
    while found:
        found = False
        for seed in seeds:
            for kind in kinds:
                runs = missing(curves, kind, grid, seed, seeds, grow)
                if runs:
                    found = True
                    tell(f"{kind}, seed {seed}: {', '.join(f'{run.lr:g}/{run.depth}' for run in runs)}")
                    curves.add(train(curves.plan, kind, runs, read_text(), tell))


def work(plan: Plan, kind: Kind, runs: Sequence[Run]) -> list[Any]:
    """A pool's job."""
    return train(plan, kind, runs, read_text(), lambda line: None)
