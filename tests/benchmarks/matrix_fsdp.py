"""MatrixFSDP against the ways Muon is run today: optimizer step, whole step, memory, bytes in the optimizer step.

    python -m tests.benchmarks.matrix_fsdp [--quick] [--full] [--json FILE]

Two and four ranks on this machine, over gloo (over NCCL where there is a GPU a rank), one torch thread each. All
methods train the same decoder from the same weights, and take turns, one step each.
Ours is there three times, each against all baselines. The rows without a word more are ours as it comes: on one host's
CPU its ranks share memory, while all others send over gloo's loopback. `wires` is ours sending over gloo, too, as its
ranks on several hosts would: a unit is freed after its forward pass and gathered again. `kept` sends and keeps a unit
until its backward pass, as the methods do that hold a whole replica, and is compared with those.
A time is that of the slowest rank, from barrier to barrier. Times are given as steps a second, so that the ratio is how
many times faster we are. A peak is what torch has allocated at most at once in a step: parameters and moments, and over
them what the step allocates, gradients, buffers and activations; of memory that ranks share each counts what it has
written there, so that it counts once.
The simulated table at the end of the output is no measurement: its assumptions are printed with it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from peerloom.node.worker.child import KEEP_FREED
from tests.benchmarks import matrix_fsdp_ranks, matrix_fsdp_simulation
from tests.benchmarks.ends import Ends
from tests.benchmarks.matrix_fsdp_methods import METHODS, TITLES
from tests.benchmarks.matrix_fsdp_model import Size
from tests.benchmarks.matrix_fsdp_ranks import COUNTED, Figures
from tests.benchmarks.rows import Row, main, median

QUICK = Size(layers=16, width=64, mlp=256, heads=4, tokens=64)
USUAL = Size(layers=16, width=256, mlp=1024, heads=4, tokens=128)
QUICK_TURNS, TURNS, FULL_TURNS = 3, 5, 15
QUICK_LAST_TURN_S = 40.0  # quick mode begins no turn later, but the first of each number of ranks
WAYS = {
    "ours": "the ranks of ours share memory on the one host, those of the baseline send over gloo's loopback",
    "wires": "all ranks send over gloo's loopback",
}
LOSS_TOLERANCE = 0.05  # nats, between methods: bf16 Newton-Schulz lets them drift apart, not more than this


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Two ranks, then four; prints the simulated table."""
    began = time.monotonic()
    os.environ.update(KEEP_FREED)  # for all methods, as a node's processes have it: no page faults but each one's own
    size = QUICK if arguments.quick else USUAL
    turns = QUICK_TURNS if arguments.quick else FULL_TURNS if arguments.full else TURNS
    found: list[Row] = []
    for ranks, until_s in ((2, QUICK_LAST_TURN_S / 2), (4, QUICK_LAST_TURN_S)):
        last_at = began + until_s if arguments.quick else float("inf")
        steps, counts, costs = _run(ranks, size, turns, last_at)
        found += rows(ranks, size, steps, counts)
    print(matrix_fsdp_simulation.table(size, costs))
    return found


def _run(
    ranks: int, size: Size, turns: int, last_at: float
) -> tuple[list[list[dict[str, Figures]]], list[dict[str, Figures]], dict[str, float]]:
    """Of each turn and rank, figures by method; counts of each rank; costs of rank 0."""
    with tempfile.TemporaryDirectory(prefix="peerloom-matrix-") as folder:
        store = str(Path(folder) / "store")
        with Ends(matrix_fsdp_ranks.work, [(rank, ranks, store, size) for rank in range(ranks)]) as ends:
            ends.answers()
            steps: list[list[dict[str, Figures]]] = []
            while len(steps) < turns and (not steps or time.monotonic() < last_at):
                order = [*METHODS][len(steps) % len(METHODS) :] + [*METHODS][: len(steps) % len(METHODS)]
                steps.append(ends.turn(("turn", order)))
            counts = ends.turn(("counts",))
            costs = ends.turn(("costs",))[0]
    return steps, counts, costs


def rows(
    ranks: int, size: Size, steps: Sequence[Sequence[dict[str, Figures]]], counts: Sequence[dict[str, Figures]]
) -> list[Row]:
    """The rows of one number of ranks; `steps` by turn and rank. Raises ValueError when the methods' losses differ."""
    _check_losses(steps[-1])
    optimizer = {name: median([max(r[name].optimizer_s[0] for r in turn) for turn in steps]) for name in METHODS}
    whole = {
        name: median([max(r[name].optimizer_s[0] + r[name].passes_s[0] for r in turn) for turn in steps])
        for name in METHODS
    }
    measured = (
        f"{ranks} ranks on {psutil.cpu_count()} cores, {size}, median of {len(steps)} steps in turn, slowest rank"
    )
    found = []
    for form, suffix in (("ours", ""), ("wires", "_wires")):
        setting = f"{WAYS[form]}; {measured}"
        for what, part, times in (("opt_step", "optimizer step", optimizer), ("step", "whole step", whole)):
            name = f"{what}_w{ranks}{suffix}"
            found.append(_speed(name, times, "fsdp2", f"{part}; {setting}", form))
            found += [_speed(f"{name}_{n}", times, n, f"{part}; {setting}", form) for n in [*TITLES][1:]]
        found += _memory(ranks, suffix, form, counts, setting)
    kept = f"whole step, reshard_after_forward=False; {WAYS['wires']}; {measured}"
    found += [_speed(f"step_w{ranks}_kept_{name}", whole, name, kept, "kept") for name in ("ddp", "zero1")]
    received = {name: max(rank[name].step_bytes for rank in counts) for name in COUNTED}
    found.append(_size(f"opt_step_bytes_w{ranks}", received, f"received a rank; {measured}"))
    return found


def _memory(ranks: int, suffix: str, form: str, counts: Sequence[dict[str, Figures]], setting: str) -> list[Row]:
    """Between steps and at most."""
    held = {name: max(rank[name].held_bytes for rank in counts) for name in COUNTED}
    peaks = {name: max(rank[name].peak_bytes for rank in counts) for name in COUNTED}
    return [
        _size(
            f"memory_w{ranks}{suffix}", held, f"parameters and moments between steps, fullest rank; {setting}", form
        ),
        _size(f"peak_w{ranks}{suffix}", peaks, f"allocated at once in a step, fullest rank; {setting}", form),
    ]


def _check_losses(last: Sequence[dict[str, Figures]]) -> None:
    for rank, figures in enumerate(last):
        losses: dict[str, Any] = {name: figures[name].loss for name in METHODS}
        for name, loss in losses.items():
            if not abs(loss - losses["ours"]) < LOSS_TOLERANCE:
                raise ValueError(f"rank {rank}: {name} has loss {loss:.4f} where ours is {losses['ours']:.4f}")


def _speed(name: str, seconds: dict[str, float], baseline: str, setting: str, ours: str) -> Row:
    return Row(
        name=name, value=1 / seconds[ours], unit="steps/s", baseline=TITLES[baseline],
        baseline_value=1 / seconds[baseline], setting=setting,
    )  # fmt: skip


def _size(name: str, sizes: dict[str, int], setting: str, ours: str = "ours") -> Row:
    return Row(
        name=name, value=sizes[ours] / 2**20, unit="MiB", baseline=TITLES["fsdp2"],
        baseline_value=sizes["fsdp2"] / 2**20, setting=setting,
    )  # fmt: skip


if __name__ == "__main__":
    main("MatrixFSDP against other ways to run Muon on shards", measure)
