"""Four stages as real processes: exact to the delayed-gradient reference, and alive after kill -9."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from peerloom.node import checkpoint
from peerloom.node.failures import OK
from peerloom.node.specs import load_spec
from peerloom.optim.flat import FlatParameters
from tests.helpers import Node, Swarm, run_peer, swarm_folder, write_run
from tests.unit.node.stage_tasks import reference

pytestmark = pytest.mark.slow

STAGES, UPDATES = 4, 50
Report = Callable[[str, object], None]
START_S = 300.0  # five nodes import torch on a machine that may be busy


def write_pipeline_run(folder: Path, updates: int, **keys: object) -> Path:
    """A run.toml of four tiny stages; 0 updates: without an end."""
    run = write_run(folder)
    source = json.dumps(str(folder / "text"))
    table = "\n".join(f"{name} = {json.dumps(value)}" for name, value in keys.items())
    run.write_text(f"""
name = "tiny-pipeline"
method = "pipeline"
token_budget = {updates * 4 * 32}
[model]
hidden_size = 32
intermediate_size = 48
layers = {STAGES}
heads = 2
kv_heads = 2
[data]
source = {source}
sequence_length = 32
held_out = 0.2
[train]
batch_size = 4
warmup_steps = 10
total_steps = 1000
eval_batches = 2
[pipeline]
stages = {STAGES}
encoding = "fp32"
{table}
""")
    return run


@contextmanager
def pipeline(updates: int, names: list[str], **keys: object) -> Iterator[tuple[Swarm, list[Node]]]:
    """A swarm of nodes; those called stage-K host stage K."""
    with swarm_folder() as folder:
        variables = {"TMPDIR": str(folder / "tmp"), "PEER_CHECKPOINT_EVERY_S": "86400"}
        swarm = Swarm(folder, write_pipeline_run(folder / "run", updates, **keys), variables)
        try:
            swarm.start()
            nodes = [
                swarm.join(name, *(("--stage", name[-1]) if name.startswith("stage-") else ())) for name in names
            ]
            yield swarm, nodes
        finally:
            swarm.stop()


def newest(node: Node, stage: int) -> checkpoint.Checkpoint:
    found, _ = checkpoint.newest_intact(checkpoint.stage_folder(node.run_dir, stage), read_only=True)
    assert found is not None
    return found


def test_four_processes_are_the_delayed_gradient_reference(tmp_path: Path) -> None:
    with pipeline(UPDATES, [f"stage-{stage}" for stage in range(STAGES)]) as (swarm, nodes):
        for node in nodes:
            assert node.process.wait(START_S) == OK
        spec = load_spec(nodes[0].run_dir / "run.toml")
        states = [newest(node, stage) for stage, node in enumerate(nodes)]
        lane = (states[0].meta.pipeline or {})["lane"]
        stages, losses = reference(spec, tmp_path / "cache", UPDATES, lane)
        for state, stage in zip(states, stages, strict=True):
            assert state.meta.step == UPDATES
            flat = FlatParameters(stage.named_in_whole()).flat  # type: ignore[operator]
            assert float((state.theta - flat).abs().max()) <= 1e-6
        told = [event["loss"] for event in nodes[-1].events("update")]
        assert told == pytest.approx(losses, abs=1e-5)
        out = swarm.folder / "whole"
        homes = [argument for node in nodes for argument in ("--stages-from", str(node.home))]
        done = run_peer("export", "--out", str(out), *homes, "--home", str(nodes[0].home))
        assert done.returncode == OK, done.stderr
        check_export(out, stages)


def check_export(folder: Path, stages: list[torch.nn.Module]) -> None:
    """The exported model is the stages, one after the other."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(20).view(1, 20) % 200
    hidden: torch.Tensor = ids
    with torch.no_grad():
        for stage in stages:
            hidden = stage(hidden)
        assert torch.allclose(AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits, hidden, atol=1e-4)


def test_a_stage_killed_under_load_is_taken_over(record_property: Report) -> None:
    names = [f"stage-{stage}" for stage in range(STAGES)]
    with pipeline(0, names, backup_every=5, heartbeat_s=1.0, dead_after_s=4.0) as (swarm, nodes):
        first, victim = nodes[0], nodes[2]
        first.wait_for("updates", lambda: len(first.events("update")) > 30, START_S)
        spare = swarm.join("spare")  # once every stage has a host: it stands by
        spare.wait_for("a copy to take over with", lambda: list(spare.home.glob("runs/*/stage-*/checkpoints/round-*")))
        before = len(first.events("update"))
        victim.process.kill()
        died = time.monotonic()
        victim.process.wait()
        spare.wait_for("the stage's new host", lambda: spare.events("hosting"))
        record_property("hosted_after_s", time.monotonic() - died)
        first.wait_for("updates again", lambda: len(first.events("update")) > before + 20)
        record_property("training_after_s", time.monotonic() - died)
        assert spare.events("hosting")[0]["stage"] == 2
        for node in (nodes[0], nodes[1], nodes[3], spare):
            made = [event["update"] for event in node.events("update")]
            assert made == list(range(made[0], made[0] + len(made))), "an update was made twice"
        victim.expect_nothing_left()
        _, seen = swarm.status()
        assert seen["totals"]["missing_stages"] == []
        out = swarm.folder / "gathered"
        done = run_peer("export", "--from", swarm.invite, "--out", str(out), "--home", str(swarm.folder / "onlooker"))
        assert done.returncode == OK, done.stderr
        assert len(list(out.glob("model-*-of-00004.safetensors"))) == STAGES
