"""How busy two stages are over links of 0, 20 and 100 ms one way, and how soon a killed stage trains again.

`utilization_async_*` is the share of the time in which the less busy of the two workers computes, with the asynchronous
schedule, against workers of the same run with synchronous 1F1B, which keep no old weights, in turn; medians over the
turns. By the clock a worker that another process keeps from its core counts as computing: `utilization_cpu_*` is the
same in CPU seconds. `*_default` has the default microbatches, one an update (not in quick mode). `recovery_s`
and `recovery_loss` are those of `pipeline_recovery`, whose finished runs are kept: one kill in quick mode, ten in a row
in the full one, else three.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from peerloom.protocol.runspec import DataSpec, ModelSpec, RunSpec, TrainSpec
from peerloom.protocol.spec_pipeline import PipelineSpec, Schedule
from tests.benchmarks import pipeline_recovery
from tests.benchmarks.pipeline_ends import Shares, StagePair
from tests.benchmarks.pipeline_recovery import text_in
from tests.benchmarks.rows import Row, main, median

DELAYS_MS = (0, 20, 100)
SCHEDULES: tuple[Schedule, ...] = ("async", "sync")
PARTS = 8
Found = dict[tuple[Schedule, int], list[Shares]]  # by schedule and delay, a turn each


def spec(folder: Path, schedule: Schedule, parts: int) -> RunSpec:
    """Two stages as like as can be: what the head costs more, the embedding and the copies of old weights cost less.

    Of 8 microbatches an update one takes some 90 ms on one core: the daemons of both ends and the proxy between them,
    which the stages' two cores carry too, have some 60 ms to do an update.
    """
    return RunSpec(
        name="pipeline-benchmark",
        method="pipeline",
        model=ModelSpec(hidden_size=512, intermediate_size=1408, layers=4, heads=8, kv_heads=8, tie_embeddings=False),
        data=DataSpec(source=str(text_in(folder)), sequence_length=128),
        train=TrainSpec(batch_size=PARTS),
        pipeline=PipelineSpec(stages=2, microbatches=parts, schedule=schedule),
    )


async def utilization(turns: int, updates: int, parts: int) -> list[Row]:
    """Two rows a delay."""
    found: Found = {}
    with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as name:
        folder = Path(name)
        async with AsyncExitStack() as stack:
            specs = {schedule: spec(folder, schedule, parts) for schedule in SCHEDULES}
            pairs = [await stack.enter_async_context(StagePair(each, folder)) for each in specs.values()]
            for _ in range(turns):
                for delay in DELAYS_MS:
                    for schedule, pair in zip(SCHEDULES, pairs, strict=True):
                        found.setdefault((schedule, delay), []).append(await pair.turn(delay / 1000, updates))
    return [row for delay in DELAYS_MS for row in rows_of(delay, found, specs["async"])]


def rows_of(delay: int, found: Found, run: RunSpec) -> list[Row]:
    """The rows of a delay, from the shares of both stages in each turn: by the clock and in CPU seconds."""
    pipeline, rows = run.pipeline, []
    end = "" if pipeline.microbatches == PARTS else "_default"
    sequences = run.train.batch_size // pipeline.microbatches
    for name, by in (("async", "clock"), ("cpu_async", "cpu")):
        turns = {schedule: [getattr(shares, by) for shares in found[schedule, delay]] for schedule in SCHEDULES}
        both = {schedule: [median(stage) for stage in zip(*each, strict=True)] for schedule, each in turns.items()}
        told = ", ".join(f"{schedule} {first:.3f} and {last:.3f}" for schedule, (first, last) in both.items())
        rows.append(
            Row(
                name=f"utilization_{name}_{delay}ms{end}",
                value=min(both["async"]),
                unit=f"share of the time, {'by the clock' if by == 'clock' else 'in CPU seconds'}",
                baseline="synchronous 1F1B",
                baseline_value=min(both["sync"]),
                setting=f"2 stages of 2 layers of width 512, AdamW, {pipeline.microbatches} microbatches an update, "
                f"window {pipeline.window(0)}, each of {sequences} x 128, a core each, {delay} ms one way; "
                f"stages 0 and 1: {told}",
            )
        )
    return rows


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Utilization, then recovery."""
    turns, updates = (1, 1) if arguments.quick else (5, 8) if arguments.full else (3, 4)
    rows = asyncio.run(utilization(turns, updates, PARTS))
    if not arguments.quick:
        rows += asyncio.run(utilization(turns, updates, PipelineSpec().microbatches))
    print("utilization measured; now the kills", file=sys.stderr)
    return [*rows, *pipeline_recovery.measure(arguments)]


if __name__ == "__main__":
    main(__doc__ or "", measure)
