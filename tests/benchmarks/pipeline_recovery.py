"""How soon a stage trains again whose host was killed, and what ten kills in a row cost the model that is trained.

Real nodes under load, each of four stages killed -9 in turn, then as they are drawn; the victim comes back as the next
standby, and each kill waits for a copy of its stage that is newer than the kill before. `recovery_s` is the longest
time from a kill to the first update of the stage under its next host, the standby, whose worker process is warm; its
baseline is what is allowed, the heartbeat's end and ten seconds. `recovery_loss` is the held-out loss where the run
with the kills ends against the mean of undisturbed runs of the same spec at the same update, and says how far these are
apart, and whether the runs are within three standard deviations all along: nodes draw their batches by who they are, so
no two runs are the same. One smoothing rule: a loss is the mean of the last 5 evaluations.

`--quick`: one kill, no loss. Without a flag: 3 kills and 2 undisturbed runs. `--full`: 10 and 3. Finished runs are kept
in results/pipeline/recovery.jsonl and not run again; without the file all are. Part of `tests.benchmarks.pipeline` too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, variance

from tests.benchmarks.rows import Row, machine, main, median
from tests.helpers import Node, Swarm, swarm_folder, wait_for

STAGES, BACKUP_EVERY, EVAL_EVERY = 4, 5, 10
ALLOWED_S = 10.0  # after the heartbeat's end
DEAD_AFTER_S = 4.0
MEAN_OF = 5  # evaluations
POINTS = 8  # along the curves where undisturbed runs are compared, for their noise
TEXT_BYTES = 1_500_000  # little, so that it takes no time to tokenize
LONGEST_S = 1800.0  # an undisturbed run
KEPT = Path(__file__).parent / "results" / "pipeline" / "recovery.jsonl"
SPEC = f"""
name = "recovery"
method = "pipeline"
[model]
hidden_size = 128
intermediate_size = 352
layers = {STAGES}
[train]
batch_size = 8
warmup_steps = 20
total_steps = 1000
[pipeline]
stages = {STAGES}
backup_every = {BACKUP_EVERY}
eval_every = {EVAL_EVERY}
heartbeat_s = 1.0
dead_after_s = {DEAD_AFTER_S}
[data]
sequence_length = 128
"""
Curve = list[tuple[int, float]]  # (update, loss), ascending


@dataclass(frozen=True, slots=True)
class Run:
    """One run: which stages were killed, seconds until training went on after each, and its curves."""

    stages: list[int]
    recoveries: list[float]
    held_out: Curve
    train: Curve
    seconds: float
    machine: str

    @property
    def kills(self) -> int:
        return len(self.recoveries)


def text_in(folder: Path, size: int = TEXT_BYTES) -> Path:
    """A part of the standard library, the same files each time."""
    where = folder / "text"
    if where.is_dir():
        return where
    where.mkdir(parents=True)
    for module in sorted(Path(json.__file__).parent.parent.glob("*.py")):
        if size > 0:
            text = module.read_text(encoding="utf-8")
            (where / f"{module.stem}.txt").write_text(text, encoding="utf-8")
            size -= len(text)
    return where


# ---- the rows


def recovery_rows(kills: int, undisturbed: int, file: Path | None) -> list[Row]:
    """Runs what `file` lacks, the run with the kills first; no row of the loss without undisturbed runs."""
    runs = kept(file)
    killed = next((run for run in runs if run.kills == kills and run.stages == stages_to_kill(kills)), None)
    if killed is None:
        killed = run_once(kills)
        keep(file, killed)
    quiet = [run for run in runs if not run.kills and run.held_out[-1][0] >= killed.held_out[-1][0]]
    while len(quiet) < undisturbed:
        print(f"undisturbed run {len(quiet) + 1} of {undisturbed}", file=sys.stderr)
        quiet.append(run_once(0, until=killed.held_out[-1][0]))
        keep(file, quiet[-1])
    return [recovery_row(killed), *([loss_row(killed, quiet)] if undisturbed else [])]


def recovery_row(run: Run) -> Row:
    """The longest of all kills, which says whether each was within what is allowed; the median in its setting."""
    longest, allowed = max(run.recoveries), DEAD_AFTER_S + ALLOWED_S
    killed = ", ".join(f"{stage}: {took:.1f}" for stage, took in zip(run.stages, run.recoveries, strict=True))
    at_once = sum(took <= ALLOWED_S for took in run.recoveries)  # with no time to notice that the heartbeat ended
    return Row(
        name="recovery_s",
        value=longest,
        unit="s, the longest" if longest <= allowed else "s, the longest, NOT within what is allowed",
        baseline="allowed: heartbeat's end and 10 s",
        baseline_value=allowed,
        setting=f"{run.kills} kills -9 in a row, each of a stage of {STAGES} under load, to the new host's first "
        f"update; median {median(run.recoveries):.1f} s, {at_once} within {ALLOWED_S:.0f} s of the kill itself; by "
        f"stage {killed}; all on one machine, the standby's worker warm",
    )


def loss_row(killed: Run, quiet: list[Run]) -> Row:
    """Where the killed run ends; its setting says how far runs are apart without kills, and with them all along."""
    last = killed.held_out[-1][0]
    theirs, noise = [smoothed(run.held_out, last) for run in quiet], spread([run.held_out for run in quiet], last)
    ours = smoothed(killed.held_out, last)
    apart = [
        abs(smoothed(killed.held_out, at) - fmean(smoothed(run.held_out, at) for run in quiet)) for at in points(last)
    ]
    verdict = "within" if max(apart) <= 3 * noise else "NOT within"
    return Row(
        name="recovery_loss",
        value=ours,
        unit="nats a token, held out",
        baseline=f"mean of {len(quiet)} undisturbed runs",
        baseline_value=fmean(theirs),
        setting=f"{killed.kills} kills in {last} updates; undisturbed {', '.join(f'{loss:.4f}' for loss in theirs)}, "
        f"their standard deviation {noise:.4f} over {len(points(last))} points of the curve; {apart[-1]:.4f} apart at "
        f"the end, {max(apart):.4f} where they are farthest, {verdict} 3 of these; a loss is the mean of {MEAN_OF} "
        "evaluations",
    )


def points(last: int) -> list[int]:
    """Updates at which curves are compared: equally far apart, the first quarter left out, where all fall alike."""
    return [round(last * (0.25 + 0.75 * (k + 1) / POINTS)) for k in range(POINTS)]


def smoothed(curve: Curve, at: int) -> float:
    """The mean of the last evaluations up to an update."""
    return fmean([loss for update, loss in curve if update <= at][-MEAN_OF:])


def spread(curves: list[Curve], last: int) -> float:
    """The standard deviation among runs, pooled over the points; 0 of a single one."""
    if len(curves) < 2:
        return 0.0
    return float(fmean(variance([smoothed(curve, at) for curve in curves]) for at in points(last)) ** 0.5)


# ---- what is kept


def kept(file: Path | None) -> list[Run]:
    """The runs of this spec."""
    if file is None or not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    fitting = [{"stages": [], **line} for line in lines if line["spec"] == SPEC]  # once it was not said which
    return [Run(**{name: line[name] for name in Run.__slots__}) for line in fitting]


def keep(file: Path | None, run: Run) -> None:
    """Adds one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"spec": SPEC, **asdict(run)}) + "\n")


