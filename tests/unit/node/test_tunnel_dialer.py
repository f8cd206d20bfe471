"""Relays that answer with what is no answer: whose fault it is, and what the caller is told."""

from __future__ import annotations

import random
from collections import Counter
from typing import NoReturn

import pytest

from peerloom.node import tunnel_keep
from peerloom.node.p2pd import Stream
from peerloom.node.tunnel import Tunnels
from peerloom.node.tunnel_dialer import TunnelDialer
from peerloom.protocol.dial_order import relay_address
from peerloom.protocol.errors import LinkError, MalformedMessage, PeerError
from peerloom.protocol.relay_choice import RelayBook
from peerloom.protocol.relay_desk import RelayDesk
from peerloom.protocol.tunnel import Header, TunnelRefused
from peerloom.protocol.types import PeerId
from tests.unit.node.wire import Jumpable, record_of

PEER, RELAY = PeerId("peer"), PeerId("relay")
RUBBISH = MalformedMessage("no answer to a tunnel's header")


class Failing(Tunnels):
    """Whose every opening ends so."""

    def __init__(self, error: PeerError) -> None:
        super().__init__(RelayDesk(PeerId("me")), Jumpable())
        self._error = error

    async def open(self, via: PeerId, header: Header) -> Stream:
        raise self._error


def dialer(counted: Counter[str], error: PeerError) -> TunnelDialer:
    book = RelayBook(random.Random(0))
    return TunnelDialer(
        Failing(error), book, Jumpable(), lambda _: None, lambda metric, amount: counted.update({metric: int(amount)})
    )


async def test_a_relay_that_answers_rubbish_has_the_fault_and_not_the_peer_behind_it() -> None:
    counted: Counter[str] = Counter()
    with pytest.raises(LinkError, match=RELAY):
        await dialer(counted, RUBBISH).endpoint(record_of(PEER, (), b""), relay_address(RELAY))
    assert counted == {"relay_faults_corrupt": 1}


async def test_a_peer_that_answers_rubbish_itself_is_no_relay_and_is_named_for_it() -> None:
    counted: Counter[str] = Counter()
    with pytest.raises(MalformedMessage):
        await dialer(counted, RUBBISH).endpoint(record_of(PEER, (), b""), relay_address(PEER))
    assert not counted


@pytest.mark.parametrize(
    ("error", "fault"),
    [(RUBBISH, "corrupt"), (TunnelRefused(RELAY, "busy"), "refused"), (LinkError("it is not there"), "gone")],
)
async def test_what_is_held_against_a_relay_that_is_not_kept(error: PeerError, fault: str) -> None:
    def measured(*_: float) -> NoReturn:
        raise AssertionError("there was nothing to measure")

    assert await tunnel_keep.keep(Failing(error), RELAY, Jumpable(), measured, place=True) == fault
