"""The demo's processes and its verdict, with a script in place of the node."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from peerloom.node.children import members_of
from peerloom.node.demo import DemoOutcome, DemoPlan, judge, run_demo
from peerloom.protocol.errors import SeedUnreachable
from peerloom.protocol.types import NodeStatus
from tests.unit.node.test_status import status

FAKE_NODE = """
import json, os, pathlib, signal, subprocess, sys
role, flags = sys.argv[1], dict(zip(sys.argv, sys.argv[1:]))
home, name = pathlib.Path(flags["--home"]), flags["--name"]
home.mkdir(exist_ok=True)
mode = os.environ.get("FAKE_" + name.replace("-", "_"), "")
if mode in ("orphan", "die"):
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
if mode == "die":
    sys.exit("no such device: abacus")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
if role == "bootstrap":
    print(json.dumps({"message": "page, metrics and health on http://127.0.0.1:9/"}), file=sys.stderr, flush=True)
    print("peer join /ip4/127.0.0.1/tcp/1/p2p/Qm1 /ip4/127.0.0.1/tcp/2/p2p/Qm1", flush=True)
partial = home / "partial"
partial.write_text(json.dumps({"argv": sys.argv[1:], "sid": os.getsid(0), "peer": os.environ.get("PEER_PORT")}))
partial.rename(home / "ready")
if mode == "stubborn":
    signal.pause()
