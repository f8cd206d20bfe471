"""Three terminals: nodes that find each other, train, die, come back, and leave in order."""

from __future__ import annotations

import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import psutil
import pytest

from peerloom.node.failures import DEGRADED, OK
from peerloom.protocol.runspec import RunSpec
from tests.helpers import Node, Swarm, run_peer, wait_for

pytestmark = pytest.mark.slow

Report = Callable[[str, object], None]
BUSY_S = 1.0  # by which a timer may be late on a machine with more to do than cores


def newest_round(node: Node) -> int:
    return int(node.checkpoints()[-1].name.removeprefix("round-"))


def assert_no_batch_repeated(node: Node) -> None:
    """Over all lives of a node."""
    drawn = sorted((event["first_batch"], event["first_batch"] + event["batches"]) for event in node.rounds())
    assert len(drawn) > 3
    for (_, end), (begin, _) in pairwise(drawn):
        assert begin >= end, f"batches from {begin} on were drawn again"


def met(node: Node, peer_id: str) -> bool:
    return any(event["partner"] == peer_id for event in node.rounds())


def status_of(url: str) -> int:
    """The status code of an answer over HTTP."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def row_of(swarm: Swarm, name: str) -> dict[str, Any]:
    """A node's line, once it trains."""
    return swarm.watcher().wait_for_node(
        f"{name} trains", name, lambda row: row["silent_s"] is None and row["round"] > 0
    )


def test_two_joiners_find_and_teach_each_other(swarm: Swarm, record_property: Report) -> None:
    watcher = swarm.watcher()
    a, b = swarm.trainer("a"), swarm.trainer("b")
    b.wait_for_rounds(1)
    since = time.monotonic()
    rows = [watcher.wait_for_node(f"{node.name} is listed", node.name, lambda row: True) for node in (a, b)]
    record_property("listed_after_s", time.monotonic() - since)
    for node, other in ((a, rows[1]), (b, rows[0])):
        node.wait_for("an exchange with the other", partial(met, node, other["peer_id"]))
    first, last = a.rounds()[0], a.wait_for_rounds(5)[-1]
    assert last["held_out_loss"] < first["held_out_loss"] - 0.5
    code, seen = swarm.status()
    assert (code, seen["health"]) == (OK, "healthy")
    assert seen["totals"]["trainers"] == seen["totals"]["training"] == 2
    assert seen["run"]["id"] == a.run_dir.name
    assert all(row["partners"] for row in seen["nodes"] if row["role"] == "trainer")
    if sys.platform.startswith("linux"):
        with urllib.request.urlopen(a.page() + "metrics", timeout=20) as answer:
            (moved,) = re.findall(rb"^peerloom_dht_received_bytes_total (\S+)$", answer.read(), re.MULTILINE)
        assert float(moved) > 10_000  # the records of three nodes, again and again


def test_a_late_joiner_begins_where_its_donor_is(swarm: Swarm) -> None:
    a, _ = swarm.trainers("a", "b")
    late = swarm.trainer("late")
    (adopted,) = late.wait_for("the model of a donor", lambda: late.events("adopted"))
    late.wait_for_rounds(1)
    assert adopted["round"] > 0
    assert abs(adopted["loss"] - adopted["donor_loss"]) < 0.05
    assert adopted["loss"] < a.rounds()[0]["held_out_loss"] - 0.5  # a fresh model's
    assert late.rounds()[0]["round"] == adopted["round"]
    assert late.end() == OK


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_node_told_to_stop_saves_and_withdraws(swarm: Swarm, number: signal.Signals, record_property: Report) -> None:
    swarm.trainers("a", "b")
    node, watcher = swarm.nodes["b"], swarm.watcher()
    row_of(swarm, "b")
    began = time.monotonic()
    assert node.end(number, seconds=10.0) == OK  # the time the issue gives a node to drain
    record_property("stopped_after_s", time.monotonic() - began)
    assert newest_round(node) == node.rounds()[-1]["round"] + 1
    assert [row["name"] for row in swarm.status()[1]["nodes"]] == ["a", "seed"]

    def listed() -> bool:
        return any(row["name"] == "b" for row in (watcher.newest() or {"nodes": []})["nodes"])

    wait_for("a watch that no longer lists the node", lambda: not listed())


