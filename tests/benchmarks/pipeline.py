"""How busy two stages are over links of 0, 20 and 100 ms one way, and how soon a killed stage trains again.

`utilization_*` is the share of the time in which the less busy of the two workers computes, with the asynchronous
schedule, against the same workers with synchronous 1F1B in the same run, in turn; medians over the turns. `recovery_s`
and `recovery_loss` are those of `pipeline_recovery`, whose finished runs are kept: one kill in quick mode, ten in a row
in the full one, else three.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from peerloom.protocol.runspec import DataSpec, ModelSpec, RunSpec, TrainSpec
from peerloom.protocol.spec_pipeline import PipelineSpec, Schedule
from tests.benchmarks import pipeline_recovery
from tests.benchmarks.pipeline_ends import StagePair
from tests.benchmarks.pipeline_recovery import text_in
from tests.benchmarks.rows import Row, main, median

DELAYS_MS = (0, 20, 100)
SCHEDULES: tuple[Schedule, ...] = ("async", "sync")
PARTS = 8


def spec(folder: Path) -> RunSpec:
    """Two stages whose microbatch takes some 50 ms on one core."""
    return RunSpec(
        name="pipeline-benchmark",
        method="pipeline",
        model=ModelSpec(hidden_size=256, intermediate_size=704, layers=4, heads=4, kv_heads=4, tie_embeddings=False),
        data=DataSpec(source=str(text_in(folder)), sequence_length=128),
        train=TrainSpec(batch_size=2 * PARTS),
        pipeline=PipelineSpec(stages=2, microbatches=PARTS),
    )


async def utilization(turns: int, updates: int) -> list[Row]:
    """A row a delay."""
    shares: dict[tuple[str, int], list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="pipeline-bench-") as folder:
        async with StagePair(spec(Path(folder)), Path(folder)) as pair:
            await pair.turn("async", 0.0, 1)
            for _ in range(turns):
                for delay in DELAYS_MS:
                    for schedule in SCHEDULES:
                        found = await pair.turn(schedule, delay / 1000, updates)
                        shares.setdefault((schedule, delay), []).append(found)
    return [row_of(delay, shares) for delay in DELAYS_MS]


def row_of(delay: int, shares: dict[tuple[str, int], list[list[float]]]) -> Row:
    """The row of a delay, from the shares of both stages in each turn, by schedule and delay."""
    both = {schedule: [median(each) for each in zip(*shares[schedule, delay], strict=True)] for schedule in SCHEDULES}
    each = ", ".join(f"{schedule} {first:.3f} and {last:.3f}" for schedule, (first, last) in both.items())
    return Row(
        name=f"utilization_async_{delay}ms",
        value=min(both["async"]),
        unit="share of the time",
        baseline="synchronous 1F1B",
        baseline_value=min(both["sync"]),
        setting=f"2 stages of 2 layers of width 256, {PARTS} microbatches of 2 x 128, a core each, "
        f"{delay} ms one way; stages 0 and 1: {each}",
    )


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Utilization, then recovery."""
    turns, updates = (1, 2) if arguments.quick else (5, 8) if arguments.full else (3, 4)
    rows = asyncio.run(utilization(turns, updates))
    print("utilization measured; now the kills", file=sys.stderr)
    return [*rows, *pipeline_recovery.measure(arguments)]


if __name__ == "__main__":
    main(__doc__ or "", measure)
