"""Basis rotation under the delays of a deep asynchronous pipeline: steps to a loss over the method's own without delay,
and what a step costs over AdamW's.

Exactly delayed gradients on the standard library's text. The rule, fixed before any run: a loss is the mean of the last
5 held-out evaluations; the target is what AdamW at its best rate reaches with the delays on every seed, up to the next
hundredth; each method takes, with and without delay, the rate with the fewest steps to it on average over seeds, from a
grid that grows by factors of two until no best rate lies on its edge.

`--quick`: three methods, 200 steps, one seed, and the small step cost, within 60 s: a look, no result. Without a flag:
all methods at 118,704 parameters, 2 seeds, the five that tell most before the others. `--full`: also smaller, larger
and shorter runs of three methods, and runs of all three times as long, whose rows end in the setting's name; there the
four that lie closest, or tell most, are repeated on five seeds at the rates that the first two chose. Finished runs are
kept in results/basis_rotation/ and never run twice; a run cut short is run anew. `--stored` runs nothing: rows, table
and plots of what is kept. `--processes 1` trains in this process, so that one signal stops all.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import torch

from tests.benchmarks.basis_rotation_cost import cost_rows
from tests.benchmarks.basis_rotation_model import Size
from tests.benchmarks.basis_rotation_plot import plot, plot_trends
from tests.benchmarks.basis_rotation_sweep import Curves, Outcome, outcome, repeat, sweep, target_loss
from tests.benchmarks.basis_rotation_train import METHODS, Kind, Plan
from tests.benchmarks.rows import Row, main

RESULTS = Path(__file__).parent / "results" / "basis_rotation"
GRID = {1: (1e-3, 2e-3, 4e-3, 8e-3), 32: (5e-4, 1e-3, 2e-3, 4e-3)}
MAIN = replace(Plan(), size=Size(width=48, heads=3, hidden=144), steps=6000, warmup=300)
TRENDS = {  # one batch for all, so that size and length alone differ, and the warm-up's share in the longest
    "small": replace(MAIN, size=Size()),
    "wide": replace(MAIN, size=Size(width=64, heads=4, hidden=192)),
    "short": replace(MAIN, size=Size(), steps=1500, warmup=75),
    "long": replace(MAIN, size=Size(), steps=18_000, warmup=216),  # 1.2 % of the steps, the paper's 3 of 250 epochs
}
WHOLE = ("long",)  # of the trends, those that every method is run in: P = 1 takes thousands of steps there
CLOSE: tuple[Kind, ...] = ("adamw", "2nd_bi", "soap", "1st_bi")  # told apart there by more seeds
OTHER_TARGETS = (1.9, 1.88, 1.81, 1.75, 1.7, 1.65)  # nats a byte, for those: later ones are past AdamW's last loss
MORE_SEEDS = range(5)  # at the rates that the first two chose
QUICK_PLAN = replace(Plan(), steps=200, warmup=20, eval_every=10)
QUICK_GRID = {1: (4e-3, 8e-3), 32: (1e-3, 4e-3)}
QUICK: tuple[Kind, ...] = ("adamw", "nesterov", "2nd_bi")
TELLING: tuple[Kind, ...] = ("adamw", "2nd_bi", "nesterov", "pipedream_lr", "soap")
BASELINES: tuple[Kind, ...] = ("adamw", "pipedream_lr", "nesterov")  # the paper's
OURS: tuple[Kind, ...] = ("2nd_bi", "stage_aware", "reversed")  # one method, its refreshes spread otherwise
WARMUPS = 8  # before which a run without delay is still starting: what it takes to a target says little of delay
Found = dict[tuple[Kind, int], Outcome]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Runs what is missing, prints every method's best, draws the plots, and gives the rows."""
    torch.set_num_threads(1)
    if arguments.quick:
        return [*slowdowns(QUICK_PLAN, QUICK, QUICK_GRID, [0], None), *cost_rows(quick=True)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    plans: list[tuple[str, Plan, Sequence[Kind]]] = [("", MAIN, METHODS)]
    if arguments.full or arguments.stored:
        plans += [(name, plan, METHODS if name in WHOLE else QUICK) for name, plan in TRENDS.items()]
    if not arguments.stored:
        for _, plan, kinds in plans:
            for part in (TELLING, kinds) if kinds is METHODS else (kinds,):
                run_missing(Curves(plan, RESULTS), part, GRID, range(2), arguments.processes)
        for name, plan, _ in plans:
            if name in WHOLE:
                repeat(Curves(plan, RESULTS), CLOSE, range(2), MORE_SEEDS, arguments.processes, _say)
    rows = [row for name, plan, kinds in plans for row in stored_rows(Curves(plan, RESULTS), kinds, name)]
    for name, plan, _ in plans:
        if name in WHOLE:
            rows += repeated_rows(Curves(plan, RESULTS), name)
    if len(plans) > 1:
        report_trends([plan for _, plan, _ in plans])
    return rows if arguments.stored else [*rows, *cost_rows(quick=False)]


def slowdowns(
    plan: Plan, kinds: Sequence[Kind], grid: dict[int, Sequence[float]], seeds: Sequence[int], folder: Path | None
) -> list[Row]:
    """The sweep of one plan, kept nowhere without a folder."""
    curves = Curves(plan, folder)
    run_missing(curves, kinds, grid, seeds, max(1, min(2, os.cpu_count() or 1)), grow=folder is not None)
    return rows_of(curves, kinds, seeds)


def run_missing(
    curves: Curves,
    kinds: Sequence[Kind],
    grid: dict[int, Sequence[float]],
    seeds: Sequence[int],
    processes: int,
    *,
    grow: bool = True,
) -> None:
    """Runs what the grid asks for and is not there; the grid grows off its edges."""
    sweep(curves, kinds, grid, seeds, processes, _say, grow=grow)


def _say(line: str) -> None:
    print(line, flush=True)


def rows_of(curves: Curves, kinds: Sequence[Kind], seeds: Sequence[int], trend: str = "") -> list[Row]:
    """The table and the rows of the runs that are there."""
    target = target_loss(curves, seeds)
    found = outcomes(curves, kinds, seeds, target)
    report(curves, found, target)
    return slowdown_rows(curves.plan, found, target, len(seeds), trend)


def stored_rows(curves: Curves, kinds: Sequence[Kind], trend: str = "") -> list[Row]:
    """Those of the kept runs, with a plot beside them."""
    seeds = seeds_of(curves)
    if not seeds:
        return []
    target = target_loss(curves, seeds)
    path = RESULTS / f"slowdown{trend and '_' + trend}.png"
    drawn = plot(curves, list(outcomes(curves, kinds, seeds, target).values()), seeds, target, path)
    print(f"plot: {path.name}" if drawn else "no plot: install the extra `bench` for matplotlib")
    return rows_of(curves, kinds, seeds, trend)


def repeated_rows(curves: Curves, trend: str) -> list[Row]:
    """Those of the close methods on all of `MORE_SEEDS`, as far as they were run; the target is of those seeds too."""
    kept = [kind for kind in CLOSE if all(curves.rates(kind, depth, MORE_SEEDS) for depth in (1, curves.plan.depth))]
    if "adamw" not in kept:
        return []
    target = target_loss(curves, MORE_SEEDS)
    found = outcomes(curves, kept, MORE_SEEDS, target)
    # the rates beside it were run on the first two seeds alone
    found = {key: replace(best, at_edge=False) for key, best in found.items()}
    report(curves, found, target)
    report_later(curves, found)
    return slowdown_rows(curves.plan, found, target, len(MORE_SEEDS), f"{trend}_{len(MORE_SEEDS)}_seeds")


def report_later(curves: Curves, found: Found) -> None:
    """The slowdowns of those runs to other targets, where all seeds came to them: mean and standard error."""
    for target in OTHER_TARGETS:
        told = []
        for kind, depth in found:
            rates = {at: found[kind, at].lr for at in (1, curves.plan.depth) if (kind, at) in found}
            if depth != 1 or len(rates) < 2:
                continue
            pairs = [[curves.steps(kind, lr, at, seed, target) for at, lr in rates.items()] for seed in MORE_SEEDS]
            ratios = [late / alone for alone, late in pairs if alone is not None and late is not None]
            if len(ratios) == len(MORE_SEEDS):
                steps = mean(late for _, late in pairs if late is not None)
                told.append(f"{kind} {steps:.0f} {mean(ratios):.2f} ({stdev(ratios) / len(ratios) ** 0.5:.2f})")
        print(f"to {target:.2f}: {', '.join(told)}")


def outcomes(curves: Curves, kinds: Sequence[Kind], seeds: Sequence[int], target: float) -> Found:
    """Each method's best at both depths, where it was run on all seeds."""
    tried = {
        (kind, depth): outcome(curves, kind, depth, seeds, target) for kind in kinds for depth in (1, curves.plan.depth)
    }
    return {key: best for key, best in tried.items() if best is not None}


def report(curves: Curves, found: Found, target: float) -> None:
    """Every method's best rate, its steps on each seed, and whether the rate lies on an edge."""
    print(
        f"target {target:.2f}; P = {curves.plan.depth}, {curves.plan.size.numel():,} parameters, "
        f"{curves.plan.steps} steps, {curves.plan.warmup} of them warm-up"
    )
    for (kind, depth), best in found.items():
        steps = " ".join("-" if one is None else f"{one:.0f}" for one in best.by_seed)
        edge = "  ON AN EDGE" if best.at_edge else ""
        early = f"  {alone_in_warmups(curves.plan, best.steps)}" if depth == 1 and best.steps is not None else ""
        print(f"{kind:13} P={depth:<3} lr {best.lr:<8g} steps {steps}  last loss {best.loss:.4f}{edge}{early}")


def report_trends(plans: Sequence[Plan]) -> None:
    """How the slowdowns move with size and length: a table and a plot of what is kept."""
    points: list[tuple[int, int, dict[Kind, float]]] = []
    for plan in plans:
        curves = Curves(plan, RESULTS)
        if seeds := seeds_of(curves):
            found = outcomes(curves, QUICK, seeds, target_loss(curves, seeds))
            figures = {kind: slowdown(plan, found, kind) for kind in QUICK}
            ratios = {kind: figure[0] / figure[1] for kind, figure in figures.items() if figure is not None}
            points.append((plan.size.numel(), plan.steps, ratios))
            told = ", ".join(
                f"{kind} {ratio:.2f} (P = 1 {alone_in_warmups(plan, figure[1])})"
                for kind, ratio in ratios.items()
                if (figure := figures[kind]) is not None
            )
            share = ratios["2nd_bi"] / ratios["adamw"] if ratios.keys() >= {"2nd_bi", "adamw"} else None
            print(
                f"P = {plan.depth} {plan.size.numel():>9,} parameters {plan.steps:>6,} steps {len(seeds)} seeds: {told}"
                + ("" if share is None else f"; 2nd_bi over adamw {share:.2f}")
            )
    if points:
        plot_trends(points, RESULTS / "slowdown_trends.png")


def seeds_of(curves: Curves) -> Sequence[int]:
    """Both where AdamW has both, none where it has none."""
    for seeds in (range(2), range(1)):
        if all(curves.rates("adamw", depth, seeds) for depth in (1, curves.plan.depth)):
            return seeds
    return ()


def slowdown(plan: Plan, found: Found, kind: Kind) -> tuple[float, float, bool] | None:
    """(steps with the delays, without, reached); the whole run's length where the target was not reached."""
    late, alone = found.get((kind, plan.depth)), found.get((kind, 1))
    if late is None or alone is None or alone.steps is None:
        return None
    return (plan.steps if late.steps is None else late.steps, alone.steps, late.steps is not None)


def by_seed(above: Outcome, below: Outcome) -> str:
    """The ratio of steps on each seed, "-" where one never got there."""
    pairs = zip(above.by_seed, below.by_seed, strict=True)
    ratios = ", ".join("-" if None in pair else f"{pair[0] / pair[1]:.2f}" for pair in pairs)  # type: ignore[operator]
    return f"by seed {ratios}"


def alone_in_warmups(plan: Plan, steps: float) -> str:
    """Steps without delay, in warm-ups, and whether they are too few to judge by."""
    warmups = steps / plan.warmup
    return f"{steps:.0f} steps, {warmups:.1f} warm-ups{'' if warmups > WARMUPS else f': TOO FEW, not over {WARMUPS}'}"


def slowdown_rows(plan: Plan, found: Found, target: float, seeds: int, trend: str = "") -> list[Row]:
    """One for each method, its own run without delay as the baseline; and 2nd-bi's steps over the best baseline's and
    over the best of all others'."""
    rows, end = [], trend and f"_{trend}"
    for kind in METHODS:
        figure = slowdown(plan, found, kind)
        if figure is not None:
            late, alone, reached = figure
            rates = f"lr {found[kind, plan.depth].lr:g} and {found[kind, 1].lr:g}"
            ratios = by_seed(found[kind, plan.depth], found[kind, 1])
            rows.append(
                Row(
                    name=f"slowdown_{kind}{end}",
                    value=late,
                    unit="steps" if reached else "steps, target NOT reached",
                    baseline="P = 1",
                    baseline_value=alone,
                    setting=f"P = {plan.depth}, to {target:.2f} nats a byte, {plan.size.numel():,} parameters, "
                    f"{plan.steps} steps, {rates}, {seeds} seeds, {ratios}; P = 1 {alone_in_warmups(plan, alone)}",
                )
            )
    others = tuple(kind for kind in METHODS if kind not in OURS)
    for name, kinds in (("iterations_2nd_bi", BASELINES), ("iterations_2nd_bi_all", others)):
        rows += iterations_row(f"{name}{end}", plan, found, target, kinds)
    return rows


def iterations_row(name: str, plan: Plan, found: Found, target: float, others: Sequence[Kind]) -> list[Row]:
    """2nd-bi's steps with the delays over the fewest of others that reached the target; none where none did."""
    figures = [(figure, kind) for kind in others if (figure := slowdown(plan, found, kind)) is not None]
    best = min(((figure[0], kind) for figure, kind in figures if figure[2]), default=None)
    ours = slowdown(plan, found, "2nd_bi")
    if best is None or ours is None:
        return []
    late = found["2nd_bi", plan.depth]
    return [
        Row(
            name=name,
            value=ours[0],
            unit="steps" if ours[2] else "steps, target NOT reached",
            baseline=best[1],
            baseline_value=best[0],
            setting=f"P = {plan.depth}, to {target:.2f} nats a byte, {len(late.by_seed)} seeds, "
            f"{by_seed(late, found[best[1], plan.depth])}, best of {', '.join(kind for _, kind in figures)}",
        )
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--stored", action="store_true", help="run nothing: rows and plots of the runs that are kept")
    parser.add_argument("--processes", type=int, default=max(1, min(2, os.cpu_count() or 1)), help="at once")


if __name__ == "__main__":
    main(__doc__ or "", measure, flags)
