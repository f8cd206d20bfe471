"""A swarm of one: it prints how to join it, and a second node does."""

from __future__ import annotations

import pytest

from peerloom.node.failures import OK
from tests.helpers import Node, Swarm

pytestmark = pytest.mark.slow


def test_a_lone_node_prints_its_invite_and_where_its_seconds_went(swarm: Swarm) -> None:
    text = str(swarm.run_file.parent / "text")
    first = Node(swarm.folder / "alone", "join", "--run", str(swarm.run_file), "-v", **swarm.variables)
    try:
        first.wait_for("its invite", lambda: "peer join /ip4/" in first.printed())
        first.wait_for("the seconds of its start", lambda: "first step" in first.said())
        second = Node(swarm.folder / "second", "join", first.invite(), "--data", text, **swarm.variables)
        try:
            second.wait_for("a round together", lambda: any(line["partner"] for line in second.rounds()))
            assert second.end() == OK
        finally:
            second.destroy()
        assert first.end() == OK
    finally:
        first.destroy()
