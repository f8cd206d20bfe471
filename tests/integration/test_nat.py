"""Nodes behind routers that let nothing in, in network namespaces: they train together, and outlive relays and cuts.

One story in the order of the tests: a node is cut off for two minutes, and the others' tests run meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from peerloom.node.demo_seedflow import figures_of
from peerloom.protocol.flood_messages import FloodMessage
from tests.helpers import Node, Peer, Watcher, swarm_folder, wait_for, write_run
from tests.integration.test_seedflow_live import messages_of, write_seedflow_run
from tests.netns import Net, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "network namespaces work here"),
]

T = TypeVar("T")
S = TypeVar("S", bound="NatSwarm")
Report = Callable[[str, object], None]
MATCH_TIMEOUT_S = 5.0
BUSY_S = 2.0  # by which a timer may be late on a machine with more to do than cores
CUT_S = 120.0
BACK_S = 35.0  # the longest that a node that moved may be missing
TRAINERS = ("a1", "a2", "b1", "b2")
FLOODERS = ("a3", "a4", "b3", "b4")
METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics', timeout=10).read().decode())"
FLOOD_STEPS = 1000
FLOOD_S = 400.0  # the longest that it may take on a busy machine


class NatSwarm:
    """Two public nodes, `seed` and `spare`, and two trainers behind each of the routers `nat-a` and `nat-b`."""

    seed, spare, trainers = "seed", "spare", TRAINERS

    def __init__(self, net: Net, folder: Path) -> None:
        self.net, self.folder = net, folder
        self.run_file = self.write_run()
        self.nodes: dict[str, Node] = {}
        self.started: list[Peer] = []
        self.killed: list[Node] = []
        for host in (self.seed, self.spare):
            net.public(host)
        for host in self.trainers:
            net.behind(f"nat-{host[0]}", host)

    def write_run(self) -> Path:
        return write_run(self.folder / "run", local_steps=40, match_timeout_s=MATCH_TIMEOUT_S)

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
        self.invite = self.start(self.seed, "bootstrap", "--run", str(self.run_file)).invite()
        self.start(self.spare, "bootstrap", PEER_SEEDS=self.invite)
        for host in self.trainers:
            self.start(host, "join", self.invite, "--data", str(self.run_file.parent / "text"))
        self.watcher = Watcher(self.folder, self.invite, self.net.inside(self.seed))
        self.started.append(self.watcher)

    def kill(self, host: str) -> None:
        self.killed.append(self.nodes[host])
        self.nodes[host].process.kill()

    def leave(self, *hosts: str) -> None:
        """Has nodes stop in order, to leave the machine to others."""
        for host in hosts:
            self.killed.append(self.nodes[host])
            assert self.nodes[host].end() == 0

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

    def metric(self, host: str, name: str) -> float:
        """As the node's own page has it."""
        page = subprocess.run(
            [*self.net.inside(host), sys.executable, "-c", METRICS], capture_output=True, text=True, check=True
        ).stdout
        (value,) = [line.split()[1] for line in page.splitlines() if line.startswith(f"{name} ")]
        return float(value)

    def rows(self) -> list[dict[str, Any]]:
        return [row for host in self.trainers if (row := self.row(host)) is not None]

    def stop(self) -> None:
        for peer in self.started:
            peer.destroy()


class FloodSwarm(NatSwarm):
    """The same behind the same routers, with the flooding method."""

    seed, spare, trainers = "seed2", "spare2", FLOODERS

    def write_run(self) -> Path:
        return write_seedflow_run(self.folder / "run", clients=len(FLOODERS), max_steps=FLOOD_STEPS)


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    with Net() as made:
        for router in ("nat-a", "nat-b"):
            made.nat(router)
        yield made


def raised(kind: type[S], net: Net) -> Iterator[S]:
    with swarm_folder() as folder:
        swarm = kind(net, folder)
        try:
            swarm.rise()
            yield swarm
        finally:
            swarm.stop()


@pytest.fixture(scope="module")
def nat_swarm(net: Net) -> Iterator[NatSwarm]:
    yield from raised(NatSwarm, net)


@pytest.fixture
def flood_swarm(net: Net) -> Iterator[FloodSwarm]:
    yield from raised(FloodSwarm, net)


