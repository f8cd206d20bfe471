"""The real part of `soak`: a bootstrap node and N trainers, of which one but the first is killed and started again.

The bootstrap node and the first trainer live through it. Of both, memory, open files, bytes of log and journal, rounds
and the DHT's records are written to a file every few seconds, a JSON line each, so that nothing that happens later can
take them away. A row compares the medians of the last tenth of the time and of the tenth after the warm-up.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

import psutil

from tests.benchmarks.rows import Row
from tests.helpers import Node, Swarm, processes_of, swarm_folder, write_run

KILL_EVERY_S: Final = 20.0
SAMPLE_EVERY_S: Final = 5.0
WARM_UP: Final = 0.3  # share of the time after which figures count
SPAN: Final = 0.1  # share of the time whose median is a figure
MIB: Final = 2**20
SAMPLES: Final = Path(__file__).parent / "results/soak/real.jsonl"
FAULTS = (AssertionError, OSError, ValueError, psutil.Error, subprocess.SubprocessError)  # of a node, not of this code


@dataclass(frozen=True, slots=True)
class Sample:
    """One node's figures `at` seconds after the start; `log_bytes` and `rounds` are since its own."""

    who: str
    at: float
    kills: int
    rss: float
    files: float
    log_bytes: float
    rounds: float
    records: float


def growth(first: Sample, last: Sample, setting: str) -> list[Row]:
    """The rows of one node: the end against the time after the warm-up."""
    log_before = first.log_bytes / max(1.0, first.rounds)
    log_after = (last.log_bytes - first.log_bytes) / max(1.0, last.rounds - first.rounds)
    kept = [
        ("rss", last.rss / MIB, first.rss / MIB, "MiB"),
        ("open_files", last.files, first.files, "files"),
        ("log_bytes_a_round", log_after, log_before, "bytes"),
        ("dht_records", last.records, first.records, "records"),
    ]
    if not last.rounds:  # a bootstrap node has none: its log grows with time alone
        kept[2] = (
            "log_bytes_a_minute",
            60 * (last.log_bytes - first.log_bytes) / max(1.0, last.at - first.at),
            60 * first.log_bytes / max(1.0, first.at),
            "bytes",
        )
    return [
        Row(name=f"{last.who}_{name}", value=value, unit=unit, baseline="after the warm-up",
            baseline_value=before or 1.0, setting=setting)
        for name, value, before, unit in kept
    ]  # fmt: skip


def middle(samples: list[Sample]) -> Sample:
    """The medians of all figures over some samples of one node."""
    numbers = ("at", "rss", "files", "log_bytes", "rounds", "records")
    return replace(samples[-1], **{name: median(getattr(each, name) for each in samples) for name in numbers})


def figures(file: Path, note: str = "") -> list[Row]:
    """The rows of a file of samples, however far it goes; raises ValueError when it holds none after the warm-up."""
    samples = [Sample(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    if not samples:
        raise ValueError(f"{file} holds no samples")
    end, kills = max(each.at for each in samples), max(each.kills for each in samples)
    rows = []
    for who in dict.fromkeys(each.who for each in samples):
        own = [each for each in samples if each.who == who]
        early = [each for each in own if WARM_UP * end <= each.at <= (WARM_UP + SPAN) * end]
        late = [each for each in own if each.at >= (1 - SPAN) * end]
        if not (early and late):
            raise ValueError(f"{file} holds too few samples of {who}")
        rows += growth(middle(early), middle(late), f"{end / 60:.1f} minutes, {kills} kills{note}")
    return rows


def real(minutes: float, count: int, file: Path) -> list[Row]:
    """Runs it; what goes wrong on the way or at the end is printed and counted, and costs no figure."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("", encoding="utf-8")
    faults: list[str] = []
    with swarm_folder() as folder:
        swarm = Swarm(folder, write_run(folder / "run"), {"TMPDIR": str(folder / "tmp")})
        try:
            with noted(faults):
                _live(swarm, [f"node-{number}" for number in range(count)], minutes, file, faults)
            left = _end(swarm, faults)
        finally:
            for peer in swarm.started:
                with noted(faults):
                    peer.destroy()
    for fault in faults:
        print(f"soak: {fault}", file=sys.stderr)
    rows = figures(file, f", a bootstrap node and {count} trainers")
    end = [("temporary_files_left", left, "files"), ("faults", len(faults), "faults")]
    return rows + [
        Row(name=name, value=value, unit=unit, baseline="none, counted as one", baseline_value=1.0,
            setting=rows[0].setting)
        for name, value, unit in end
    ]  # fmt: skip


@contextmanager
def noted(faults: list[str]) -> Iterator[None]:
    """Writes a fault of a node down instead of letting it end the benchmark."""
    try:
        yield
    except FAULTS as error:
        faults.append(f"{type(error).__name__}: {error}")


def _live(swarm: Swarm, names: list[str], minutes: float, file: Path, faults: list[str]) -> None:
    swarm.start()
    swarm.trainers(*names)
    watched = {"bootstrap": swarm.nodes["seed"], "trainer": swarm.nodes[names[0]]}
    pages = {who: node.page() for who, node in watched.items()}
    began, kills, rng = time.monotonic(), 0, random.Random(1)
    next_kill, next_sample = began + KILL_EVERY_S, began
    while (now := time.monotonic()) - began < minutes * 60:
        if now >= next_sample:
            next_sample = now + SAMPLE_EVERY_S
            for who, node in watched.items():
                if not node.running:
                    raise AssertionError(f"{who} ended with {node.process.returncode}\n{node.tail()}")
                with noted(faults), file.open("a", encoding="utf-8") as lines:  # one that is too busy is asked again
                    lines.write(json.dumps(asdict(sample(who, node, pages[who], now - began, kills))) + "\n")
        if now >= next_kill and len(names) > 1:
            next_kill, kills = now + KILL_EVERY_S, kills + 1
            _kill_and_start(swarm, rng.choice(names[1:]))
        time.sleep(0.5)


def _kill_and_start(swarm: Swarm, name: str) -> None:
    victim = swarm.nodes[name]
    victim.process.kill()
    victim.process.wait()
    swarm.trainer(name)


def sample(who: str, node: Node, page: str, at: float, kills: int) -> Sample:
    """A live node's figures now; memory and files are the daemon's, its children's left out."""
    process = psutil.Process(node.pid)
    journals = list((node.home / "runs").glob("*/metrics.jsonl*"))
    size = node.err.stat().st_size + sum(journal.stat().st_size for journal in journals)
    rounds = sum(journal.read_bytes().count(b'"event": "round"') for journal in journals)
    return Sample(who, at, kills, process.memory_info().rss, process.num_fds(), size, rounds, _records(page))


def _records(page: str) -> float:
    """The DHT records that a node keeps, as its /metrics say."""
    with urllib.request.urlopen(page + "metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("peerloom_dht_records "))


def _end(swarm: Swarm, faults: list[str]) -> int:
    """Ends all nodes in order and counts the temporary files that are left, of the killed ones above all."""
    for peer in [peer for peer in swarm.started if peer.running]:
        with noted(faults):
            peer.end()
    for peer in swarm.started:
        with suppress(psutil.Error):
            faults += [f"left of {peer.name}: {' '.join(each.cmdline())[:200]}" for each in processes_of(peer.pid)]
    return len([path for name in ("peerloom-*", "hivemind-*") for path in (swarm.folder / "tmp").glob(name)])
