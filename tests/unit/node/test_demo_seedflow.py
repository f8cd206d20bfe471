"""The verdict on SeedFlow's demo: made from what the homes hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peerloom.node.demo_seedflow import FEWEST_STEPS, SeedflowFigures, agreed, faults_of, figures_of, make_run
from peerloom.node.worker.memory import anonymous_file
from peerloom.node.worker.tasks.seedflow import SeedflowTask
from peerloom.protocol.types import NodeStatus
from tests.unit.node.test_status import status
from tests.unit.node.tiny import never, setup

GOOD = SeedflowFigures(
    name="node-1", steps=100, messages=190, state_hash="ab" * 32, loss_before=2.9, loss_after=2.7
)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"steps": 99}, []),
        ({"messages": 0}, ["node-2 took no step; give the demo more --minutes"]),
        ({"loss_after": 2.86}, ["node-2's held-out loss did not fall by 0.05"]),
        ({"loss_before": None}, ["node-2's held-out loss did not fall by 0.05"]),
        ({"state_hash": "cd" * 32}, ["the nodes hold 2 different states, not one"]),
        (
            {"state_hash": "", "steps": 99},
            ["the nodes hold 2 different states, not one; not all came to their last step: "
             "give the demo more --minutes"],
        ),
    ],
)
def test_each_mark_is_judged(other: dict[str, Any], said: list[str]) -> None:
    assert faults_of([GOOD, replace(GOOD, name="node-2", **other)], 100) == said


def told(name: str, **changes: Any) -> NodeStatus:
    base = status(name, loss=2.5)
    fields = {"step": 100, "messages": 190, "state_hash": "ab" * 32, **changes}
    return replace(base, record=replace(base.record, **fields))


def test_it_is_over_when_all_hold_one_state() -> None:
    assert agreed([told("a"), told("b")], 2, 100)
    assert not agreed([told("a")], 2, 100), "one is not there yet"
    for change in ({"step": 99}, {"messages": 0}, {"state_hash": "cd" * 32}, {"loss": 2.6}, {"loss": None}):
        assert not agreed([told("a"), told("b", **change)], 2, 100), change


@pytest.mark.slow
async def test_the_run_stands_on_a_base_of_its_own(tmp_path: Path) -> None:
    spec, made = await make_run(tmp_path, nodes=2, seconds=20.0, cores=2)
    spec.check()
    assert made["steps"] > 0 and spec.seedflow.max_steps == FEWEST_STEPS, "no time is left for more"
    given = setup(spec, tmp_path, "node-1")
    task = SeedflowTask(given, anonymous_file(), lambda what, share: None)
    assert task.ready().init_digest == spec.model.digest, "which the run names"
    assert task.evaluate().loss < 5.0, "the base has learnt something"
    assert len(task.steps(2, 0, 0, never).scalars) == 2


def test_figures_are_what_a_home_holds(tmp_path: Path) -> None:
    home = tmp_path / "node-1"
    run = home / "runs" / "0123"
    run.mkdir(parents=True)
    empty = SeedflowFigures(
        name="node-1", steps=0, messages=0, state_hash="", loss_before=None, loss_after=None
    )
    assert figures_of(home) == empty and faults_of([empty], 100)
    events = [{"event": "evaluated", "loss": 2.9}, {"event": "flush"}, {"event": "evaluated", "loss": 2.7}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "torn')
    about = {"step": 100, "messages": 190, "state_hash": "ab" * 32}
    save_file({"sums": torch.zeros(1)}, run / "sums.safetensors", {"about": json.dumps(about)})
    assert figures_of(home) == GOOD
