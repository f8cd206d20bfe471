"""Whom a stage's host sees: not those whose stages have other layers than its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerloom.node.context import Context
from peerloom.node.stage_view import StageView
from peerloom.node.worker.tasks.stage import QUARTER, cut_digest

OURS, THEIRS = (cut_digest(spans)[:QUARTER] for spans in ([range(2), range(2, 4)], [range(3), range(3, 4)]))


def record(name: str, digest: str) -> Any:
    return SimpleNamespace(
        peer_id=name, role="trainer", state="training", stage=1, stage_role="hosts", init_digest=digest, issued_at=0.0
    )


def test_a_host_that_cuts_the_model_otherwise_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    theta, text = "a" * QUARTER, "b" * 2 * QUARTER
    others = [
        record("alike", "c" * QUARTER + OURS), record("last", "d" * QUARTER + OURS + text),
        record("other", theta + THEIRS), record("early", ""),
    ]  # fmt: skip
    facts = SimpleNamespace(init_digest="", peer_id="me", stage=0, stage_role="")
    context = SimpleNamespace(view=SimpleNamespace(believed=lambda: others, silent={}), facts=facts)
    view = StageView(cast(Context, context))
    assert len(view.hosts(1)) == len(view.claims()) == 4  # before it has a stage of its own it cannot tell
    facts.init_digest = theta + OURS + text
    for _ in range(2):
        assert [each.peer_id for each in view.hosts(1)] == ["alike", "early", "last"]
        assert "other" not in {claim.peer for claim in view.claims()}
    assert caplog.text.count("cuts the model into other stages") == 1
