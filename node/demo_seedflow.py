"""What `peer demo --method seedflow` does otherwise: it makes a base model first, and compares what the homes hold.

The hashes are those of the sums that each node wrote when it stopped, read from its home: nobody's word is taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerloom.node.specs import demo_spec
from peerloom.protocol.errors import PeerloomError
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus

FALL = 0.05  # nats a byte by which held-out loss must have fallen
BASE_SHARE = 0.15  # of the demo's time, to make the base model in
START_S, END_S = 25.0, 20.0  # on an idle machine: until all nodes step, and to agree and stop in
START_SHARE = 1.5  # of what making the base took beside its steps, imports for the most: a busy machine starts slowly
MOST_STEPS, FEWEST_STEPS = 1000, 150  # fewer, and a node is done before the last one has started


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedflowFigures:
    """One node's end: its steps, and the messages and hash of its sums; loss before and after, in nats a byte."""

    name: str
    steps: int
    messages: int
    state_hash: str
    loss_before: float | None
    loss_after: float | None


async def make_run(folder: Path, nodes: int, seconds: float, cores: int) -> tuple[RunSpec, dict[str, Any]]:
    """Makes base model and text in `folder`: the run over them, as long as the time allows, and how the base was made.

    Raises PeerloomError when the base model could not be made.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    command = [sys.executable, "-m", "peerloom.node.worker.demo_base", str(folder), str(seconds * BASE_SHARE)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise PeerloomError(f"the demo's base model could not be made: {last[0]}")
    made: dict[str, Any] = json.loads(out)
    spec, base = demo_spec("seedflow", nodes), str(folder / "base")
    taken_s = clock() - began
    left_s = seconds - taken_s - max(START_S, START_SHARE * (taken_s - made["seconds"])) - END_S
    steps = int(left_s / (made["step_s"] * max(1.0, nodes / cores) * 2))  # twice: messages, evaluation, other work
    return replace(
        spec,
        model=replace(spec.model, path=base, digest=made["digest"]),
        data=replace(spec.data, source=str(folder / "text")),
        seedflow=replace(spec.seedflow, max_steps=min(MOST_STEPS, max(FEWEST_STEPS, steps))),
    ), made


def agreed(statuses: Sequence[NodeStatus], nodes: int, steps: int) -> bool:
    """Whether all trainers have taken their steps, and hold and evaluated one state: then it counts them all.

    (Each state counts its own node's steps. They may be fewer than `steps` in all: a node begins where others are.)
    """
    trainers = [status.record for status in statuses if status.record.role == "trainer"]
    return (
        len(trainers) == nodes
        and all(one.step >= steps and one.messages and one.loss is not None for one in trainers)
        and len({(one.state_hash, one.loss) for one in trainers}) == 1
    )


def figures_of(home: Path) -> SeedflowFigures:
    """What a home holds of its one run; zero and empty where it never came so far."""
    run = next(iter(sorted((home / "runs").glob("*"))), home)
    events = _events(run / "metrics.jsonl")
    losses = [event["loss"] for event in events if event["event"] == "evaluated"]
    about = _about(run)
    return SeedflowFigures(
        name=home.name,
        steps=int(about.get("step", 0)),
        messages=int(about.get("messages", 0)),
        state_hash=str(about.get("state_hash", "")),
        loss_before=losses[0] if losses else None,
        loss_after=losses[-1] if losses else None,
    )


def faults_of(figures: Sequence[SeedflowFigures], steps: int) -> list[str]:
    """One sentence for each mark that was not reached."""
    faults = []
    for node in figures:
        if not node.messages:
            faults.append(f"{node.name} took no step; give the demo more --minutes")
        elif node.loss_before is None or node.loss_after is None or node.loss_before - node.loss_after < FALL:
            faults.append(f"{node.name}'s held-out loss did not fall by {FALL}")
    hashes = {node.state_hash for node in figures}
    if len(hashes) != 1 or "" in hashes:
        late = min(node.steps for node in figures) < steps
        hint = "; not all came to their last step: give the demo more --minutes" if late else ""
        faults.append(f"the nodes hold {len(hashes)} different states, not one{hint}")
    return faults


def _events(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _about(run: Path) -> dict[str, Any]:
    """What the sums in a run's folder say of themselves, their hash among it."""
    from safetensors import SafetensorError, safe_open

    path = run / "sums.safetensors"
    if not os.path.exists(path):
        return {}
    try:
        with safe_open(path, framework="np") as file:
            found: dict[str, Any] = json.loads((file.metadata() or {})["about"])
            return found
    except (SafetensorError, OSError, ValueError, KeyError):
        return {}
