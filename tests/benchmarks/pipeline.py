"""How busy two stages are over links of 0, 20 and 100 ms one way, and how soon a killed stage trains again.

`utilization_*` is the share of the time in which the less busy of the two workers computes, with the asynchronous
schedule, against the same workers with synchronous 1F1B in the same run, in turn; medians over the turns. `recovery_s`
is from kill -9 of the middle of three real nodes under load, its standby taking over, to the first update after it;
its baseline is what the issue allows: the heartbeat's end and ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from peerloom.protocol.runspec import DataSpec, ModelSpec, RunSpec, TrainSpec
from peerloom.protocol.spec_pipeline import PipelineSpec, Schedule
from tests.benchmarks.pipeline_ends import StagePair
from tests.benchmarks.rows import Row, main, median
from tests.unit.node.tiny import write_text

DELAYS_MS = (0, 20, 100)
SCHEDULES: tuple[Schedule, ...] = ("async", "sync")
ALLOWED_S = 10.0  # after the heartbeat's end
DEAD_AFTER_S = 4.0
PARTS = 8


def spec(folder: Path) -> RunSpec:
    """Two stages whose microbatch takes some 50 ms on one core."""
    return RunSpec(
        name="pipeline-benchmark",
        method="pipeline",
        model=ModelSpec(hidden_size=256, intermediate_size=704, layers=4, heads=4, kv_heads=4, tie_embeddings=False),
        data=DataSpec(source=str(_text(folder)), sequence_length=128),
        train=TrainSpec(batch_size=2 * PARTS),
        pipeline=PipelineSpec(stages=2, microbatches=PARTS),
    )


def _text(folder: Path) -> Path:
    """Text that takes no time to tokenize."""
    where = folder / "text"
    return where if where.is_dir() else write_text(where, 200)


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


def recovery() -> Row:
    """Three real nodes and a standby; the middle one is killed."""
    from tests.helpers import Swarm, swarm_folder

    with swarm_folder() as folder:
        run = folder / "run.toml"
        text = _text(folder)
        run.write_text(f"""
name = "recovery"
method = "pipeline"
[model]
hidden_size = 64
intermediate_size = 128
layers = 3
[data]
source = {json.dumps(str(text))}
sequence_length = 64
[train]
batch_size = 4
[pipeline]
stages = 3
backup_every = 5
heartbeat_s = 1.0
dead_after_s = {DEAD_AFTER_S}
""")
        swarm = Swarm(folder, run, {"TMPDIR": str(folder / "tmp")})
        try:
            swarm.start()
            nodes = [
                swarm.node(name, "join", swarm.invite, "--data", str(text), *stage)
                for name, *stage in (("a", "--stage", "0"), ("b", "--stage", "1"), ("c", "--stage", "2"), ("spare",))
            ]
            first, victim, spare = nodes[0], nodes[1], nodes[3]
            first.wait_for("updates", lambda: len(first.events("update")) > 20)
            spare.wait_for("a copy", lambda: list((spare.home / "runs").glob("*/stage-*/checkpoints/round-*")))
            victim.process.kill()
            died = time.time()
            victim.process.wait()
            spare.wait_for("an update of the new host", lambda: spare.events("update"))
            seconds = float(spare.events("update")[0]["t"]) - died
            loaded = [event for event in spare.events("hosting")][0]
        finally:
            swarm.stop()
    return Row(
        name="recovery_s",
        value=seconds,
        unit="s",
        baseline="allowed: heartbeat's end and 10 s",
        baseline_value=DEAD_AFTER_S + ALLOWED_S,
        setting=f"kill -9 of stage 1 of 3 under load to the new host's first update, from its copy of update "
        f"{loaded['update']}; all on this machine, the standby's worker warm",
    )


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Utilization, then recovery."""
    turns, updates = (1, 2) if arguments.quick else (5, 8) if arguments.full else (3, 4)
    rows = asyncio.run(utilization(turns, updates))
    print("utilization measured; now a kill", file=sys.stderr)
    return [*rows, recovery()]


if __name__ == "__main__":
    main(__doc__ or "", measure)
