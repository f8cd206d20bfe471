"""Behind a home router that forwards ports when asked (Debian's miniupnpd): direct with it, through relays without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import Node, Peer, Watcher, swarm_folder, wait_for, write_run
from tests.netns import Net, why_no_upnp, why_not

WHY_NOT = why_not() or why_no_upnp()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "routers with UPnP work here"),
]


class Home:
    """A public node, and two behind one router: one that asks it for a port, and one that does not."""

    def __init__(self, net: Net, folder: Path, *, upnp: bool) -> None:
        self.net, self.folder = net, folder
        self.started: list[Peer] = []
        self.public = net.public("seed")
        self.outer = net.nat("router")
        self.inner = {host: net.behind("router", host) for host in ("asks", "silent")}
        net.forwarding("router", folder, upnp=upnp)

    def start(self, host: str, *arguments: str, **variables: str) -> Node:
        node = Node(
            self.folder / host,
            *("bootstrap", "--listen", "0.0.0.0", *arguments),
            prefix=self.net.inside(host),
            TMPDIR=str(self.folder / "tmp"),
            **variables,
        )
        self.started.append(node)
        return node

    def rise(self) -> None:
        run = write_run(self.folder / "run")
        self.invite = self.start("seed", "--run", str(run), "--no-port-mapping").invite()
        self.asks = self.start("asks", PEER_SEEDS=self.invite)
        self.silent = self.start("silent", "--no-port-mapping", PEER_SEEDS=self.invite)
        self.watcher = Watcher(self.folder, self.invite, self.net.inside("seed"))
        self.started.append(self.watcher)

    def row(self, host: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        node = next(each for each in self.started if each.name == host)

        def look() -> dict[str, Any] | None:
            rows = (self.watcher.newest() or {"nodes": []})["nodes"]
            return next((row for row in rows if row["name"] == host and holds(row)), None)

        return node.wait_for(f"{host} as it should be", look)


@pytest.fixture(scope="module", params=["upnp", "nat_pmp"])
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    with swarm_folder() as folder, Net() as net:
        made = Home(net, folder, upnp=request.param == "upnp")
        try:
            made.rise()
            yield made
        finally:
            for peer in made.started:
                peer.destroy()


def test_a_node_whose_router_forwards_is_direct_and_its_neighbour_is_not(home: Home) -> None:
    direct = home.row("asks", lambda row: row["reach"] == "direct")
    mapped, *others = direct["addresses"]
    assert mapped.startswith(f"{home.outer}:") and others == [f"{home.inner['asks']}:{others[0].rpartition(':')[2]}"]
    assert not direct["via"] and direct["relays"]
    via = home.row("silent", lambda row: row["reach"] == "via" and bool(row["via"]))
    assert via["addresses"] == [f"{home.inner['silent']}:{via['addresses'][0].rpartition(':')[2]}"]
    rules = home.net.forwarded("router")
    assert f"--dport {mapped.rpartition(':')[2]}" in rules and rules.count("--dport") == 3  # calls, relay, DHT

    # p2pd's own port is mapped as well: the node carries its neighbour, which nobody outside could otherwise ask of it
    both = home.row("silent", lambda row: len(row["via"]) == 2)
    assert direct["peer_id"] in both["via"]

    assert home.asks.end() == 0
    wait_for("the mappings are taken back", lambda: "--dport" not in home.net.forwarded("router"))
