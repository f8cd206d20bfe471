"""`peer demo` from end to end: a swarm of real processes, its figures, and nothing left of it."""

from __future__ import annotations

import contextlib
import json

import psutil
import pytest

from peerloom.node.demo import LOSS_BELOW, SPREAD_BELOW
from peerloom.node.failures import OK, UNEXPECTED
from tests.helpers import Swarm, run_peer, swarm_folder, wait_for

pytestmark = pytest.mark.slow


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """All live processes with this in their environment: the demo's nodes have sessions of their own."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_a_short_demo_ends_as_its_figures_say(swarm: Swarm) -> None:
    swarm.rest("seed")
    with swarm_folder() as folder:
        figures, tmp = folder / "figures.json", folder / "tmp"
        done = run_peer("demo", "--nodes", "2", "--minutes", "0.75", "--json", str(figures), TMPDIR=str(tmp))
        wait_for("no process left", lambda: not processes_with("TMPDIR", str(tmp)), 15.0)
        assert not list(tmp.glob("peerloom-*"))
        found = json.loads(figures.read_text())
    assert done.returncode == (OK if found["passed"] else UNEXPECTED), done.stderr
    assert found["passed"] == (not found["failures"])
    assert not found["interrupted"]
    told = [line for line in done.stderr.splitlines() if line.startswith("peer: the demo failed: ")]
    assert told == [f"peer: the demo failed: {failure}" for failure in found["failures"]]
    assert "was slow to stop" not in done.stdout
    if found["passed"]:  # how far 45 s lead depends on the machine
        assert [node["name"] for node in found["nodes"]] == ["node-1", "node-2"]
        assert all(node["loss"] < LOSS_BELOW and node["partners"] == 1 for node in found["nodes"])
        assert found["spread"] < SPREAD_BELOW
