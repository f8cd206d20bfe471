"""The quality runs, what decides first and seed by seed; the table of accuracies, the plot against bytes an edge."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.rows import Row
from tests.benchmarks.seedflow_quality import (
    BATCH,
    FLUSH,
    RANK,
    SIZES,
    UPPER,
    Run,
    Store,
    measure,
    prepare,
    test_accuracy,
    tuned,
)

STEPS = int(os.environ.get("SEEDFLOW_STEPS", "200"))  # local steps of every client
SWARMS = (  # in the order in which a run that is cut short says the most
    ("SeedFlow 16", "seedflow", 16),
    ("MeZO 4", "mezo", 4),
    ("SeedFlow 4", "seedflow", 4),
    ("SeedFlow 1", "seedflow", 1),
)
GRID = {1: (3e-4, 1e-3), 4: (1e-3, 3e-3), 16: (1e-3, 3e-3)}
TRAINED = UPPER * 3_538_944  # elements of the trained matrices
MESSAGE_BYTES = 4.8  # a message over an edge, counted by seedflow_flooded
FIRST_ORDER = Run(method="adamw", clients=1, steps=400, lr=1e-4, seed=0)


def candidates(method: str, clients: int) -> list[Run]:
    """The runs among which the learning rate is chosen, on seed 0 by the validation loss."""
    return [Run(method=method, clients=clients, steps=STEPS, lr=lr, seed=0) for lr in GRID[clients]]


def report(model: Path, reviews: Path, cache: Path, results: Path, seeds: int) -> list[Row]:
    """Performs what is missing."""
    results.mkdir(parents=True, exist_ok=True)
    store = Store(results / "runs.jsonl")
    data = prepare(model, reviews, cache, _say)
    zero = measure(data.upper, data.test)[1]
    _say(f"zero-shot {zero:.3f}")
    rates = [Run(**(_fields(FIRST_ORDER) | {"lr": lr})) for lr in (1e-4, 3e-4, 1e-3)]
    grids = {"AdamW": rates} | {name: candidates(method, clients) for name, method, clients in SWARMS}
    chosen = {name: tuned(grid, store, data, _say) for name, grid in grids.items()}
    for seed in range(1, seeds):  # what is cut short has whole seeds
        for run in chosen.values():
            store.perform(replace(run, seed=seed), data, _say)
    found = {name: test_accuracy(run, seeds, store) for name, run in chosen.items()}
    for name, (accuracy, deviation) in found.items():
        gain = (accuracy - zero) / (found["AdamW"][0] - zero)
        _say(f"{name:12} lr {chosen[name].lr:g}: {accuracy:.3f} +- {deviation:.3f}, {gain:.0%} of AdamW's gain")
    _plot(results, store, chosen, zero)
    return rows(found, zero, seeds)


def rows(found: dict[str, tuple[float, float]], zero: float, seeds: int) -> list[Row]:
    """Accuracies, and the gain of 16 clients over zero-shot against AdamW's."""
    about = (
        f"SmolLM2-135M, film reviews, upper {UPPER} layers over cached activations, {SIZES['train']} examples, "
        f"batch {BATCH}, rank {RANK}, {STEPS} steps a client, {seeds} seeds, zero-shot {zero:.3f}"
    )
    made = []
    for clients in (1, 4, 16):
        made.append(_row(f"accuracy_n{clients}", found[f"SeedFlow {clients}"][0], "AdamW", found["AdamW"][0], about))
    made.append(_row("accuracy_n4_mezo", found["SeedFlow 4"][0], "MeZO, equal passes", found["MeZO 4"][0], about))
    gains = [found[name][0] - zero for name in ("SeedFlow 16", "AdamW")]
    made.append(_row("gain_n16", gains[0], "AdamW's gain over zero-shot", gains[1], about))
    return made


def _row(name: str, value: float, baseline: str, baseline_value: float, setting: str) -> Row:
    return Row(
        name=name, value=value, unit="share right", baseline=baseline, baseline_value=baseline_value, setting=setting
    )


def _fields(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in ("method", "clients", "steps", "lr", "seed")}


def _say(line: str) -> None:
    print(line, flush=True)


def _plot(results: Path, store: Store, chosen: dict[str, Run], zero: float) -> None:
    """Accuracy against bytes an edge so far, log axis; AdamW as DSGD: the trained tensors every 5 steps."""
    try:
        import matplotlib
    except ImportError:
        _say("no plot: install the extra `bench` for matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name, run in chosen.items():
        result = store.get(run)
        if result is None or run.method == "mezo":
            continue
        a_step = TRAINED * 4 / FLUSH if run.method == "adamw" else run.clients * MESSAGE_BYTES
        points = [(step * a_step, test) for step, _, _, test in result["curve"] if step]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.axhline(zero, linestyle=":", color="grey", label="zero-shot")
    axes.set(xscale="log", xlabel="payload bytes over an edge", ylabel="accuracy on the test reviews")
    axes.legend()
    figure.tight_layout()
    figure.savefig(results / "accuracy.png", dpi=120)
    pyplot.close(figure)