@pytest.fixture(scope="module")
def cut_at(nat_swarm: NatSwarm) -> float:
    """When the first trainer was cut off: as soon as it trained with the others, for the last of these tests."""
    nat_swarm.wait_for("it is known, and has met somebody", lambda: nat_swarm.row("a1") and met(nat_swarm, "a1"))
    nat_swarm.net.cut("a1")
    return time.monotonic()


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
    for host in ("a1", "b1"):  # its legs leave the network behind its router as any connection outward
        assert nat_swarm.metric(host, "peerloom_tunnel_legs_tcp_total") > 0
    legs = [nat_swarm.metric("seed", f"peerloom_tunnel_legs_{way}_total") for way in ("tcp", "libp2p")]
    record_property("legs_by_tcp_and_libp2p", legs)


@pytest.mark.usefixtures("cut_at")
def test_a_killed_relay_costs_no_round_more_than_its_timeout(nat_swarm: NatSwarm, record_property: Report) -> None:
    there = TRAINERS[1:]  # the first is cut off

    def rows() -> list[dict[str, Any]]:
        return [row for row in nat_swarm.rows() if row["name"] in there]

    nat_swarm.wait_for("two relays each", lambda: all(len(row["via"]) == 2 for row in rows()))
    spare = nat_swarm.row("spare")
    assert spare is not None
    before = {host: len(nat_swarm.nodes[host].rounds()) for host in there}
    nat_swarm.kill("spare")
    died = time.monotonic()
    nat_swarm.wait_for(
        "nobody counts on it any more",
        lambda: all(spare["peer_id"] not in row["via"] and row["via"] for row in rows()),
    )
    record_property("left_after_s", time.monotonic() - died)
    for host in there:
        nat_swarm.nodes[host].wait_for_rounds(3)
        across = {name for name in there if name[0] != host[0]}
        nat_swarm.nodes[host].wait_for(
            "an exchange across the routers",
            lambda: met(nat_swarm, host, before[host]) & across,  # noqa: B023
        )
        slowest = max(event["exchange_s"] for event in nat_swarm.nodes[host].rounds()[before[host] :])
        assert slowest < MATCH_TIMEOUT_S + BUSY_S, f"{host} waited {slowest:.1f} s"


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
    node.wait_for("an exchange with a node that stayed", lambda: met(nat_swarm, "a2", before) & {"b1", "b2"})
    nat_swarm.leave("a2", "b2")


@pytest.mark.long
def test_four_nodes_behind_two_routers_flood_each_other_though_a_relay_dies(
    flood_swarm: FloodSwarm, record_property: Report
) -> None:
    began = time.monotonic()
    rows = flood_swarm.wait_for(
        "all are reached through both relays, and have each other's messages",
        lambda: (
            len(rows := flood_swarm.rows()) == len(FLOODERS)
            and all(row["reach"] == "via" and len(row["via"]) == 2 for row in rows)
            and all(row["messages"] > row["step"] for row in rows)
            and rows
        ),
    )
    flood_swarm.kill("spare2")
    record_property("messages_when_the_relay_died", [row["messages"] for row in rows])
    ended = [flood_swarm.nodes[host].process.wait(FLOOD_S) for host in FLOODERS]  # by themselves, when all is said
    record_property("flooded_after_s", time.monotonic() - began)
    assert ended == [0] * len(FLOODERS)
    figures = [figures_of(flood_swarm.nodes[host].home) for host in FLOODERS]
    assert len({(one.state_hash, one.messages) for one in figures}) == 1, "every message of each has reached all"
    assert figures[0].messages > max(row["messages"] for row in rows), "and some of them after the relay's death"
    peers = {row["name"]: row["peer_id"] for row in rows}
    said = set[FloodMessage]().union(*(messages_of(flood_swarm.nodes[host], peers[host]) for host in FLOODERS))
    assert {one.origin for one in said} == set(peers.values()) and len(said) == figures[0].messages


@pytest.mark.long
def test_a_cut_of_two_minutes_heals(nat_swarm: NatSwarm, cut_at: float, record_property: Report) -> None:
    node = nat_swarm.nodes["a1"]
    time.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))
    row = nat_swarm.row("a1")
    assert row is None or row["silent_s"] is not None, "its record has run out"
    peer_id = str(node.messages()[-1]["peer"])
    assert node.running
    nat_swarm.net.heal("a1")
    healed, before = time.monotonic(), len(node.rounds())
    record_property("cut_s", healed - cut_at)
    nat_swarm.wait_for(
        "heard from again",
        lambda: (
            (now := nat_swarm.row("a1")) and now["silent_s"] is None and now["peer_id"].endswith(peer_id) and now["via"]
        ),
    )
    record_property("heard_after_s", time.monotonic() - healed)
    node.wait_for("an exchange across the routers", lambda: met(nat_swarm, "a1", before) & {"b1"})
    record_property("exchanged_after_s", time.monotonic() - healed)
