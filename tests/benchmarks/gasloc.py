"""GASLoC against its baselines: loss at equal tokens and equal tuning, bytes sent, and time where one worker is slow.

`--quick`: 8 workers, one setting each, within 60 s. Without a flag: 16 workers, the main families, tuned on one seed.
`--timed`: the runs in virtual time alone, against DiLoCo as the sweep has found it so far.
`--full`: all families and sizes of swarm, 3 seeds, and what overlap costs. Finished runs are kept in results/gasloc, in
runs.jsonl, time.jsonl and overlap.jsonl, and never run twice.

What a figure is not: each family's setting is chosen on seed 0 by the loss on the very held-out text that is reported,
so that all are a little flattered, families with more candidates the most.
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
from tests.benchmarks.gasloc_overlap import OVERLAP, SEEDS, overlap_rows
from tests.benchmarks.gasloc_plot import Best, plot
from tests.benchmarks.gasloc_sweep import (
    EVERY_STEP,
    FAMILIES,
    LOCAL_STEPS,
    SIZES,
    Family,
    chosen,
    describe,
    sweep,
    tried,
)
from tests.benchmarks.gasloc_time import COPY_TICKS, SLOW_LINK, SLOW_MACHINE, World, stored_run, ticks_to
from tests.benchmarks.gasloc_train import Result, Store
from tests.benchmarks.rows import Row, main

RESULTS = Path(__file__).parent / "results" / "gasloc"
DILOCO = "DiLoCo H=16"
HALF, EQUAL = 0.55, 1.0
TICKS = 2.2  # GASLoC's schedule in the timed runs, in DiLoCo's steps
TIMED = Setting(
    label="GASLoC 1-peer H=24 by the clock, overlapped", partners="1peer", h=24, delay=6, momentum="pre", gamma=0.2,
    lr=5e-3,
)  # fmt: skip
CHOSEN = "setting by seed 0, on the held-out text reported"
QUICK_RATE = 1e-2
QUICK = ("GASLoC ring H=1", "gossip ring H=1", "GASLoC 1-peer H=1", "gossip 1-peer H=1", DILOCO,
         "GASLoC groups of 4, 4 fragments, H=24", "GASLoC groups of 4, 4 fragments, H=16")  # fmt: skip


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Runs what is missing, prints sweep and frontier, draws the plot, and gives the rows."""
    torch.set_num_threads(1)
    if arguments.timed:
        return time_rows(winners(FAMILIES, 1, Store(RESULTS / "runs.jsonl")), RESULTS / "time.jsonl")
    processes = max(1, min(8, os.cpu_count() or 1))
    if arguments.quick:
        store, seeds = Store(None), 1
        families = quick_families()
    else:
        RESULTS.mkdir(parents=True, exist_ok=True)
        store = Store(RESULTS / "runs.jsonl")
        seeds = 3 if arguments.full else 1
        families = list(FAMILIES + SIZES if arguments.full else LOCAL_STEPS + EVERY_STEP)
    sweep(families, seeds, store, processes, log)
    found = winners(families, seeds, store)
    if not arguments.quick:
        print_sweep(families, store)
    equals = of_one_size(found)
    print_frontier(equals)
    if not arguments.quick:
        drawn = plot(list(equals.values()), Shape().numel, tokens(found[DILOCO][0]), RESULTS / "loss.png")
        print(f"plot: {RESULTS / 'loss.png'}" if drawn else "no plot: install the extra `bench` for matplotlib")
    timed = None if arguments.quick else RESULTS / "time.jsonl"
    rows = [*loss_rows(equals), *size_rows(found), *time_rows(equals, timed)]
    if arguments.full:
        overlapped = Store(RESULTS / "overlap.jsonl")
        sweep(OVERLAP, SEEDS, overlapped, processes, log)
        rows += overlap_rows(overlapped)
    return rows


def log(line: str) -> None:
    """A run that has ended, at once."""
    print(line, flush=True)


def quick_families() -> list[Family]:
    """One setting each, 8 workers, 96 steps; H = 24 becomes 32, on 8 workers under half of DiLoCo's bytes.

    At H = 1 all have one rate, and the least momentum of those that are tuned.
    """
    families = []
    for family in FAMILIES:
        if family.name in QUICK:
            tuned = [each for each in family.candidates if each.h > 1 or each.lr == QUICK_RATE]
            setting = tuned[1] if family in LOCAL_STEPS else min(tuned, key=lambda each: each.gamma)
            setting = replace(setting, workers=8, steps=96)
            if setting.h == 24:
                setting = replace(setting, h=32, label=setting.label.replace("H=24", "H=32"))
            families.append(Family(setting.label, (setting,), refine=False))
    return families


def winners(families: Iterable[Family], seeds: int, store: Store) -> dict[str, Best]:
    """Each family's best setting with its results on all seeds."""
    found = {family.name: chosen(family, seeds, store) for family in families}
    return {name: pair for name, pair in found.items() if pair is not None}


