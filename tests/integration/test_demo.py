"""`peer demo` from end to end: a swarm of real processes, its figures, and nothing left of it."""

from __future__ import annotations

import contextlib
import json

import psutil
import pytest

from peerloom.node.demo import LOSS_BELOW, PARTNERS, SPREAD_BELOW
from peerloom.node.failures import OK
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


def test_the_readme_demo_reaches_its_marks(swarm: Swarm) -> None:
    swarm.rest("seed")
    with swarm_folder() as folder:
        figures, tmp = folder / "figures.json", folder / "tmp"
        flags = ("--nodes", "4", "--minutes", "3", "--json", str(figures))
        done = run_peer("demo", *flags, timeout_s=300.0, TMPDIR=str(tmp))
        wait_for("no process left", lambda: not processes_with("TMPDIR", str(tmp)), 15.0)
        assert not list(tmp.glob("peerloom-*"))
        found = json.loads(figures.read_text())
    assert done.returncode == OK, done.stderr
    assert found["passed"] and not found["failures"] and not found["interrupted"]
    assert [node["name"] for node in found["nodes"]] == ["node-1", "node-2", "node-3", "node-4"]
    assert all(node["loss"] < LOSS_BELOW and node["partners"] >= PARTNERS for node in found["nodes"]), found
    assert found["spread"] < SPREAD_BELOW
    assert "was slow to stop" not in done.stdout
