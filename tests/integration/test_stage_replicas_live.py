"""Two real nodes that host the same stage: their weights stay together, however much they differ in what they see."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from torch import Tensor

from peerloom.node import checkpoint
from peerloom.node.failures import OK
from tests.helpers import Node, Swarm, swarm_folder, wait_for
from tests.integration.test_pipeline_live import START_S, write_pipeline_run

pytestmark = [pytest.mark.slow, pytest.mark.long]

UPDATES, LOCAL_STEPS = 40, 2
Report = Callable[[str, object], None]


def apart(local_steps: int) -> float:
    """How far apart the hosts of stage 0 are after some updates of their own each; its last stage has one host."""
    with swarm_folder() as folder:
        run = write_pipeline_run(folder / "run", 0)
        text = run.read_text().replace("stages = 4", "stages = 2")
        run.write_text(f"{text}\n[gasloc]\nlocal_steps = {local_steps}\n")
        swarm = Swarm(folder, run, {"TMPDIR": str(folder / "tmp"), "PEER_CHECKPOINT_EVERY_S": "86400"})
        try:
            swarm.start()
            nodes = [swarm.join(name, "--stage", stage) for name, stage in (("a", "0"), ("b", "0"), ("last", "1"))]
            hosts = nodes[:2]
            wait_for("updates", lambda: min(len(node.events("update")) for node in hosts) > UPDATES, START_S)
            for node in hosts:
                node.process.send_signal(signal.SIGTERM)
            first, second = (theta_of(node) for node in hosts)
            met = [event for node in hosts for event in node.events("averaged") if event["partner"]]
            assert bool(met) is (local_steps < UPDATES)
            assert nodes[2].events("averaged") == [], "alone with its stage"
            assert nodes[2].end() == OK
            return float((first - second).square().mean().sqrt())
        finally:
            swarm.stop()


def theta_of(node: Node) -> Tensor:
    """What it left on the disk when it was told to stop."""
    assert node.process.wait(START_S) == OK
    found, _ = checkpoint.newest_intact(checkpoint.stage_folder(node.run_dir, 0), read_only=True)
    assert found is not None
    return found.theta


def test_two_hosts_of_a_stage_stay_together(record_property: Report) -> None:
    without, among = apart(10**6), apart(LOCAL_STEPS)
    record_property("rms_without", without)
    record_property("rms_with", among)
    assert among < 0.25 * without
