"""Six uneven nodes that keep being killed: how long fast nodes wait, how far apart all end, what checkpoints are lost.

    python -m tests.benchmarks.uneven [--quick] [--full] [--json FILE]

Real processes on the demo's run with `round_s`. The last node's worker runs at a quarter of the others' share of the
CPU (--nice). First nobody is killed, and the waiting is measured; then every 20 s another node is, by kill -9, and is
started again at once, with the same home. It must come back at its newest checkpoint or later. `--quick`: 3 nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peerloom.node.worker.data import prepare
from peerloom.node.worker.tokenizer import load_tokenizer
from peerloom.protocol.runspec import RunSpec
from tests.benchmarks.rows import Row, main, median
from tests.benchmarks.sessions import Session

NICE, SLOW_NICE = 10, 16  # weights 110 and 29: a quarter of a fast node's share of a busy core
ROUND_S = 3.0
KILL_EVERY_S = 20.0
CHECKPOINT_S = 5.0
START_S = 180.0
SETTLE_ROUNDS = 3  # the first rounds after a start are not measured: others are still starting


@dataclass(frozen=True, slots=True)
class Scale:
    """How many nodes, and seconds without and with kills, and to the end."""

    nodes: int
    calm_s: float
    killing_s: float
    last_s: float


QUICK, DEFAULT, FULL = Scale(3, 12, 10, 8), Scale(6, 120, 180, 45), Scale(6, 300, 600, 60)


@dataclass(slots=True)
class Node:
    """One node through all its lives."""

    name: str
    command: list[str]
    home: Path
    slow: bool
    session: Session
    stack: ExitStack
    lost: list[str] = field(default_factory=list)

    def rounds(self) -> list[dict[str, Any]]:
        """Of all lives, from the node's journal."""
        lines = [line for path in self.home.glob("runs/*/metrics.jsonl") for line in path.read_text().split("\n")[:-1]]
        return [event for event in map(json.loads, filter(None, lines)) if event["event"] == "round"]

    def newest_checkpoint(self) -> int:
        """The round of it, -1 for none."""
        found = self.home.glob("runs/*/checkpoints/round-*")
        return max((int(path.name.removeprefix("round-")) for path in found), default=-1)

    def kill_and_restart(self) -> tuple[int, int]:
        """kill -9 and a new start; returns the newest checkpoint's round and how many rounds it had told of."""
        self.session.kill()
        kept, told = self.newest_checkpoint(), len(self.rounds())
        self.session = self.stack.enter_context(Session(self.command, None, self.session.output))
        return kept, told


