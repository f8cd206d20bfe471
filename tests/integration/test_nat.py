"""Nodes behind routers that let nothing in, in network namespaces: they train together, and outlive relays and cuts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.helpers import Node, Peer, Watcher, swarm_folder, wait_for, write_run
from tests.netns import Net, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "network namespaces work here"),
]

T = TypeVar("T")
Report = Callable[[str, object], None]
MATCH_TIMEOUT_S = 5.0
BUSY_S = 2.0  # by which a timer may be late on a machine with more to do than cores
CUT_S = 32.0  # a record lives 30 s
BACK_S = 35.0  # the longest that a node that moved may be missing
TRAINERS = ("a1", "a2", "b1", "b2")


class NatSwarm:
    """Two public nodes, and two behind each of two routers."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.net, self.folder = net, folder
        self.run_file = write_run(folder / "run", local_steps=40, match_timeout_s=MATCH_TIMEOUT_S)
        self.nodes: dict[str, Node] = {}
        self.started: list[Peer] = []
        self.killed: list[Node] = []
        for host in ("seed", "spare"):
            net.public(host)
        for router, hosts in (("nat-a", TRAINERS[:2]), ("nat-b", TRAINERS[2:])):
            net.nat(router)
            for host in hosts:
                net.behind(router, host)

    def start(self, host: str, *arguments: str, **variables: str) -> Node:
        home = self.folder / host
        common = ("--listen", "0.0.0.0", "--no-port-mapping")
        inside = self.net.inside(host)
        variables = {"TMPDIR": str(self.folder / "tmp"), "PEER_CHECKPOINT_EVERY_S": "5"} | variables
        node = Node(home, *arguments, *common, prefix=inside, **variables)
        self.nodes[host] = node
        self.started.append(node)
        return node

    def rise(self) -> None:
        """Starts them all; the trainers know the seed alone."""
        self.invite = self.start("seed", "bootstrap", "--run", str(self.run_file)).invite()
        self.start("spare", "bootstrap", PEER_SEEDS=self.invite)
        for host in TRAINERS:
            self.start(host, "join", self.invite, "--data", str(self.run_file.parent / "text"))
        self.watcher = Watcher(self.folder, self.invite, self.net.inside("seed"))
        self.started.append(self.watcher)

    def wait_for(self, what: str, look: Callable[[], T | None]) -> T:
        """Polls, and fails at once when a node that should run has ended."""

        def alive() -> T | None:
            for node in self.nodes.values():
                assert node.running or node in self.killed, f"{node.name} ended before: {what}\n{node.tail()}"
            return look()

        return wait_for(what, alive)

    def row(self, host: str) -> dict[str, Any] | None:
        """What the watcher last heard of a node."""
        rows = (self.watcher.newest() or {"nodes": []})["nodes"]
        return next((row for row in rows if row["name"] == host), None)

    def rows(self) -> list[dict[str, Any]]:
        return [row for host in TRAINERS if (row := self.row(host)) is not None]

    def stop(self) -> None:
        for peer in self.started:
            peer.destroy()


@pytest.fixture(scope="module")
def nat_swarm() -> Iterator[NatSwarm]:
    with swarm_folder() as folder, Net() as net:
        swarm = NatSwarm(net, folder)
        try:
            swarm.rise()
            yield swarm
        finally:
            swarm.stop()


def met(swarm: NatSwarm, host: str, since: int = 0) -> set[str]:
    """The names of those that a trainer has exchanged with since that round of its life."""
    ids = {row["peer_id"]: row["name"] for row in swarm.rows()}
    return {ids.get(event["partner"], "") for event in swarm.nodes[host].rounds()[since:]} - {""}


def test_four_nodes_behind_two_routers_train_with_each_other(nat_swarm: NatSwarm, record_property: Report) -> None:
    began = time.monotonic()
    nat_swarm.wait_for(
        "all are known as reached through relays",
        lambda: len(rows := nat_swarm.rows()) == 4 and all(row["reach"] == "via" and row["via"] for row in rows),
    )
    record_property("reached_after_s", time.monotonic() - began)
    for host in TRAINERS:
        others = set(TRAINERS) - {host}
        nat_swarm.nodes[host].wait_for(f"{host} has met {others}", lambda: met(nat_swarm, host) >= others)  # noqa: B023
    public = nat_swarm.wait_for(
        "the seed's word", lambda: (row := nat_swarm.row("seed")) and row["reach"] == "direct" and row
    )
    assert public["relays"]
    assert {row["peer_id"] for row in (public, nat_swarm.row("spare")) if row} >= {
        relay for row in nat_swarm.rows() for relay in row["via"]
    }


def test_a_killed_relay_costs_no_round_more_than_its_timeout(nat_swarm: NatSwarm, record_property: Report) -> None:
    nat_swarm.wait_for("two relays each", lambda: all(len(row["via"]) == 2 for row in nat_swarm.rows()))
    spare = nat_swarm.row("spare")
    assert spare is not None
    before = {host: len(nat_swarm.nodes[host].rounds()) for host in TRAINERS}
    nat_swarm.killed.append(nat_swarm.nodes["spare"])
    nat_swarm.nodes["spare"].process.kill()
    died = time.monotonic()
    nat_swarm.wait_for(
        "nobody counts on it any more",
        lambda: all(spare["peer_id"] not in row["via"] and row["via"] for row in nat_swarm.rows()),
    )
    record_property("left_after_s", time.monotonic() - died)
    for host in TRAINERS:
        nat_swarm.nodes[host].wait_for_rounds(3)
        across = [name for name in TRAINERS if name[0] != host[0]]
        nat_swarm.nodes[host].wait_for(
            "an exchange across the routers",
            lambda: met(nat_swarm, host, before[host]) & set(across),  # noqa: B023
        )
        slowest = max(event["exchange_s"] for event in nat_swarm.nodes[host].rounds()[before[host] :])
        assert slowest < MATCH_TIMEOUT_S + BUSY_S, f"{host} waited {slowest:.1f} s"


def test_a_cut_longer_than_a_record_heals(nat_swarm: NatSwarm, record_property: Report) -> None:
    node, row = nat_swarm.nodes["a1"], nat_swarm.row("a1")
    assert row is not None
    nat_swarm.net.cut("a1")
    time.sleep(CUT_S)
    nat_swarm.net.heal("a1")
    healed, before = time.monotonic(), len(node.rounds())
    nat_swarm.wait_for(
        "heard from again",
        lambda: (now := nat_swarm.row("a1")) and now["silent_s"] is None and now["peer_id"] == row["peer_id"],
    )
    record_property("heard_after_s", time.monotonic() - healed)
    node.wait_for("an exchange across the routers", lambda: met(nat_swarm, "a1", before) & {"b1", "b2"})
    record_property("exchanged_after_s", time.monotonic() - healed)


def test_a_node_that_moves_is_back_under_its_identity(nat_swarm: NatSwarm, record_property: Report) -> None:
    node, row = nat_swarm.nodes["a2"], nat_swarm.row("a2")
    assert row is not None
    address = nat_swarm.net.move("a2", "nat-b")
    moved, before = time.monotonic(), len(node.rounds())
    back = nat_swarm.wait_for(
        "its new address",
        lambda: (
            (now := nat_swarm.row("a2"))
            and any(each.startswith(f"{address}:") for each in now["addresses"])
            and now["via"]
            and now
        ),
    )
    took = time.monotonic() - moved
    record_property("back_after_s", took)
    assert back["peer_id"] == row["peer_id"]
    assert took < BACK_S
    node.wait_for("an exchange with a node that stayed", lambda: met(nat_swarm, "a2", before) & {"a1"})
