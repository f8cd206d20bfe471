"""Exchanges beneath local steps, with real processes: nodes meet, learn, survive a worker's death, and end in order."""

from __future__ import annotations

import pytest

from peerloom.node.failures import OK
from tests.helpers import Swarm, swarm_folder, write_run

pytestmark = pytest.mark.slow


def test_nodes_that_exchange_while_they_train(swarm: Swarm) -> None:
    swarm.rest("seed")
    with swarm_folder() as folder:
        variables = {"TMPDIR": str(folder / "tmp"), "PEER_CHECKPOINT_EVERY_S": "1"}
        overlapped = Swarm(folder, write_run(folder / "run", local_steps=30, overlap=True), variables)
        try:
            overlapped.start()
            a, b = overlapped.trainers("a", "b")
            b.wait_for("company", lambda: sum(event["partner"] is not None for event in b.rounds()) > 5)
            before = len(b.rounds())
            b.worker().kill()  # amid a round and, as often as not, an exchange beneath it
            again = b.wait_for("its return", lambda: [e for e in b.rounds()[before:] if e["partner"] is not None])
            assert again[0]["round"] > 0
            assert a.rounds()[-1]["held_out_loss"] < a.rounds()[0]["held_out_loss"] - 0.5
            assert [node.end() for node in (a, b)] == [OK, OK]
        finally:
            overlapped.stop()
