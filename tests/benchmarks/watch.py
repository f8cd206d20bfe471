"""What watching costs: `peer status` of 200 nodes drawn, and the share of a core that an open page takes of a node.

    python -m tests.benchmarks.watch [--quick] [--full] [--json FILE]

The 200 nodes are records in memory, made up; each renews its record every ten seconds, as real ones do. A look reads
them as a find in the DHT returns them, signed, and checks each. CPU time is what is counted, of this process alone, so
a busy machine changes little. The baselines are bounds set beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import time
from collections.abc import Callable

import aiohttp
from rich.console import Console

from peerloom.node.http_feed import LOOK_S
from peerloom.node.metrics import exposition
from peerloom.node.status import rows_of, to_json
from peerloom.node.status_screen import View, frame
from peerloom.node.status_table import render
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus
from tests.benchmarks.rows import Row, main, median
from tests.unit.node.page_swarm import FakeSwarm, served
from tests.unit.node.stored_swarm import stored_swarm

NODES = 200
QUICK, USUAL, FULL = 5, 20, 100  # repetitions
LOOKS_A_RENEWAL = 5  # a record lasts ten seconds, a look is taken every two
RENDER_BOUND_MS, PAGE_BOUND = 1000.0, 1.0
SPEC = RunSpec()


def cpu_ms(work: Callable[[], object]) -> float:
    """Milliseconds of CPU time that `work` takes."""
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def swarm() -> FakeSwarm:
    """200 trainers that have been there for ten minutes."""
    made = FakeSwarm(NODES)
    for _ in range(60):
        made.step()
        made.feed.look()
    return made


def draw_table(made: FakeSwarm) -> None:
    """All that `peer status` does once the records are there: rows, sums, the table at 80 columns, the JSON."""
    statuses = [made.status(), *(NodeStatus(record=record) for record in made.records.values())]
    rows = rows_of(statuses, made.now)
    Console(file=io.StringIO(), width=80).print(render(SPEC, SPEC.run_id, rows))
    json.dumps(to_json(SPEC, SPEC.run_id, rows, made.now))


def look_and_draw() -> tuple[float, float]:
    """CPU milliseconds of one `peer status` of a swarm that it has not seen before, and how many DHT keys it read."""
    observer, stored, clock = stored_swarm(NODES)

    async def once() -> None:
        rows = rows_of(await observer.look(), clock.wall())
        Console(file=io.StringIO(), width=80).print(render(SPEC, SPEC.run_id, rows))
        json.dumps(to_json(SPEC, SPEC.run_id, rows, clock.wall()))

    return cpu_ms(lambda: asyncio.run(once())), len(stored.asked)


def draw_frame(made: FakeSwarm) -> None:
    """One screen of `--watch`."""
    rows = rows_of([NodeStatus(record=record) for record in made.records.values()], made.now)
    Console(file=io.StringIO(), width=80, height=24).print(frame(View(), SPEC, SPEC.run_id, rows, 80, 24))


async def read_event(stream: aiohttp.StreamReader) -> None:
    """Reads to the end of a server-sent event, however long."""
    while not (await stream.readany()).endswith(b"\n\n"):
        pass


async def page_share(made: FakeSwarm, repetitions: int) -> float:
    """Percent of a core for the feed with a page open: looks, their encoding and their sending over a socket."""
    async with served(made) as server, aiohttp.ClientSession() as client, client.get(server.url + "events") as answer:
        await read_event(answer.content)
        shares = []
        for _ in range(repetitions):
            spent = 0.0
            for look in range(LOOKS_A_RENEWAL):
                if look == 0:
                    made.step(2.0 * LOOKS_A_RENEWAL)
                spent += cpu_ms(made.feed.look)
                began = time.process_time()
                await read_event(answer.content)  # the reader's share is counted too
                spent += 1e3 * (time.process_time() - began)
            shares.append(spent / (LOOKS_A_RENEWAL * LOOK_S * 1e3) * 100)
        return median(shares)


def rows(
    repetitions: int, look: tuple[float, float], render_ms: float, frame_ms: float, page: float, scrape_ms: float
) -> list[Row]:
    """The figures against their bounds."""
    setting = f"{NODES} nodes in memory, CPU time, median of {repetitions}"
    bound = "bound set beforehand"
    return [
        Row(name="status_look", value=look[0], unit="ms", baseline=bound, baseline_value=RENDER_BOUND_MS,
            setting=f"signed records read, checked, summed and drawn, table and JSON; {setting}"),
        Row(name="status_dht_keys", value=look[1], unit="keys", baseline="one a shard, and a run has one shard",
            baseline_value=1.0, setting=f"one look; {setting}"),
        Row(name="status_render", value=render_ms, unit="ms", baseline=bound, baseline_value=RENDER_BOUND_MS,
            setting=f"rows, sums, table at 80 columns and JSON; {setting}"),
        Row(name="status_frame", value=frame_ms, unit="ms", baseline="one look of --watch lasts",
            baseline_value=2000.0, setting=f"one screen of 80 x 24; {setting}"),
        Row(name="page_core_share", value=page, unit="%", baseline=bound, baseline_value=PAGE_BOUND,
            setting=f"one page open, a look every {LOOK_S:g} s, records renewed every 10 s; {setting}"),
        Row(name="metrics_scrape", value=scrape_ms, unit="ms", baseline="a scrape interval of 15 s",
            baseline_value=15_000.0, setting=f"/metrics with the swarm's sums; {setting}"),
    ]  # fmt: skip


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Seconds in any mode."""
    repetitions = QUICK if arguments.quick else FULL if arguments.full else USUAL
    made = swarm()
    scrape = exposition(made.status, made.feed.totals)
    render_ms = median([cpu_ms(lambda: draw_table(made)) for _ in range(repetitions)])
    frame_ms = median([cpu_ms(lambda: draw_frame(made)) for _ in range(repetitions)])
    scrape_ms = median([cpu_ms(lambda: scrape("")) for _ in range(repetitions)])
    looks = [look_and_draw() for _ in range(repetitions)]
    look = (median([spent for spent, _ in looks]), max(keys for _, keys in looks))
    return rows(repetitions, look, render_ms, frame_ms, asyncio.run(page_share(made, repetitions)), scrape_ms)


if __name__ == "__main__":
    main("What watching a swarm costs", measure)