def waiting_share(rounds: Sequence[dict[str, Any]]) -> float:
    """Share of the time between its rounds' ends that a node spent in exchanges; raises ValueError for under 2."""
    if len(rounds) < 2:
        raise ValueError("too few rounds to measure: this machine is too busy, or the phase too short")
    return float(sum(event["exchange_s"] for event in rounds[1:]) / (rounds[-1]["t"] - rounds[0]["t"]))


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Runs the three phases and gives the rows."""
    scale = QUICK if arguments.quick else FULL if arguments.full else DEFAULT
    default = RunSpec()
    spec = replace(
        default, name="uneven", gasloc=replace(default.gasloc, round_s=ROUND_S),
        train=replace(default.train, eval_every_rounds=1),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="peerloom-uneven-") as folder, ExitStack() as stack:
        nodes = _start(Path(folder), spec, scale.nodes, stack)
        _until(nodes, lambda: all(len(node.rounds()) > SETTLE_ROUNDS for node in nodes), START_S)
        calm_from = time.time()
        _pass(nodes, scale.calm_s)
        waits = [waiting_share([each for each in node.rounds() if each["t"] >= calm_from]) for node in nodes]
        kills = _kill_in_turn(nodes, scale.killing_s)
        _pass(nodes, scale.last_s)
        losses = [next(each["held_out_loss"] for each in reversed(node.rounds())) for node in nodes]
        lost = [sentence for node in nodes for sentence in node.lost]
    return _rows(scale, waits, losses, kills, lost)


def _start(folder: Path, spec: RunSpec, count: int, stack: ExitStack) -> list[Node]:
    run, cache = folder / "run.toml", folder / "cache"
    run.write_text(spec.canonical())
    prepare(spec.data, load_tokenizer(spec.data.tokenizer), cache, lambda what, share: None)
    peer = [sys.executable, "-m", "peerloom.node"]
    seed = stack.enter_context(
        Session(
            [*peer, "bootstrap", "--run", str(run), "--home", str(folder / "seed"), "--listen", "127.0.0.1"],
            None, folder / "seed.out",
        )
    )  # fmt: skip
    invite = seed.wait_for(lambda: _invite(seed.output), START_S)
    nodes = []
    for index in range(count):
        home = folder / f"node-{index}"
        home.mkdir()
        (home / "cache").symlink_to(cache)
        command = [
            "env", f"PEER_CHECKPOINT_EVERY_S={CHECKPOINT_S}", *peer, "join", invite, "--home", str(home),
            "--listen", "127.0.0.1", "--threads", "1", "--device", "cpu", "-v",
            "--nice", str(SLOW_NICE if index == count - 1 else NICE),
        ]  # fmt: skip
        session = stack.enter_context(Session(command, None, folder / f"node-{index}.out"))
        nodes.append(Node(f"node-{index}", command, home, index == count - 1, session, stack))
    return nodes


def _invite(output: Path) -> str | None:
    lines = [line for line in output.read_text().split("\n")[:-1] if line.startswith("peer join ")]
    return lines[0].removeprefix("peer join ") if lines else None


def _kill_in_turn(nodes: list[Node], seconds: float) -> int:
    """Kills another node every KILL_EVERY_S, the slow one too; returns how many times."""
    rng, kills, end = random.Random(0), 0, time.monotonic() + seconds
    order: list[Node] = []
    while time.monotonic() < end:
        order = order or rng.sample(nodes, len(nodes))
        victim = order.pop()
        kept, told = victim.kill_and_restart()
        kills += 1
        _pass(nodes, KILL_EVERY_S)
        _until([*nodes], lambda v=victim, t=told: len(v.rounds()) > t, START_S)  # type: ignore[misc]
        first = victim.rounds()[told]["round"]
        if first < kept:
            victim.lost.append(f"{victim.name} came back at round {first} with a checkpoint of round {kept}")
    return kills


def _pass(nodes: Sequence[Node], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for node in nodes:
            node.session.check()
        time.sleep(0.5)


def _until(nodes: Sequence[Node], done: Any, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > end:
            tails = "\n".join(node.session.output.read_text(errors="replace")[-600:] for node in nodes)
            raise SystemExit(f"the nodes did not come so far within {timeout_s:.0f} s:\n{tails}")
        _pass(nodes, 0.5)


def _rows(scale: Scale, waits: list[float], losses: list[float], kills: int, lost: list[str]) -> list[Row]:
    setting = (
        f"{scale.nodes} nodes on {len(os.sched_getaffinity(0))} cores, the last at a quarter of a share, the demo's "
        f"run, round_s = {ROUND_S:g}"
    )
    fast = max(waits[:-1])
    return [
        Row(
            name="waiting_share", value=fast, unit="of the time, worst fast node", baseline="the slow node",
            baseline_value=max(waits[-1], 1e-9),
            setting=f"{setting}; median of the fast ones {median(waits[:-1]):.3f}; {scale.calm_s:.0f} s without kills",
        ),
        Row(
            name="loss_spread", value=max(losses) - min(losses), unit="nats a byte", baseline="best node's loss",
            baseline_value=min(losses), setting=f"{setting}; after {kills} kills, one a {KILL_EVERY_S:.0f} s or more",
        ),
        Row(
            name="lost_checkpoints", value=len(lost), unit="of the kills", baseline="kills",
            baseline_value=max(kills, 1),
            setting="; ".join(lost) or "every killed node came back at its newest checkpoint or later",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    main("Six uneven nodes that keep being killed", measure)
