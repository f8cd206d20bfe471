"""Nodes that have IPv6 and nothing else, in network namespaces: they find, dial back and train with each other."""

from __future__ import annotations

import pytest

from tests.helpers import Node, Peer, Watcher, swarm_folder, write_run
from tests.netns import Net, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "network namespaces work here"),
]


def test_nodes_with_ipv6_alone_are_direct_and_train_with_each_other() -> None:
    with swarm_folder() as folder, Net() as net:
        hosts = {host: net.public6(host) for host in ("seed", "x", "y")}
        started: list[Peer] = []

        def start(host: str, *arguments: str) -> Node:
            inside = net.inside(host)
            node = Node(folder / host, *arguments, "--listen", "::", prefix=inside, TMPDIR=str(folder / "tmp"))
            started.append(node)
            return node

        try:
            run = write_run(folder / "run")
            seed = start("seed", "bootstrap", "--run", str(run))
            invite = seed.invite()
            assert invite.startswith(f"/ip6/{hosts['seed']}/tcp/")
            trainers = [start(host, "join", invite, "--data", str(run.parent / "text")) for host in ("x", "y")]
            watcher = Watcher(folder, invite, net.inside("seed"))
            started.append(watcher)
            for node in trainers:
                node.wait_for("an exchange", lambda: any(each["partner"] for each in node.rounds()))  # noqa: B023
                row = watcher.wait_for_node("that it is direct", node.name, lambda row: row["reach"] == "direct")
                assert [address.rpartition(":")[0] for address in row["addresses"]] == [f"[{hosts[node.name]}]"]
        finally:
            for peer in started:
                peer.destroy()
