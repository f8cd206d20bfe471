"""What being a node costs: tokens/s, memory and time to the first step, against loops and processes with nothing more.

    python -m tests.benchmarks.overhead [--quick] [--full] [--json FILE]

A swarm of real processes (`peer bootstrap`, two `peer join`) trains, each trainer with its daemon, worker and p2pd on
a core of its own; two bare PyTorch loops, one on each of the same cores, take turns with it: while one side runs the
other is stopped. So both sides have the same neighbour. A turn of the node is EVAL_EVERY whole rounds, in which there
is one evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from peerloom.node.specs import embedded_spec
from peerloom.node.worker.data import prepare
from peerloom.node.worker.tokenizer import load_tokenizer
from peerloom.protocol.runspec import RunSpec
from tests.benchmarks.rows import Row, main, median
from tests.benchmarks.sessions import Session, paused

EVAL_EVERY = 10
QUICK_ROUND_S = 1.0
QUICK_TURNS, TURNS, FULL_TURNS = 2, 5, 15
BARE_TURN_S = 4.0
QUICK_LAST_TURN_S = 35.0  # no turn begins later than this in quick mode, but the first
WARM_ROUNDS = 2
START_S, ROUND_S = 120.0, 60.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the node: its tokens a second, and where the time of its rounds went, in shares."""

    rate: float
    training: float
    exchange: float
    rest: float  # evaluation, mixing, journal, status


@dataclass(slots=True)
class Node:
    """A trainer of the swarm and the file it writes its rounds to."""

    session: Session
    home: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The journal's lines of one kind; a line that is being written is left out."""
        lines = [line for path in self.home.glob("runs/*/metrics.jsonl") for line in path.read_text().split("\n")[:-1]]
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def first_step_s(self) -> float:
        """Seconds from exec to the first optimizer step."""
        session = self.session
        first = session.wait_for(lambda: next(iter(self.events("first_step")), None), START_S)
        return float(first["t"]) - session.started_at

    def rounds(self, count: int) -> list[dict[str, Any]]:
        """The next round to end, which may have begun under other conditions, and `count` after it."""
        seen = len(self.events("round"))

        def look() -> list[dict[str, Any]] | None:
            found = self.events("round")[seen:]
            return found[: count + 1] if len(found) > count else None

        return self.session.wait_for(look, ROUND_S + count * ROUND_S)


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Starts both sides, lets them take turns, and asks for memory at the end."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this benchmark takes two cores: one a node")
    turns = QUICK_TURNS if arguments.quick else FULL_TURNS if arguments.full else TURNS
    default = embedded_spec()
    spec = replace(
        default,
        name="overhead",
        gasloc=replace(default.gasloc, round_s=QUICK_ROUND_S if arguments.quick else default.gasloc.round_s),
        train=replace(default.train, eval_every_rounds=EVAL_EVERY),
    )
    with tempfile.TemporaryDirectory(prefix="peerloom-overhead-") as folder, ExitStack() as stack:
        last_turn_at = time.monotonic() + (QUICK_LAST_TURN_S if arguments.quick else float("inf"))
        return _measure(Path(folder), spec, cores, turns, last_turn_at, stack)


def _measure(
    folder: Path, spec: RunSpec, cores: list[int], turns: int, last_turn_at: float, stack: ExitStack
) -> list[Row]:
    run, cache = folder / "run.toml", folder / "cache"
    run.write_text(spec.canonical())
    prepare(spec.data, load_tokenizer(spec.data.tokenizer), cache, lambda what, share: None)
    loops = [stack.enter_context(_bare_loop(folder, run, cache, core)) for core in cores]
    bare_first_s = _first_line(loops[0])[1] - loops[0].started_at
    _first_line(loops[1])
    with paused(loops):
        nodes = _swarm(folder, run, cache, cores, stack)
        first_s = nodes[0].first_step_s()
        nodes[0].rounds(WARM_ROUNDS)
        ours, theirs = [], []
        for _ in range(turns):
            ours.append(node_turn(nodes[0].rounds(EVAL_EVERY), nodes[0].session.output))
            with paused([node.session for node in nodes]):
                theirs.append(_bare_turn(loops, spec))
            if time.monotonic() > last_turn_at:
                break
        rss = psutil.Process(nodes[0].session.pid).memory_info().rss
    return rows(spec, ours, theirs, (first_s, bare_first_s), (rss, _bare_dht_rss(folder, cores[0])))


def _bare_loop(folder: Path, run: Path, cache: Path, core: int) -> Session:
    module = [sys.executable, "-m", "tests.benchmarks.overhead_bare", "loop"]
    return Session([*module, str(run), str(cache), f"bare {core}"], core, folder / f"bare-{core}.out")


