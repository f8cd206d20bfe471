"""`peer doctor` on reachability: what peers that dial back say, and what is in the way."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerloom.node import doctor_reach
from peerloom.node.clock import SystemClock
from peerloom.node.config import NodeConfig
from peerloom.node.doctor import Finding
from peerloom.node.doctor_reach import Asked, ask_back, finding_of, relay_finding
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import Identity
from peerloom.node.port_mapping import PortMapping
from peerloom.node.ports import hold_port
from peerloom.node.tls import make_certificate
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerRecord
from tests.unit.node.test_port_mapping import Router
from tests.unit.node.wire import Handler, record_of

SPEC = RunSpec()


def observer(records: list[PeerRecord]) -> Any:
    async def peers() -> list[PeerRecord]:
        return records

    return SimpleNamespace(spec=SPEC, discovery=SimpleNamespace(peers=peers))


@asynccontextmanager
async def another_peer() -> AsyncIterator[PeerRecord]:
    """A peer that listens and can be asked to dial back."""
    identity, certificate = Identity.generate(), make_certificate(SystemClock().wall())
    peer = GrpcTransport(
        identity=identity,
        certificate=certificate,
        run_id=SPEC.run_id,
        spec_hash=SPEC.spec_hash(),
        clock=SystemClock(),
        rng=random.Random(0),
    )
    try:
        yield record_of(identity.peer_id, await peer.start(Handler()), certificate.der)
    finally:
        await peer.stop()


async def asked_back(config: NodeConfig, records: list[PeerRecord]) -> dict[str, Finding]:
    return {found.name: found async for found in ask_back(config, observer(records))}


async def test_a_peer_that_dials_back_is_believed(tmp_path: Path) -> None:
    async with another_peer() as record:
        config = NodeConfig(home=tmp_path, listen=("127.0.0.1",))
        told = await asked_back(config, [record])
        found, relay = told["reachability"], told["relay reachability"]
        assert (found.level, "direct" in found.text) == ("ok", True), found
        assert (relay.level, "127.0.0.1:" in relay.text) == ("ok", True), relay
        alone = await asked_back(config.model_copy(update={"relay": False}), [record])
        assert list(alone) == ["reachability"]


async def test_a_router_that_forwards_is_asked_and_given_back_what_it_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(outer="127.0.0.1")

    async def find() -> list[Any]:
        return [router]

    def mapping(config: NodeConfig, transport: GrpcTransport) -> PortMapping:
        return PortMapping(lambda: transport.local()[1], random.Random(0), find)

    monkeypatch.setattr(doctor_reach, "port_mapping_of", mapping)
    async with another_peer() as record:
        config = NodeConfig(home=tmp_path, listen=("127.0.0.1",), announce=("127.0.0.1:9",))
        found = (await asked_back(config, [record]))["reachability"]
        assert (found.level, ":9" in found.text) == ("ok", False), found
        assert router.asked == 1 and not router.ports


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    held = hold_port("127.0.0.1", 0)
    try:
        config = NodeConfig(home=tmp_path, listen=("127.0.0.1",), grpc_port=held.port)
        (found,) = (await asked_back(config, [])).values()
        assert found.level == "warn" and str(held.port) in found.text
    finally:
        held.release()


@pytest.mark.parametrize(
    ("addresses", "answers", "relays", "level", "says"),
    [
        (("10.0.0.2:4001",), [(), ()], 2, "warn", "router"),
        (("10.0.0.2:4001",), [(), ()], 0, "fail", "no node that carries"),
        (("93.184.216.34:4001",), [("93.184.216.34:4001",), ()], 1, "warn", "firewall"),
        (("93.184.216.34:4001",), [], 1, "warn", "not checked"),
    ],
)
def test_what_is_in_the_way_is_said(
    addresses: tuple[str, ...], answers: list[tuple[str, ...]], relays: int, level: str, says: str
) -> None:
    found = finding_of(Asked(addresses, answers, []), relays)
    assert found.level == level and says in found.text
    assert found.remedy


@pytest.mark.parametrize(
    ("answers", "says"), [([(), ("5.0.0.1:7",)], "1 of 2 peers reached 5.0.0.1:7"), ([], "not checked: busy")]
)
def test_a_relay_port_that_others_do_not_reach_is_told(answers: list[tuple[str, ...]], says: str) -> None:
    found = relay_finding(Asked(("5.0.0.1:7",), answers, ["busy"]))
    assert found.level == "warn" and says in found.text
    assert not answers or "TCP port 7 (--relay-port)" in found.remedy


async def test_a_taken_relay_port_is_named_and_the_announced_host_has_its_number(tmp_path: Path) -> None:
    held = hold_port("127.0.0.1", 0)
    try:
        async with another_peer() as record:
            config = NodeConfig(home=tmp_path, listen=("127.0.0.1",), relay_port=held.port)
            relay = (await asked_back(config, [record]))["relay reachability"]
            assert relay.level == "warn" and str(held.port) in relay.text
        held.release()
        async with another_peer() as record:
            config = config.model_copy(update={"announce": ("127.0.0.1",)})
            relay = (await asked_back(config, [record]))["relay reachability"]
            assert relay.level == "ok" and f"127.0.0.1:{held.port}" in relay.text
    finally:
        held.release()
