"""The verdict on SeedFlow's demo: made from what the homes hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peerloom.node.demo_seedflow import SeedflowFigures, agreed, faults_of, figures_of
from peerloom.protocol.types import NodeStatus
from tests.unit.node.test_status import status

GOOD = SeedflowFigures(
    name="node-1", steps=100, messages=190, state_hash="ab" * 32, loss_before=2.9, loss_after=2.7
)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"steps": 99}, ["node-2 came to step 99 of 100; give the demo more --minutes"]),
        ({"loss_after": 2.86}, ["node-2's held-out loss did not fall by 0.05"]),
        ({"loss_before": None}, ["node-2's held-out loss did not fall by 0.05"]),
        ({"state_hash": "cd" * 32}, ["the nodes hold 2 different states, not one"]),
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
