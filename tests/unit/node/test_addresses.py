"""From bound sockets to addresses that peers can dial, and how long a dead one is left alone."""

from __future__ import annotations

import random

import pytest

from peerloom.node import addresses, announce, backoff
from peerloom.protocol import checks
from peerloom.protocol.errors import ConfigError, LinkError, PortInUse

from .wire import Handler, Swarm


def test_a_concrete_address_is_announced_as_it_is() -> None:
    assert addresses.dialable([("127.0.0.1", 5), ("::1", 6)]) == ("127.0.0.1:5", "[::1]:6")


def test_a_wildcard_stands_for_the_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interface_addresses", lambda: ("8.8.8.8", "fd00::1"))
    assert addresses.dialable([("0.0.0.0", 5), ("::", 5)]) == ("8.8.8.8:5", "[fd00::1]:5")


def test_interface_addresses_are_dialable_here() -> None:
    found = addresses.dialable([("::", 7)])
    assert found
    for address in found:
        assert checks.address(address) == address


def test_public_before_private_and_none_that_nobody_else_can_dial() -> None:
    texts = ["127.0.0.1", "::1", "fe80::1%eth0", "fe80::2", "169.254.3.4", "10.1.2.3", "2600::5", "fd00::6", "9.9.9.9"]
    assert addresses.best_first(texts) == ("9.9.9.9", "2600::5", "10.1.2.3", "fd00::6")
    assert addresses.best_first(["127.0.0.1", "fe80::1%eth0"]) == ("127.0.0.1",)


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        ("example.org", "example.org:9"),
        ("example.org:80", "example.org:80"),
        ("1.2.3.4", "1.2.3.4:9"),
        ("2001:db8::1", "[2001:db8::1]:9"),
        ("[2001:db8::1]", "[2001:db8::1]:9"),
        ("[2001:db8::1]:80", "[2001:db8::1]:80"),
    ],
)
def test_an_announced_address_gets_the_bound_port_where_it_has_none(entry: str, address: str) -> None:
    assert addresses.announced(entry, 9) == address
    assert checks.address(address) == address


def test_the_delay_doubles_up_to_its_cap_with_half_of_it_at_random() -> None:
    rng = random.Random(0)
    for failures in range(1, 40):
        whole = min(backoff.CAP_S, backoff.BASE_S * 2.0 ** (failures - 1))
        delays = [backoff.delay_s(failures, rng) for _ in range(50)]
        assert whole / 2 <= min(delays) < max(delays) <= whole


def test_a_success_ends_the_backoff() -> None:
    kept = backoff.Backoff(random.Random(0))
    kept.check(0.0)
    kept.failed(0.0, "refused")
    with pytest.raises(LinkError, match="refused"):
        kept.check(0.1)
    kept.reset()
    kept.check(0.1)


async def test_a_taken_port_is_named() -> None:
    swarm = Swarm("grpc")
    _, record = await swarm.server(Handler())
    port = int(record.addresses[0].rpartition(":")[2])
    with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
        await swarm.server(Handler(), listen=("127.0.0.1", port))
    await swarm.stop()


async def test_announced_addresses_are_returned_and_checked() -> None:
    swarm = Swarm("grpc")
    _, record = await swarm.server(Handler(), announce=("node.example.org:4", "1.2.3.4"))
    assert record.addresses[0] == "node.example.org:4"
    assert record.addresses[1].startswith("1.2.3.4:")
    with pytest.raises(ConfigError, match="announce: address 'a b:4' names no host"):
        await swarm.server(Handler(), announce=("a b:4",))
    await swarm.stop()


async def test_several_hosts_are_listened_on_and_both_wildcards_are_one() -> None:
    swarm = Swarm("grpc")
    _, record = await swarm.server(Handler(), listen=(("127.0.0.1", 0), ("127.0.0.2", 0)))
    assert [address.rpartition(":")[0] for address in record.addresses] == ["127.0.0.1", "127.0.0.2"]
    _, wild = await swarm.server(Handler(), listen=(("0.0.0.0", 0), ("::", 0)))
    assert (await swarm.client().status(wild)).record == wild
    assert len({address.rpartition(":")[2] for address in wild.addresses}) == 1
    await swarm.stop()


def test_what_is_announced_stands_for_both_ports() -> None:
    entries = ("1.2.3.4", "host.example.org:99", "[2a00::1]:4", "2a00::2", "1.2.3.4:7")
    assert announce.announce_multiaddrs(announce.libp2p_announce(entries), 4001) == (
        "/ip4/1.2.3.4/tcp/4001",
        "/dns/host.example.org/tcp/4001",
        "/ip6/2a00::1/tcp/4001",
        "/ip6/2a00::2/tcp/4001",
    )
