"""Nodes with different numbers of devices in one swarm: they gossip, lose a rank, and change their number."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
import pytest

from peerloom.node.failures import OK
from peerloom.protocol.errors import ConfigError
from tests.helpers import Node, Swarm, run_peer, sentence, write_run
from tests.integration.test_swarm import assert_no_batch_repeated, met, newest_round, row_of

pytestmark = pytest.mark.slow


def ranks_of(node: Node) -> list[psutil.Process]:
    """The processes of its ranks but the first."""
    children = psutil.Process(node.pid).children()
    return [child for child in children if "peerloom.node.worker.rank" in child.cmdline()]


def test_two_devices_gossip_with_one_lose_a_rank_and_become_one(swarm: Swarm) -> None:
    swarm.rest("seed")
    one, two = swarm.trainer("one"), swarm.join("two", "--devices", "cpu:2")
    rows = [row_of(swarm, name) for name in ("one", "two")]
    for node, other in ((one, rows[1]), (two, rows[0])):
        node.wait_for("an exchange with the other", partial(met, node, other["peer_id"]))

    (rank,) = ranks_of(two)
    before = len(two.rounds())
    rank.kill()
    two.wait_for("rounds of the new group", lambda: len(two.rounds()) > before + 3)
    assert len(ranks_of(two)) == 1 and not rank.is_running()
    assert_no_batch_repeated(two)
    assert any("rank 1" in record["message"] and "again" in record["message"] for record in two.messages())
    assert not any("share no memory" in record["message"] for record in two.messages())
    assert row_of(swarm, "two")["started_at"] == rows[1]["started_at"]  # the daemon never left

    assert two.end() == OK
    two.expect_nothing_left()
    saved, lived = newest_round(two), len(two.rounds())
    again = swarm.join("two")
    again.wait_for("rounds on one device", lambda: len(again.rounds()) > lived + 3)
    assert again.rounds()[lived]["round"] == saved and not again.events("adopted")[len(two.events("adopted")) :]
    assert_no_batch_repeated(again)
    swarm.rest("seed")


def test_what_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    common = ("--listen", "127.0.0.1", "--home", str(tmp_path / "home"))
    gone = run_peer("join", "--run", str(run), "--devices", "98,99", *common)
    assert "'cuda:98' is not there" in sentence(gone, ConfigError.exit_code)
    text = run.read_text().split("[gasloc]")[0]
    run.write_text(f'method = "seedflow"\n{text}')
    whole = run_peer("join", "--run", str(run), "--devices", "cpu:2", *common)
    assert "SeedFlow cannot use several devices" in sentence(whole, ConfigError.exit_code)