def _swarm(folder: Path, run: Path, cache: Path, cores: list[int], stack: ExitStack) -> list[Node]:
    """A bootstrap peer, on the core of the second trainer, and two trainers that find their text tokenized."""
    peer = [sys.executable, "-m", "peerloom.node"]
    listen = ["--listen", "127.0.0.1"]
    seed = Session(
        [*peer, "bootstrap", "--run", str(run), "--home", str(folder / "seed"), *listen], cores[1], folder / "seed.out"
    )
    stack.enter_context(seed)
    invite = seed.wait_for(lambda: _invite(seed.output), START_S)
    nodes = []
    for core in cores:
        home = folder / f"node-{core}"
        home.mkdir()
        (home / "cache").symlink_to(cache)
        command = [*peer, "join", invite, "--home", str(home), *listen, "--threads", "1", "--device", "cpu", "-v"]
        nodes.append(Node(stack.enter_context(Session(command, core, folder / f"node-{core}.out")), home))
    return nodes


def _invite(output: Path) -> str | None:
    lines = [line for line in output.read_text().split("\n")[:-1] if line.startswith("peer join ")]
    return lines[0].removeprefix("peer join ") if lines else None


def node_turn(events: Sequence[dict[str, Any]], output: Path) -> Turn:
    """From the end of the first round in `events` to the end of the last; raises ValueError without an exchange."""
    first, rounds = events[0], events[1:]
    if not any(event["partner"] for event in rounds):
        raise ValueError(f"no round of this turn had a partner: {rounds[-1]['alone_because']}; see {output}")
    seconds = rounds[-1]["t"] - first["t"]
    training, exchange = (sum(event[key] for event in rounds) / seconds for key in ("train_s", "exchange_s"))
    rate = (rounds[-1]["tokens"] - first["tokens"]) / seconds
    return Turn(rate, training, exchange, 1.0 - training - exchange)


def _steps(output: Path) -> list[tuple[int, float]]:
    lines = [line.split() for line in output.read_text().split("\n")[:-1]]
    return [(int(step), float(at)) for step, at in lines if step.isdigit()]


def _first_line(loop: Session) -> tuple[int, float]:
    return loop.wait_for(lambda: next(iter(_steps(loop.output)), None), START_S)


def _bare_turn(loops: list[Session], spec: RunSpec) -> float:
    """Tokens a second of the first loop while both run, from the first line of this turn to the last."""
    before = len(_steps(loops[0].output))
    for loop in loops:
        loop.go_on()
    time.sleep(BARE_TURN_S)
    for loop in reversed(loops):
        loop.pause()
    lines = _steps(loops[0].output)[before:]
    return bare_rate(lines, spec.train.batch_size * spec.data.sequence_length)


def bare_rate(lines: Sequence[tuple[int, float]], tokens_a_step: int) -> float:
    """Tokens a second from (steps, time) of the first line to the last; raises ValueError for fewer than two."""
    if len(lines) < 2:
        raise ValueError("the bare loop made too few steps in its turn; this machine is too busy to measure on")
    return (lines[-1][0] - lines[0][0]) * tokens_a_step / (lines[-1][1] - lines[0][1])


def _bare_dht_rss(folder: Path, core: int) -> int:
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.overhead_bare", "dht"]
    with Session(command, core, folder / "dht.out") as bare:
        bare.wait_for(lambda: True if "ready" in bare.output.read_text() else None, START_S)
        return int(psutil.Process(bare.pid).memory_info().rss)


def rows(
    spec: RunSpec,
    ours: Sequence[Turn],
    theirs: Sequence[float],
    first_step_s: tuple[float, float],
    daemon_rss: tuple[int, int],
) -> list[Row]:
    """The rows, from the turns of both sides and (ours, theirs) of the others."""
    shares = {name: median([getattr(turn, name) for turn in ours]) for name in ("training", "exchange", "rest")}
    spent = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    batch = f"batch {spec.train.batch_size} x {spec.data.sequence_length}"
    return [
        Row(
            name="tokens_per_s",
            value=median([turn.rate for turn in ours]),
            unit="tokens/s",
            baseline="bare PyTorch loop on the same core",
            baseline_value=median(theirs),
            setting=(
                f"two nodes and a bootstrap, the embedded model, {batch}, 1 thread, {spec.gasloc.round_s:g} s a "
                f"round, evaluation of {spec.train.eval_batches} batches every {EVAL_EVERY} rounds, all included; "
                f"a bare loop runs on the other core too; median of {len(ours)} turns of {EVAL_EVERY} rounds; of the "
                f"node's time: {spent}; the worker keeps freed memory, the bare loop has libc's defaults"
            ),
        ),
        Row(
            name="daemon_rss",
            value=daemon_rss[0] / MIB,
            unit="MiB",
            baseline="a process with one hivemind DHTNode",
            baseline_value=daemon_rss[1] / MIB,
            setting="the daemon process alone, after all rounds; its worker and p2pd are others",
        ),
        Row(
            name="join_to_first_step",
            value=first_step_s[0],
            unit="s",
            baseline="bare loop process, exec to first step",
            baseline_value=first_step_s[1],
            setting="from exec, one core a node, two nodes at once, text tokenized before, fresh model",
        ),
    ]


if __name__ == "__main__":
    main("What being a node costs", measure)