# ---- the runs


def run_once(kills: int, until: int = 0) -> Run:
    """One swarm: as many kills, or undisturbed until that update is evaluated."""
    began = time.monotonic()
    with swarm_folder() as folder:
        scene = Scene(folder)
        try:
            scene.start(standby=kills > 0)
            recoveries = [scene.kill(stage) for stage in stages_to_kill(kills)]
            if not kills:
                wait_for(f"update {until}", lambda: scene.evaluated() >= until, LONGEST_S, every_s=1.0)
        finally:
            scene.swarm.stop()
        return Run(
            stages=stages_to_kill(kills),
            recoveries=[round(each, 2) for each in recoveries],
            held_out=scene.curve("evaluated", 0, "held_out_loss"),
            train=scene.curve("update", STAGES - 1, "loss"),
            seconds=round(time.monotonic() - began),
            machine=machine(),
        )


def stages_to_kill(kills: int) -> list[int]:
    """Each once, a middle one first, which has neighbours on both sides; then as they are drawn."""
    rng = random.Random(STAGES)
    return [(1 + turn) % STAGES if turn < STAGES else rng.randrange(STAGES) for turn in range(kills)]


class Scene:
    """A host a stage. Its swarm is to be stopped however it ends, once `start` was called."""

    def __init__(self, folder: Path) -> None:
        self._text, run = text_in(folder), folder / "run.toml"
        run.write_text(f"{SPEC}source = {json.dumps(str(self._text))}\n")
        self.swarm = Swarm(folder, run, {"TMPDIR": str(folder / "tmp")})
        self._killed_at = 0.0

    def start(self, *, standby: bool) -> None:
        """All hosts, until they train; with `standby` the first one too, the next ones come with each kill."""
        self.swarm.start()
        self._hosts = [self._join(f"node-{stage}", "--stage", str(stage)) for stage in range(STAGES)]
        wait_for("a host for each stage", lambda: all(node.events("hosting") for node in self._hosts))
        self._standby = self._join("node-spare") if standby else None
        wait_for("updates", lambda: all(len(node.events("update")) > 2 * BACKUP_EVERY for node in self._hosts))

    def _join(self, name: str, *stage: str) -> Node:
        return self.swarm.node(name, "join", self.swarm.invite, "--data", str(self._text), *stage)

    def kill(self, stage: int) -> float:
        """Seconds without an update of a stage that is killed now, once a standby is there and somebody has a copy."""
        victim, standby = self._hosts[stage], self._standby or self._join(self._spare)
        standby.wait_for("standing by", lambda: "standing by for stage" in standby.said())
        others = [node for node in (*self._hosts, standby) if node is not victim]
        since = self._killed_at  # an older copy would put the stage back to before the last kill
        wait_for(f"a copy of stage {stage}", lambda: any(has_copy(node.home, stage, since) for node in others))
        died = self._killed_at = time.time()
        victim.process.kill()
        victim.process.wait()
        first = standby.wait_for("an update of the new host", lambda: self._updates(standby, stage, died))[0]
        victim.expect_nothing_left()
        self._hosts[stage], self._spare, self._standby = standby, victim.name, None
        print(f"stage {stage} again after {first - died:.1f} s", file=sys.stderr)
        wait_for("updates on", lambda: len(self._updates(standby, stage, died)) > 2 * BACKUP_EVERY)
        return first - died

    def evaluated(self) -> int:
        """The last update that was evaluated."""
        found = self.curve("evaluated", 0, "held_out_loss")
        return found[-1][0] if found else 0

    def curve(self, event: str, stage: int, name: str) -> Curve:
        """Of all nodes' journals; an update that was made again after a kill counts as it was made last."""
        told = [each for node in self.swarm.nodes.values() for each in node.events(event) if each["stage"] == stage]
        found = {each["update"]: float(each[name]) for each in sorted(told, key=lambda each: each["t"])}
        return sorted((update, round(loss, 5)) for update, loss in found.items())

    @staticmethod
    def _updates(node: Node, stage: int, since: float) -> list[float]:
        return [event["t"] for event in node.events("update") if event["t"] > since and event["stage"] == stage]


def has_copy(home: Path, stage: int, since: float) -> bool:
    """Whether a home holds a copy of a stage that was written after `since`."""
    for folder in (home / "runs").glob(f"*/stage-{stage:03d}/checkpoints/round-*"):
        with suppress(FileNotFoundError):  # an older one that makes room
            if folder.stat().st_mtime > since:
                return True
    return False


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Kills, then as many updates without."""
    if arguments.quick:
        return recovery_rows(1, 0, None)
    return recovery_rows(*((10, 3) if arguments.full else (3, 2)), KEPT)


if __name__ == "__main__":
    main(__doc__ or "", measure)
