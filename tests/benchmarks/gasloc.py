"""GASLoC against its baselines: loss at equal tokens and equal tuning, bytes sent, and time where one worker is slow.

`--quick`: 8 workers, one setting each, within 60 s. Without a flag: 16 workers, the main families, tuned on one seed.
`--full`: all families, 3 seeds. Finished runs are kept in results/gasloc/runs.jsonl and never run twice.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tests.benchmarks.gasloc_methods import Setting
from tests.benchmarks.gasloc_model import Shape
from tests.benchmarks.gasloc_plot import Best, plot
from tests.benchmarks.gasloc_sweep import EVERY_STEP, FAMILIES, LOCAL_STEPS, Family, best, describe, sweep, tried
from tests.benchmarks.gasloc_time import COPY_TICKS, SLOW_LINK, SLOW_MACHINE, World, run_in_time
from tests.benchmarks.gasloc_train import Result, Store
from tests.benchmarks.rows import Row, main

RESULTS = Path(__file__).parent / "results" / "gasloc"
DILOCO = "DiLoCo H=16"
HALF, EQUAL = 0.55, 1.0
TICKS = 2.2  # GASLoC's schedule in the timed runs, in DiLoCo's steps
QUICK = ("GASLoC ring H=1", "gossip ring H=1", "GASLoC 1-peer H=1", "gossip 1-peer H=1", DILOCO,
         "GASLoC groups of 4, 4 fragments, H=24", "GASLoC groups of 4, 4 fragments, H=16")  # fmt: skip


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Runs what is missing, prints sweep and frontier, draws the plot, and gives the rows."""
    torch.set_num_threads(1)
    if arguments.quick:
        store, seeds = Store(None), 1
        families = quick_families()
    else:
        RESULTS.mkdir(parents=True, exist_ok=True)
        store = Store(RESULTS / "runs.jsonl")
        seeds = 3 if arguments.full else 1
        families = list(FAMILIES if arguments.full else LOCAL_STEPS + EVERY_STEP)
    sweep(families, seeds, store, max(1, min(8, os.cpu_count() or 1)), lambda line: print(line, flush=True))
    found = winners(families, seeds, store)
    if not arguments.quick:
        print_sweep(families, store)
    print_frontier(found)
    if not arguments.quick:
        drawn = plot(list(found.values()), Shape().numel, tokens(found[DILOCO][0]), RESULTS / "loss.png")
        print(f"plot: {RESULTS / 'loss.png'}" if drawn else "no plot: install the extra `bench` for matplotlib")
    return [*loss_rows(found), *time_rows(found)]


def quick_families() -> list[Family]:
    """One setting each, 8 workers, 160 steps; H = 24 becomes 32, on 8 workers under half of DiLoCo's bytes."""
    families = []
    for family in FAMILIES:
        if family.name in QUICK:
            setting = replace(family.candidates[1 if family in LOCAL_STEPS else 2], workers=8, steps=160)
            if setting.h == 24:
                setting = replace(setting, h=32, label=setting.label.replace("H=24", "H=32"))
            families.append(Family(setting.label, (setting,), refine=False))
    return families


def winners(families: Iterable[Family], seeds: int, store: Store) -> dict[str, Best]:
    """Each family's best setting with its results on all seeds."""
    found: dict[str, Best] = {}
    for family in families:
        winner = best(family, store)
        if winner is not None:
            results = [store.get(winner[0], seed) for seed in range(seeds)]
            found[family.name] = (winner[0], [result for result in results if result is not None])
    return found


def print_sweep(families: Iterable[Family], store: Store) -> None:
    """Every run that tuned something."""
    for family in families:
        print(f"{family.name}: {len(tried(family, store))} runs")
        for setting in tried(family, store):
            result = store.get(setting, 0)
            if result is not None:
                print(f"  {describe(setting, 0, result)}")