def test_a_killed_node_is_seen_and_comes_back(swarm: Swarm, record_property: Report) -> None:
    a, b = swarm.trainers("a", "b")
    row, before = row_of(swarm, "a"), len(b.rounds())
    a.process.kill()
    died = time.monotonic()
    a.process.wait()
    a.expect_nothing_left()
    silent = swarm.watcher().wait_for_node("the killed node is silent", "a", lambda row: row["silent_s"] is not None)
    record_property("seen_silent_after_s", time.monotonic() - died)
    assert silent["silent_s"] < 35
    assert (swarm.watcher().newest() or {})["health"] == "degraded"
    b.wait_for_rounds(5)
    alone, match_timeout_s = b.rounds()[before:], RunSpec.from_toml(swarm.run_file.read_text()).gasloc.match_timeout_s
    assert max(event["exchange_s"] for event in alone) < match_timeout_s + BUSY_S

    saved, lived = newest_round(a), len(a.rounds())
    again = swarm.trainer("a")
    again.wait_for("rounds of its second life", lambda: len(again.rounds()) > lived + 3)
    assert again.rounds()[lived]["round"] == saved
    assert not again.events("adopted")
    assert_no_batch_repeated(again)
    reborn = swarm.watcher().wait_for_node(
        "it is heard from again", "a", lambda now: now["silent_s"] is None and now["started_at"] > row["started_at"]
    )
    assert reborn["peer_id"] == row["peer_id"]


def test_a_killed_worker_is_started_again(swarm: Swarm) -> None:
    a, _ = swarm.trainers("a", "b")
    row, worker, before = row_of(swarm, "a"), a.worker(), len(a.rounds())
    assert (psutil.Process(a.pid).nice(), worker.nice()) == (0, 10), "training steps back for everybody else"
    worker.kill()
    worker.wait(30)
    new = a.wait_for("another worker", lambda: (found := a.worker()).pid != worker.pid and found)
    assert isinstance(new, psutil.Process)
    a.wait_for("rounds of the new worker", lambda: len(a.rounds()) > before + 3)
    assert_no_batch_repeated(a)
    now = row_of(swarm, "a")
    assert (now["peer_id"], now["started_at"]) == (row["peer_id"], row["started_at"])  # the daemon never left
    assert any("starting it again" in record["message"] for record in a.messages())


def test_a_frozen_worker_is_told_as_stalled_until_it_goes_on(swarm: Swarm) -> None:
    swarm.trainers("a")
    swarm.rest("seed", "a", "watcher")
    c = swarm.join("c", **{"PEER_STALL_AFTER_S": "2"})
    c.wait_for_rounds(2)
    worker = c.worker()
    worker.suspend()
    try:
        row = swarm.watcher().wait_for_node("c is stalled", "c", lambda row: row["state"] == "stalled")
        assert row["reason"].startswith("no step for ") and row["silent_s"] is None  # its daemon is heard from
        code, told = swarm.status()
        assert code == DEGRADED
        assert [text for text in told["problems"] if text.startswith("c is stalled: no step for ")]
        assert status_of(c.page() + "healthz") == 503
    finally:
        worker.resume()
    c.wait_for_rounds(3)
    swarm.watcher().wait_for_node("c trains again", "c", lambda row: row["state"] not in ("stalled", "restarting"))
    assert c.worker().pid == worker.pid, "the same process went on"
    assert status_of(c.page() + "healthz") == 200
    c.end()


def test_a_truncated_checkpoint_falls_back_to_the_one_before(swarm: Swarm) -> None:
    swarm.trainers("a")
    node = swarm.nodes["a"]
    node.wait_for("two checkpoints", lambda: len(node.checkpoints()) >= 2)
    node.end()
    *_, older, newest = node.checkpoints()
    theta = newest / "theta.safetensors"
    theta.write_bytes(theta.read_bytes()[:-100])
    lived = len(node.rounds())
    again = swarm.trainer("a")
    again.wait_for("rounds", lambda: len(again.rounds()) > lived)
    assert again.rounds()[lived]["round"] == int(older.name.removeprefix("round-"))
    told = [record["message"] for record in again.messages() if "damaged" in record["message"]]
    assert len(told) == 1
    assert str(newest) in told[0] and "passed over" in told[0]
    assert_no_batch_repeated(again)


def test_an_export_opens_in_transformers(swarm: Swarm) -> None:
    swarm.trainers("a")
    node = swarm.nodes["a"]
    node.wait_for("a checkpoint", node.checkpoints)
    out = swarm.folder / "model"
    done = run_peer("export", "--home", str(node.home), "--out", str(out))
    assert done.returncode == OK, done.stderr
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.hidden_size == 32
    assert "wrote round" in done.stdout
