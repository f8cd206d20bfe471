"""Does anything grow? Real nodes with kills for some minutes, and a swarm in virtual time for some days.

    python -m tests.benchmarks.soak [--quick] [--full] [--minutes M] [--nodes N] [--days D] [--part real|virtual]
                                    [--samples FILE] [--again] [--json FILE]

Real: see soak_real.py; its samples are written to FILE as they are taken (with --full results/soak/real.jsonl), and
`--again` makes the rows of such a file.
Virtual: the same node code on memory seams, with a kill every twenty minutes; of the whole process memory, of the swarm
records and remembered peers are taken after the first sixth and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from peerloom.node.http_feed import SwarmFeed
from tests.benchmarks.rows import Row, main
from tests.benchmarks.soak_real import SAMPLES, figures, real
from tests.sim.swarm import Member, Plan, Swarm, play, spec

QUICK_MINUTES, MINUTES, FULL_MINUTES = 0.4, 5.0, 30.0
QUICK_DAYS, DAYS, FULL_DAYS = 0.04, 0.5, 3.0
VIRTUAL_STEP_S = 6.0  # ten of them are a round
VIRTUAL_KILL_S = 1200.0
DAY_S = 86_400.0
MIB = 2**20


class QuietSwarm(Swarm):
    """A swarm that keeps no log of what was decided, so that what grows is the product's."""

    def note(self, peer: object, kind: str, what: object) -> None:
        """Nothing is kept."""

    def _changed(self, member: Member, view: object) -> None:
        super()._changed(member, view)  # type: ignore[arg-type]
        member.states.clear()
        member.rounds.clear()
        member.adopted.clear()
        del member.workers[:-1]


def virtual(days: float, count: int) -> list[Row]:
    """The part in virtual time, with a page's feed on the first node."""
    first: list[float] = []
    last: list[float] = []

    async def scenario(swarm: Swarm) -> None:
        rng, end = random.Random(1), swarm.clock.monotonic() + days * DAY_S
        swarm.start_all()
        await swarm.until_round(1, within_s=DAY_S)
        feed = _feed(swarm)
        warm_at = swarm.clock.monotonic() + days * DAY_S / 6
        next_kill = swarm.clock.monotonic() + VIRTUAL_KILL_S
        while (now := swarm.clock.monotonic()) < end:
            await asyncio.sleep(30.0)
            feed.look()
            if now >= warm_at and not first:
                first.extend(_figures(swarm, feed))
            if now >= next_kill:
                next_kill, victim = now + VIRTUAL_KILL_S, rng.randrange(1, count)
                if swarm.members[victim].running is not None:
                    await swarm.kill(victim)
                swarm.start(victim)
        last.extend(_figures(swarm, feed))
        await swarm.drain()

    began = time.monotonic()
    plan = Plan(count=count, spec=spec(match_timeout_s=30.0), step_s=lambda index: VIRTUAL_STEP_S,
                checkpoint_every_s=300.0)  # fmt: skip
    play(plan, scenario, QuietSwarm)
    setting = f"{count} nodes, {days:g} days of virtual time in {time.monotonic() - began:.0f} s"
    names = [("rss", "MiB"), ("dht_records", "records"), ("remembered", "entries"), ("counters", "counters")]
    return [
        Row(name=f"virtual_{name}", value=after, unit=unit, baseline="after the first sixth",
            baseline_value=before or 1.0, setting=setting)
        for (name, unit), before, after in zip(names, first, last, strict=True)
    ]  # fmt: skip


def _feed(swarm: Swarm) -> SwarmFeed:
    member = swarm.members[0]
    view = member.context.view
    return SwarmFeed(swarm.plan.spec, member.facts.status, view.records, view.left, member.clock.wall)


def _figures(swarm: Swarm, feed: SwarmFeed) -> list[float]:
    """Memory of the process, records that stand, what the first node remembers of others, its counters."""
    gc.collect()
    member = swarm.members[0]
    run_id = swarm.plan.spec.run_id
    records = len(swarm.registry.live(run_id)) + len(swarm.registry.left(run_id))
    remembered = len(member.context.view.tokens()) + len(member.facts.partners) + len(feed.status()["nodes"])
    return [psutil.Process().memory_info().rss / MIB, records, remembered, len(member.facts.counters)]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Both parts."""
    pick: Callable[[float, float, float], float] = lambda quick, usual, full: (  # noqa: E731
        quick if arguments.quick else full if arguments.full else usual
    )
    if arguments.again:
        return figures(arguments.samples or SAMPLES)
    minutes = arguments.minutes or pick(QUICK_MINUTES, MINUTES, FULL_MINUTES)
    days = arguments.days or pick(QUICK_DAYS, DAYS, FULL_DAYS)
    nodes = arguments.nodes or (2 if arguments.quick else 4)
    rows = [] if arguments.part == "real" else virtual(days, nodes)
    return rows if arguments.part == "virtual" else [*rows, *_real(arguments, minutes, nodes)]


def _real(arguments: argparse.Namespace, minutes: float, nodes: int) -> list[Row]:
    """The samples of a full run are kept; those of a shorter one only where `--samples` says so."""
    if arguments.samples or arguments.full:
        return real(minutes, nodes, arguments.samples or SAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        return real(minutes, nodes, Path(folder) / SAMPLES.name)


def flags(parser: argparse.ArgumentParser) -> None:
    """How long, how many, and where the samples go."""
    parser.add_argument("--minutes", type=float, help="of real nodes")
    parser.add_argument("--days", type=float, help="of virtual time")
    parser.add_argument("--nodes", type=int, help="trainers")
    parser.add_argument("--part", choices=("real", "virtual"), help="only this one")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="JSON lines of the real part")
    parser.add_argument("--again", action="store_true", help="run nothing: the rows of the samples that are there")


if __name__ == "__main__":
    main("Memory, files, logs and records over time", measure, flags)
