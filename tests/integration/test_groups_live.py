"""Groups of four and fragments between real processes: a round of many legs over gRPC, and a member killed amid it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from peerloom.node.failures import OK
from tests.helpers import Node, Swarm, swarm_folder, write_run

pytestmark = pytest.mark.slow

LEGS = 2 * 4  # fragments, each halved twice and doubled twice


def test_groups_of_four_average_in_fragments_and_outlive_a_member(swarm: Swarm) -> None:
    swarm.rest("seed")
    with swarm_folder() as folder:
        form = {"group_size": 4, "fragments": 2, "encoding": "int8"}
        run = write_run(folder / "run", pairing="scheduled", local_steps=8, clip_radius=0, **form)
        grouped = Swarm(folder, run, {"TMPDIR": str(folder / "tmp"), "PEER_CHECKPOINT_EVERY_S": "1"})
        try:
            grouped.start()
            nodes = grouped.trainers("a", "b", "c", "d")
            for node in nodes:
                whole = node.wait_for("a round whose legs all met", lambda n=node: _rounds(n, all))
                assert len(set(_legs(whole[-1]))) == 2, "in a group of four two others are met"
            *left, killed = nodes
            before = {node.name: len(node.rounds()) for node in left}
            killed.process.send_signal(signal.SIGKILL)
            killed.process.wait()
            for node in left:
                later = before[node.name] + 3
                node.wait_for("company without the killed one", lambda n=node, at=later: _rounds(n, any, at))
                first, last = node.rounds()[0], node.rounds()[-1]
                assert last["held_out_loss"] < first["held_out_loss"] - 0.5
            assert [node.end() for node in left] == [OK] * 3
        finally:
            grouped.stop()


def _legs(event: dict[str, Any]) -> list[str]:
    """The partner of each leg of a round, "" where there was none."""
    return [partner.strip("-") for partner in event.get("met", "").split()]


def _rounds(node: Node, wanted: Callable[[list[str]], bool], since: int = 0) -> list[dict[str, Any]]:
    """Its rounds of so many legs that are as wanted."""
    return [event for event in node.rounds()[since:] if len(legs := _legs(event)) == LEGS and wanted(legs)]
