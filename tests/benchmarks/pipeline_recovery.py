"""How soon a stage trains again whose host was killed: real nodes under load, kill after kill, a stage drawn each time.

From kill -9 of one of three hosts to the first update of its stage under another: the standby's, whose worker process
is warm. The victim then comes back as the next standby. The baseline is what the issue allows: the heartbeat's end and
ten seconds.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from tests.benchmarks.rows import Row, median
from tests.helpers import Node, Swarm, swarm_folder, wait_for
from tests.unit.node.tiny import write_text

STAGES, BACKUP_EVERY = 3, 5
ALLOWED_S = 10.0  # after the heartbeat's end
DEAD_AFTER_S = 4.0


def text_in(folder: Path) -> Path:
    """Text that takes no time to tokenize."""
    where = folder / "text"
    return where if where.is_dir() else write_text(where, 200)


def recovery(kills: int) -> Row:
    """One row: the median over the kills, the longest in its setting."""
    with swarm_folder() as folder:
        scene = Scene(folder)
        try:
            seconds = [scene.kill(stage) for stage in stages_to_kill(kills)]
        finally:
            scene.swarm.stop()
    return Row(
        name="recovery_s",
        value=median(seconds),
        unit="s",
        baseline="allowed: heartbeat's end and 10 s",
        baseline_value=DEAD_AFTER_S + ALLOWED_S,
        setting=f"{kills} kills -9 in a row, each of a stage of {STAGES} under load, to the new host's first update; "
        f"longest {max(seconds):.1f} s; all on this machine, the standby's worker warm",
    )


def stages_to_kill(kills: int) -> list[int]:
    """The middle one first, which has neighbours on both sides; then as they are drawn."""
    rng = random.Random(kills)
    return [1, *(rng.randrange(STAGES) for _ in range(kills - 1))]


class Scene:
    """A host a stage, and a standby."""

    def __init__(self, folder: Path) -> None:
        self._text, run = text_in(folder), folder / "run.toml"
        run.write_text(f"""
name = "recovery"
method = "pipeline"
[model]
hidden_size = 64
intermediate_size = 128
layers = {STAGES}
[data]
source = {json.dumps(str(self._text))}
sequence_length = 64
[train]
batch_size = 4
[pipeline]
stages = {STAGES}
backup_every = {BACKUP_EVERY}
heartbeat_s = 1.0
dead_after_s = {DEAD_AFTER_S}
""")
        self.swarm = Swarm(folder, run, {"TMPDIR": str(folder / "tmp")})
        self.swarm.start()
        self._hosts = [self._join(f"node-{stage}", "--stage", str(stage)) for stage in range(STAGES)]
        wait_for("updates", lambda: all(len(node.events("update")) > 2 * BACKUP_EVERY for node in self._hosts))
        self._standby = self._join("node-spare")

    def _join(self, name: str, *stage: str) -> Node:
        return self.swarm.node(name, "join", self.swarm.invite, "--data", str(self._text), *stage)

    def kill(self, stage: int) -> float:
        """Seconds without an update of a stage that is killed now, once a standby is there and somebody has a copy."""
        victim, standby = self._hosts[stage], self._standby
        standby.wait_for("standing by", lambda: "standing by for stage" in standby.said())
        wait_for(f"a copy of stage {stage}", lambda: any(self._has_copy(node, stage) for node in self._others(victim)))
        died = time.time()
        victim.process.kill()
        victim.process.wait()
        first = standby.wait_for("an update of the new host", lambda: self._updates(standby, stage, died))[0]
        victim.expect_nothing_left()
        self._hosts[stage], self._standby = standby, self._join(victim.name)
        print(f"stage {stage} again after {first - died:.1f} s", file=sys.stderr)
        wait_for("updates on", lambda: len(self._updates(standby, stage, died)) > 2 * BACKUP_EVERY)
        return first - died

    def _others(self, victim: Node) -> list[Node]:
        return [node for node in (*self._hosts, self._standby) if node is not victim]

    @staticmethod
    def _has_copy(node: Node, stage: int) -> bool:
        return any((node.home / "runs").glob(f"*/stage-{stage:03d}/checkpoints/round-*"))

    @staticmethod
    def _updates(node: Node, stage: int, since: float) -> list[float]:
        return [event["t"] for event in node.events("update") if event["t"] > since and event["stage"] == stage]
