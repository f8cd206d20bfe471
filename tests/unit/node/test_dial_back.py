"""Dial-backs: what is dialled for whom, and how often."""

from __future__ import annotations

import ipaddress

import pytest

from peerloom.node import dial_back
from peerloom.node.dial_back import DialBacks, may_dial
from peerloom.node.tls import make_certificate
from peerloom.protocol import limits
from peerloom.protocol.errors import AuthenticationError, LimitExceeded, LinkError, PeerloomError
from peerloom.protocol.messages import DialBack
from peerloom.protocol.types import PeerId
from tests.unit.node.wire import NOW, Handler, Jumpable, Swarm

PEER, OTHER = PeerId("a"), PeerId("b")
HERE = "127.0.0.1:4001"


@pytest.mark.parametrize(
    ("address", "host", "may"),
    [
        ("8.8.8.8", None, True),
        ("8.8.8.8", "9.9.9.9", True),
        ("2606:4700::1", None, True),
        ("192.168.1.5", "192.168.1.9", True),
        ("192.168.1.5", "8.8.8.8", False),
        ("192.168.1.5", None, False),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "192.168.1.9", False),
        ("127.0.0.1", "::ffff:127.0.0.1", True),
        ("127.0.0.1", None, False),
        ("169.254.169.254", "192.168.1.9", False),
        ("224.0.0.1", "192.168.1.9", False),
        ("0.0.0.0", "127.0.0.1", False),
    ],
)
def test_what_may_be_dialled_for_a_caller(address: str, host: str | None, may: bool) -> None:
    assert may_dial(ipaddress.ip_address(address), host) is may


def backs(clock: Jumpable, error: PeerloomError | None = None) -> tuple[DialBacks, list[str]]:
    dialled: list[str] = []

    async def probe(peer: PeerId, request: DialBack, addresses: tuple[str, ...]) -> None:
        dialled.extend(addresses)
        if error is not None:
            raise error

    return DialBacks(clock, probe), dialled


async def test_one_peer_is_served_once_in_a_while() -> None:
    clock = Jumpable()
    made, _ = backs(clock)
    request = DialBack((HERE,), b"c")
    assert await made.serve(PEER, request, "127.0.0.1") == (HERE,)
    with pytest.raises(LimitExceeded):
        await made.serve(PEER, request, "127.0.0.1")
    assert await made.serve(OTHER, request, "127.0.0.1") == (HERE,)
    clock.ahead_s = limits.DIAL_BACK_EVERY_S
    assert await made.serve(PEER, request, "127.0.0.1") == (HERE,)


async def test_nothing_is_dialled_that_must_not_be() -> None:
    made, dialled = backs(Jumpable())
    request = DialBack((HERE, "10.0.0.1:22", "no-such-host.invalid:1"), b"c")
    assert await made.serve(PEER, request, None) == ()
    assert not dialled


async def test_a_name_is_dialled_at_what_was_checked_and_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(address: str) -> list[dial_back.IpAddress]:
        return [ipaddress.ip_address(each) for each in ("8.8.8.8", "2606:4700::1", "8.8.8.8")]

    monkeypatch.setattr(dial_back, "resolved", found)
    made, dialled = backs(Jumpable())
    assert await made.serve(PEER, DialBack(("node.example:4001",), b"c"), None) == ("node.example:4001",)
    assert dialled == ["8.8.8.8:4001", "[2606:4700::1]:4001"]


@pytest.mark.parametrize("error", [LinkError("nobody"), AuthenticationError("another")])
async def test_one_that_does_not_prove_itself_was_not_reached(error: PeerloomError) -> None:
    made, dialled = backs(Jumpable(), error)
    assert await made.serve(PEER, DialBack((HERE,), b"c"), "127.0.0.1") == ()
    assert dialled == [HERE]


async def test_over_grpc_a_node_learns_where_it_is_reached() -> None:
    swarm = Swarm("grpc")
    try:
        _, helper = await swarm.server(Handler())
        node, record = await swarm.server(Handler())
        other, _ = await swarm.server(Handler(), certificate=make_certificate(NOW))
        mine, others = record.addresses[0], other.addresses()[0]
        assert await node.dial_back(helper, (mine, others, "127.0.0.1:9")) == (mine,)
    finally:
        await swarm.stop()