def print_frontier(found: dict[str, Best]) -> None:
    """All methods by bytes, each against DiLoCo."""
    reference = found[DILOCO]
    heads = f"{'method':42} {'MB sent':>8} {'of DiLoCo':>9} {'loss':>7} {'sd':>6} {'gap':>7} {'worst':>7} seeds"
    print(f"{heads}  lr/eta/gamma")
    for setting, results in sorted(found.values(), key=lambda pair: pair[1][0]["copies"]):
        losses = [result["loss"] for result in results]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        share = results[0]["copies"] / reference[1][0]["copies"]
        worst = statistics.mean(result["loss"] + result["worst_gap"] for result in results)
        print(
            f"{setting.label:42} {megabytes(results[0]):8.1f} {share:9.2f} {loss(results):7.4f} {spread:6.4f}"
            f" {loss(results) / loss(reference[1]) - 1:+7.2%} {worst:7.4f} {len(losses):5}"
            f"  {setting.lr:g}/{setting.eta:g}/{setting.gamma:g}"
        )


def loss_rows(found: dict[str, Best]) -> list[Row]:
    """H = 1 against the best gossip baseline; H = 16 within DiLoCo's bytes, and within 0.55 of them."""
    rows = []
    for graph in ("ring", "1-peer"):
        ours = found[f"GASLoC {graph} H=1"]
        others = [found[name] for name in (f"gossip {graph} H=1", f"D-PSGD {graph} H=1") if name in found]
        baseline = min(others, key=lambda pair: loss(pair[1]))
        name = f"loss_h1_{graph.replace('-', '')}"
        rows.append(_loss_row(name, ours, baseline))
    for share, name in ((HALF, "half"), (EQUAL, "equal")):
        ours = cheapest_best(found, share)
        rows.append(_loss_row(f"loss_h16_{name}_bytes", ours, found[DILOCO]))
        rows.append(
            Row(
                name=f"bytes_h16_{name}_bytes",
                value=megabytes(ours[1][0]),
                unit="MB sent a worker",
                baseline=DILOCO,
                baseline_value=megabytes(found[DILOCO][1][0]),
                setting=ours[0].label,
            )
        )
    return rows


def cheapest_best(found: dict[str, Best], share: float) -> Best:
    """The GASLoC family with local steps that has the lowest loss within this share of DiLoCo's bytes."""
    limit = share * found[DILOCO][1][0]["copies"] * (1 + 1e-9)
    ours = [
        pair for pair in found.values()
        if pair[0].label.startswith("GASLoC") and pair[0].h > 1 and pair[1][0]["copies"] <= limit
    ]  # fmt: skip
    if not ours:
        raise ValueError(f"no GASLoC run sends at most {share} of DiLoCo's bytes")
    return min(ours, key=lambda pair: loss(pair[1]))


def time_rows(found: dict[str, Best]) -> list[Row]:
    """Ticks until DiLoCo's final loss, with a slow link and with a slow machine."""
    diloco, results = found[DILOCO]
    target = results[0]["curve"][-1][1]
    timed = replace(
        diloco, label="GASLoC 1-peer, 4 fragments, by the clock", partners="1peer", fragments=4, gamma=0.3, lr=1e-2,
        steps=int(diloco.steps * TICKS),
    )  # fmt: skip
    rows = []
    for name, world in (("time_slow_link", World(link=SLOW_LINK)), ("time_slow_node", World(machine=SLOW_MACHINE))):
        result = run_in_time(timed, 0, world, target)
        reached = result["ticks"]
        outcome = "" if reached is not None else f"NOT reached, at the end {result['loss']:.4f}, "
        rows.append(
            Row(
                name=name,
                value=timed.steps if reached is None else reached,
                unit="fast machine's steps",
                baseline=DILOCO,
                baseline_value=world.diloco_ticks(diloco, diloco.steps / diloco.h),
                setting=f"{outcome}{timed.label}, loss {target:.4f}, {diloco.workers} workers,"
                f" a copy in {COPY_TICKS:g} steps, utilization of the fast machines {result['utilization']:.3f}",
            )
        )
    return rows


def loss(results: Sequence[Result]) -> float:
    return statistics.mean(float(result["loss"]) for result in results)


def megabytes(result: Result) -> float:
    return float(result["copies"]) * Shape().numel * 4 / 1e6


def tokens(setting: Setting) -> int:
    """Tokens of one step of all workers."""
    return setting.workers * setting.batch * Shape().length


def _loss_row(name: str, ours: Best, baseline: Best) -> Row:
    setting = ours[0]
    return Row(
        name=name,
        value=loss(ours[1]),
        unit="nats a byte",
        baseline=baseline[0].label,
        baseline_value=loss(baseline[1]),
        setting=f"{setting.label}, {setting.workers} workers, {setting.steps} steps, {len(ours[1])} seeds",
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", measure)