signal.sigwait([signal.SIGTERM])
"""


@pytest.fixture
def plan(tmp_path: Path) -> DemoPlan:
    script = tmp_path / "fake_node.py"
    script.write_text(FAKE_NODE)
    command = (sys.executable, "-I", "-S", str(script))
    return DemoPlan(folder=tmp_path, nodes=3, seconds=60, command=command, stop_within_s=30)


class Swarm:
    """What the observer sees: waits for the fake nodes to be up, shows `statuses`, then calls `then`."""

    def __init__(self, plan: DemoPlan, statuses: list[NodeStatus], then: Callable[[], None]) -> None:
        self.plan, self.statuses, self.then = plan, statuses, then
        self.invites: list[str] = []
        self.pages: list[str] = []

    async def watch(self, invites: list[str]) -> AsyncIterator[list[NodeStatus]]:
        self.invites = invites
        homes = [self.plan.folder / name for name in ("bootstrap", *self.plan.names)]
        while not all((home / "ready").exists() for home in homes):  # noqa: ASYNC110  another process makes them
            await asyncio.sleep(0.01)
        yield self.statuses
        self.then()
        await asyncio.Event().wait()

    def started(self, name: str) -> dict[str, object]:
        facts: dict[str, object] = json.loads((self.plan.folder / name / "ready").read_text())
        return facts


def good(name: str) -> NodeStatus:
    return status(name, loss=2.0, round=5, tokens=1000, partners={"x": 2, "y": 1})


async def run(plan: DemoPlan, statuses: list[NodeStatus]) -> tuple[DemoOutcome, Swarm]:
    interrupted = asyncio.Event()
    swarm = Swarm(plan, statuses, interrupted.set)
    return await run_demo(plan, swarm.watch, lambda _: None, interrupted, swarm.pages.append), swarm


async def test_a_swarm_is_started_watched_and_stopped(plan: DemoPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEER_PORT", "4000")
    outcome, swarm = await run(plan, [good(name) for name in plan.names])

    assert (outcome.failures, outcome.killed, outcome.interrupted, outcome.spread) == ([], [], True, 0.0)
    assert swarm.invites == ["/ip4/127.0.0.1/tcp/1/p2p/Qm1", "/ip4/127.0.0.1/tcp/2/p2p/Qm1"]
    assert swarm.pages == ["http://127.0.0.1:9/"]
    facts = [swarm.started(name) for name in ("bootstrap", *plan.names)]
    assert len({fact["sid"] for fact in facts} | {os.getsid(0)}) == 5, "each in a session of its own"
    assert {fact["peer"] for fact in facts} == {None}, "the user's own settings stay out"
    assert facts[1]["argv"] == [
        "join",
        *swarm.invites,
        "--home",
        str(plan.folder / "node-1"),
        "--name",
        "node-1",
        "--listen",
        "127.0.0.1",
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--device",
        "cpu",
        "--threads",
        str(plan.threads),
        "--http",
        "none",
        "--log-format",
        "json",
    ]
    assert members_of({int(str(fact["sid"])) for fact in facts}) == []


async def test_what_a_dead_node_left_behind_is_ended_too(plan: DemoPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_node_1", "orphan")
    _, swarm = await run(plan, [])
    assert members_of({int(str(swarm.started("node-1")["sid"]))}) == []


async def test_a_node_that_dies_fails_the_demo_with_the_end_of_its_log(
    plan: DemoPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_node_2", "die")
    outcome, _ = await run(plan, [])
    assert outcome.failures == ["node-2 ended early with exit code 1"]
    assert outcome.tail == "--- node-2: end of its log ---\nno such device: abacus"


async def test_a_bootstrap_node_that_dies_is_named(plan: DemoPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_bootstrap", "die")
    outcome, _ = await run(plan, [])
    assert outcome.failures == ["bootstrap ended early with exit code 1"]


async def test_a_node_that_does_not_stop_is_killed_and_named(plan: DemoPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_node_3", "stubborn")
    short = DemoPlan(folder=plan.folder, nodes=3, seconds=60, command=plan.command, stop_within_s=1)
    outcome, swarm = await run(short, [good(name) for name in plan.names])
    assert "node-3" in outcome.killed
    assert members_of({int(str(swarm.started("node-3")["sid"]))}) == []


async def test_it_ends_when_its_time_is_over(plan: DemoPlan) -> None:
    short = DemoPlan(folder=plan.folder, nodes=1, seconds=0.2, command=plan.command, stop_within_s=30)
    swarm = Swarm(short, [], lambda: None)
    outcome = await run_demo(short, swarm.watch, lambda _: None, asyncio.Event())
    assert (outcome.interrupted, outcome.failures) == (False, ["only 0 of 1 nodes were seen in the swarm"])


async def test_an_observer_that_fails_stops_everything(plan: DemoPlan) -> None:
    def fail() -> None:
        raise SeedUnreachable("nobody answers")

    swarm = Swarm(plan, [], fail)
    with pytest.raises(SeedUnreachable, match="nobody answers"):
        await run_demo(plan, swarm.watch, lambda _: None, asyncio.Event())
    assert members_of({int(str(swarm.started(name)["sid"])) for name in ("bootstrap", *plan.names)}) == []


@pytest.mark.parametrize(
    ("changed", "failure"),
    [
        ({}, None),
        ({"loss": float("nan")}, "b's held-out loss is nan, not under 2.5"),
        ({"loss": None}, "b never measured its held-out loss"),
        ({"tokens": 0}, "b finished no round"),
        ({"round": 0}, "b finished no round"),
        ({"partners": {"x": 9, "y": 0}}, "b exchanged with 1 different peers, fewer than 2"),
        ({"loss": 2.1}, "the nodes' losses lie 0.100 apart, not under 0.1"),
    ],
)
def test_verdict(changed: dict[str, Any], failure: str | None) -> None:
    fields: dict[str, Any] = {"loss": 2.0, "round": 5, "tokens": 9, "partners": {"x": 1, "y": 1}, **changed}
    _, failures = judge([good("a"), status("b", **fields), good("c")], 3)
    assert failures == ([failure] if failure else [])


def test_a_loss_that_is_not_low_enough() -> None:
    nodes = [status(name, loss=2.5, round=1, tokens=1, partners={"x": 1, "y": 1}) for name in ("a", "b", "c")]
    assert judge(nodes, 3)[1] == [f"{name}'s held-out loss is 2.500, not under 2.5" for name in "abc"]


def test_two_nodes_can_only_meet_each_other() -> None:
    nodes = [status(name, loss=2.0, round=1, tokens=1, partners={"x": 1}) for name in ("a", "b")]
    assert judge(nodes, 2)[1] == []


def test_json_is_the_documented_schema() -> None:
    nodes, failures = judge([good("a")], 1)
    outcome = DemoOutcome(
        method="gasloc", seconds=90, interrupted=False, nodes=nodes, spread=0.0, failures=failures, killed=["a"]
    )
    assert outcome.to_json() == {
        "schema": 1,
        "method": "gasloc",
        "minutes": 1.5,
        "passed": True,
        "failures": [],
        "interrupted": False,
        "spread": 0.0,
        "nodes": [{"name": "a", "peer_id": "12D3KooWa", "loss": 2.0, "rounds": 5, "partners": 2, "tokens": 1000}],
            "seedflow": [],
    }
