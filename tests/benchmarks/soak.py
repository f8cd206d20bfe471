"""Does anything grow? Real nodes with kills for some minutes, and a swarm in virtual time for some days.

    python -m tests.benchmarks.soak [--quick] [--full] [--minutes M] [--nodes N] [--days D] [--json FILE]

Real: a bootstrap node and N trainers, of which every twenty seconds one but the first is killed (SIGKILL) and started
again. The bootstrap node and the first trainer live through it: of them memory, open files, bytes of log and journal a
round, and the number of DHT records are taken after a warm-up and at the end. Virtual: the same node code on memory
seams, with a kill every twenty minutes; of the whole process memory, of the swarm records and remembered peers are
taken after the first sixth and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from peerloom.node.http_feed import SwarmFeed
from tests.benchmarks.rows import Row, main
from tests.helpers import Node, swarm_folder, write_run
from tests.helpers import Swarm as RealSwarm
from tests.sim.swarm import Member, Plan, Swarm, play, spec

KILL_EVERY_S = 20.0
WARM_UP = 0.3  # share of the time after which the first figures are taken
QUICK_MINUTES, MINUTES, FULL_MINUTES = 0.4, 5.0, 30.0
QUICK_DAYS, DAYS, FULL_DAYS = 0.04, 0.5, 3.0
VIRTUAL_STEP_S = 6.0  # ten of them are a round
VIRTUAL_KILL_S = 1200.0
DAY_S = 86_400.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """One node's figures at a time; `log_bytes` and `rounds` are since its start."""

    rss: float
    files: float
    log_bytes: float
    rounds: float
    records: float

    @property
    def log_bytes_a_round(self) -> float:
        return self.log_bytes / max(1.0, self.rounds)


def growth(first: Sample, last: Sample, who: str, setting: str) -> list[Row]:
    """The rows of one node: the end against the time after the warm-up."""
    since = max(1.0, last.rounds - first.rounds)
    log_after = (last.log_bytes - first.log_bytes) / since
    figures = [
        ("rss", last.rss / MIB, first.rss / MIB, "MiB"),
        ("open_files", last.files, first.files, "files"),
        ("log_bytes_a_round", log_after, first.log_bytes_a_round, "bytes"),
        ("dht_records", last.records, first.records, "records"),
    ]
    return [
        Row(name=f"{who}_{name}", value=value, unit=unit, baseline="after the warm-up", baseline_value=before or 1.0,
            setting=setting)
        for name, value, before, unit in figures
    ]  # fmt: skip


def sample(node: Node, records: int) -> Sample:
    """A real node's figures now; memory and files are the daemon's, its children's left out."""
    process = psutil.Process(node.pid)
    journals = list((node.home / "runs").glob("*/metrics.jsonl*"))
    size = node.err.stat().st_size + sum(file.stat().st_size for file in journals)
    return Sample(process.memory_info().rss, process.num_fds(), size, len(node.rounds()), records)


def real(minutes: float, count: int) -> list[Row]:
    """The real part; a node that does not live through it ends it with an error."""
    with swarm_folder() as folder:
        swarm = RealSwarm(folder, write_run(folder / "run"), {"TMPDIR": str(folder / "tmp")})
        try:
            swarm.start()
            names = [f"node-{number}" for number in range(count)]
            swarm.trainers(*names)
            rows = _kills(swarm, names, minutes)
            return [*rows, _left_behind(swarm, rows[0].setting)]
        finally:
            for peer in swarm.started:
                peer.destroy()


def _left_behind(swarm: RealSwarm, setting: str) -> Row:
    """Ends all nodes in order and counts the temporary files that are left, of the killed ones above all."""
    for peer in [peer for peer in swarm.started if peer.running]:
        peer.end()
    left = [path for pattern in ("peerloom-*", "hivemind-*") for path in (swarm.folder / "tmp").glob(pattern)]
    return Row(name="temporary_files_left", value=len(left), unit="files", baseline="one node that runs",
               baseline_value=1.0, setting=setting)  # fmt: skip


def _kills(swarm: RealSwarm, names: list[str], minutes: float) -> list[Row]:
    watched = {"bootstrap": swarm.nodes["seed"], "trainer": swarm.nodes[names[0]]}
    began, first, kills, rng = time.monotonic(), dict[str, Sample](), 0, random.Random(1)
    next_kill = began + KILL_EVERY_S
    while (passed := time.monotonic() - began) < minutes * 60:
        time.sleep(1.0)
        if not first and passed >= WARM_UP * minutes * 60:
            first = _look(swarm, watched)
        if time.monotonic() >= next_kill and len(names) > 1:
            name = rng.choice(names[1:])
            victim = swarm.nodes[name]
            victim.process.kill()
            victim.process.wait()
            swarm.trainer(name)
            kills, next_kill = kills + 1, time.monotonic() + KILL_EVERY_S
    last = _look(swarm, watched)
    setting = f"{len(names)} trainers, {minutes:g} minutes, {kills} kills"
    return [row for who in watched for row in growth(first[who], last[who], who, setting)]


def _look(swarm: RealSwarm, watched: dict[str, Node]) -> dict[str, Sample]:
    _, status = swarm.status()
    return {who: sample(node, len(status["nodes"])) for who, node in watched.items()}


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
    minutes = arguments.minutes or pick(QUICK_MINUTES, MINUTES, FULL_MINUTES)
    days = arguments.days or pick(QUICK_DAYS, DAYS, FULL_DAYS)
    nodes = arguments.nodes or (2 if arguments.quick else 4)
    return [*virtual(days, nodes), *real(minutes, nodes)]


def flags(parser: argparse.ArgumentParser) -> None:
    """How long, and how many."""
    parser.add_argument("--minutes", type=float, help="of real nodes")
    parser.add_argument("--days", type=float, help="of virtual time")
    parser.add_argument("--nodes", type=int, help="trainers")


if __name__ == "__main__":
    main("Memory, files, logs and records over time", measure, flags)