def of_one_size(found: dict[str, Best]) -> dict[str, Best]:
    """The families on as many workers as DiLoCo: what is compared must have seen the same tokens."""
    workers = found[DILOCO][0].workers
    return {name: pair for name, pair in found.items() if pair[0].workers == workers}


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
    """H = 1 against the best gossip baseline; local steps within DiLoCo's bytes, 0.55 of them, NoLoCo's, gossip's."""
    rows = []
    for graph in ("ring", "1-peer"):
        ours = found[f"GASLoC {graph} H=1"]
        others = [found[name] for name in (f"gossip {graph} H=1", f"D-PSGD {graph} H=1") if name in found]
        baseline = min(others, key=lambda pair: loss(pair[1]))
        rows.append(_loss_row(f"loss_h1_{graph.replace('-', '')}", ours, baseline))
    whole = found[DILOCO]
    half, rival = (best_within(found, kind, HALF * copies(whole)) for kind in ("GASLoC", "DiLoCo"))
    note = f"; DiLoCo in as few bytes: {rival[0].label}, {loss(rival[1]):.4f}" if rival is not None else ""
    rows += _byte_rows("half", half, whole, note)
    rows += _byte_rows("equal", *(best_within(found, kind, EQUAL * copies(whole)) for kind in ("GASLoC", "DiLoCo")))
    for name, other in (("noloco", "NoLoCo H=16"), ("gossip", "gossip 1-peer H=16")):
        if other in found:
            ours = best_within(found, "GASLoC", copies(found[other]))
            rows += [] if ours is None else [_loss_row(f"loss_h16_vs_{name}", ours, found[other])]
    return rows


def best_within(found: dict[str, Best], kind: str, most: float) -> Best | None:
    """Of the families of a kind with local steps that send at most so many copies, the one of the lowest loss."""
    within = [
        pair for pair in found.values()
        if pair[0].label.startswith(kind) and pair[0].h > 1 and copies(pair) <= most * (1 + 1e-9)
    ]  # fmt: skip
    return min(within, key=lambda pair: loss(pair[1]), default=None)


def size_rows(found: dict[str, Best]) -> list[Row]:
    """Groups against one peer at equal bytes, by the size of the swarm: does the default hang on it?"""
    rows = []
    for workers in (4, 8, 16):
        suffix = "" if workers == 16 else f", {workers} workers"
        names = [f"{name}{suffix}" for name in ("GASLoC groups of 4, 4 fragments, H=24", "GASLoC 1-peer H=16")]
        if all(name in found for name in names) and found[names[0]][0].workers == workers:
            rows.append(_loss_row(f"loss_groups_{workers}_workers", *(found[name] for name in names)))
    return rows


def time_rows(found: dict[str, Best], path: Path | None) -> list[Row]:
    """Ticks until DiLoCo's final loss, with a slow link and with a slow machine."""
    diloco, results = found[DILOCO]
    target = results[0]["curve"][-1][1]
    timed = replace(TIMED, workers=diloco.workers, steps=int(diloco.steps * TICKS))
    worlds = (("time_slow_link", World(link=SLOW_LINK)), ("time_slow_node", World(machine=SLOW_MACHINE)))
    return [time_row(name, stored_run(timed, 0, world, path), world, timed, diloco, target) for name, world in worlds]


def time_row(name: str, result: Result, world: World, timed: Setting, diloco: Setting, target: float) -> Row:
    """A timed run as a row: its end stands for a loss that it has not come down to, and the row says so."""
    reached = ticks_to(result, target)
    outcome = "" if reached is not None else f"NOT reached, at the end {result['loss']:.4f}, "
    return Row(
        name=name,
        value=timed.steps if reached is None else reached,
        unit="fast machine's steps",
        baseline=diloco.label,
        baseline_value=world.diloco_ticks(diloco, diloco.steps / diloco.h),
        setting=f"{outcome}{timed.label}, loss {target:.4f}, {diloco.workers} workers,"
        f" a copy in {COPY_TICKS:g} steps, utilization of the fast machines {result['utilization']:.3f}",
    )


def loss(results: Sequence[Result]) -> float:
    return statistics.mean(float(result["loss"]) for result in results)


def deviation(results: Sequence[Result]) -> float | None:
    """Over seeds, None for one."""
    return statistics.stdev(float(result["loss"]) for result in results) if len(results) > 1 else None


def copies(pair: Best) -> float:
    """Model copies that a worker sends in the run."""
    return float(pair[1][0]["copies"])


def megabytes(result: Result) -> float:
    return float(result["copies"]) * Shape().numel * 4 / 1e6


def tokens(setting: Setting) -> int:
    """Tokens of one step of all workers."""
    return setting.workers * setting.batch * Shape().length


def _byte_rows(name: str, ours: Best | None, baseline: Best | None, note: str = "") -> list[Row]:
    if ours is None or baseline is None:
        raise ValueError(f"no run of GASLoC, or of DiLoCo, sends few enough bytes for loss_h16_{name}_bytes")
    sent = Row(
        name=f"bytes_h16_{name}_bytes",
        value=megabytes(ours[1][0]),
        unit="MB sent a worker",
        baseline=baseline[0].label,
        baseline_value=megabytes(baseline[1][0]),
        setting=ours[0].label,
    )
    return [_loss_row(f"loss_h16_{name}_bytes", ours, baseline, note), sent]


def _loss_row(name: str, ours: Best, baseline: Best, note: str = "") -> Row:
    setting = ours[0]
    spreads = [deviation(results) for _, results in (ours, baseline)]
    told = " and ".join("-" if spread is None else f"{spread:.4f}" for spread in spreads)
    return Row(
        name=name,
        value=loss(ours[1]),
        unit="nats a byte",
        baseline=baseline[0].label,
        baseline_value=loss(baseline[1]),
        setting=f"{setting.label}, {setting.workers} workers, {setting.steps} steps, {Shape().numel:,} parameters,"
        f" {len(ours[1])} and {len(baseline[1])} seeds, deviation over them {told}; {CHOSEN}{note}",
    )


def flags(parser: argparse.ArgumentParser) -> None:
    """What only this benchmark has."""
    parser.add_argument("--timed", action="store_true", help="the timed runs alone, against the sweep as it stands")


if __name__ == "__main__":
    main(__doc__ or "", measure, flags)
