"""The metrics endpoint, scraped over a real socket."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peerloom.node.metrics import MetricsServer
from peerloom.protocol.errors import PortInUse
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

RECORD = PeerRecord(
    peer_id=PeerId("12D3KooWA"),
    name="a",
    role="trainer",
    addresses=("127.0.0.1:1",),
    cert_der=b"x",
    version="0.1.0",
    instance="00",
    started_at=1.0,
    issued_at=2.0,
    state="training",
    round=7,
    tokens=1024,
    loss=2.5,
)


@pytest.fixture
def statuses() -> list[NodeStatus]:
    return [NodeStatus(record=RECORD, counters={"gossip_committed": 3.0, "exchange_seconds_max": 0.5})]


@pytest.fixture
def server(statuses: list[NodeStatus]) -> Iterator[MetricsServer]:
    server = MetricsServer(0, lambda: statuses[-1])
    yield server
    server.stop()


def get(server: MetricsServer, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def test_a_scrape_parses_and_holds_the_figures(server: MetricsServer) -> None:
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(get(server, "/metrics"))
        for sample in family.samples
    }
    assert samples["peerloom_round"] == 7
    assert samples["peerloom_tokens_total"] == 1024
    assert samples["peerloom_held_out_loss_nats"] == 2.5
    assert samples["peerloom_gossip_committed_total"] == 3
    assert samples["peerloom_exchange_seconds_max"] == 0.5


def test_health_follows_the_state(server: MetricsServer, statuses: list[NodeStatus]) -> None:
    assert get(server, "/healthz") == "training\n"
    statuses.append(NodeStatus(record=replace(RECORD, state="restarting", reason="it died")))
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, "/healthz")
    with caught.value as error:
        assert error.code == 503 and error.read() == b"restarting: it died\n"


def test_other_paths_say_what_there_is(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, "/")
    with caught.value as error:
        assert error.code == 404


def test_a_taken_port_is_said(server: MetricsServer, statuses: list[NodeStatus]) -> None:
    with pytest.raises(PortInUse, match=str(server.port)):
        MetricsServer(server.port, lambda: statuses[-1])
