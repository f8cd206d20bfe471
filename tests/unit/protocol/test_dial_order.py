"""The order in which ways to a peer are tried."""

from __future__ import annotations

import pytest

from peerloom.protocol import checks
from peerloom.protocol.dial_order import plain_order, relay_address, relay_of, routes
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.types import PeerId
from tests.unit.protocol.test_relay_choice import record

ME, R1, R2 = PeerId("me"), PeerId("r1"), PeerId("r2")
V4, V4B, V6, NAME = "5.0.0.1:1", "5.0.0.2:1", "[2a00::1]:1", "host.example:1"


def test_families_take_turns_the_first_ones_first() -> None:
    assert plain_order([V6, V4, V4B]) == [V6, V4, V4B]
    assert plain_order([V4, V4B, V6, NAME]) == [V4, V6, NAME, V4B]
    assert plain_order([]) == []


def test_one_that_can_be_dialled_is_dialled() -> None:
    peer = record(ME, addresses=(V4, V6))
    assert routes(peer, (), connected=False, last=None) == (V4, V6, relay_address(ME))


def test_of_one_that_cannot_be_dialled_relays_and_addresses_take_turns() -> None:
    peer = record(ME, addresses=(V4, V4B), reach="via", via=(R1, R2))
    through, straight = [relay_address(R1), relay_address(R2)], relay_address(ME)
    assert routes(peer, (R1, R2), connected=False, last=None) == (through[0], V4, through[1], V4B, straight)
    assert routes(peer, (R1, R2), connected=True, last=None) == (straight, V4, through[0], V4B, through[1])


def test_what_worked_last_comes_first_while_it_is_a_way() -> None:
    peer = record(ME, addresses=(V4, V6))
    assert routes(peer, (), connected=False, last=V6)[:2] == (V6, V4)
    assert routes(peer, (), connected=False, last="5.9.9.9:1")[0] == V4


def test_no_address_of_a_record_passes_for_a_way_through_a_relay() -> None:
    assert relay_of(relay_address(R1)) == R1
    assert relay_of("relay:4001") is None
    with pytest.raises(MalformedMessage):
        checks.address(relay_address(R1))
