"""What a node knows of itself stays of a size that can be kept and told."""

from __future__ import annotations

import pytest

from peerloom.node.clock import SystemClock
from peerloom.node.facts import Facts
from peerloom.protocol import codec, limits
from peerloom.protocol.peer_id import peer_id_of
from peerloom.protocol.types import PeerId

MOST = limits.MAX_PARTNERS
OFTEN = peer_id_of(bytes(32))


@pytest.fixture
def facts() -> Facts:
    return Facts(
        peer_id=OFTEN,
        name="n",
        role="trainer",
        version="0",
        instance="00",
        cert_der=b"x",
        clock=SystemClock(),
        bytes_moved=lambda: (0, 0),
    )


def partner(number: int) -> PeerId:
    return peer_id_of((number + 1).to_bytes(32, "big"))


def test_a_status_of_more_partners_than_it_has_room_for_names_the_most_frequent(facts: Facts) -> None:
    for number in range(MOST):
        facts.exchanged_with(partner(number))
    facts.partners.update({OFTEN: 3})
    told = codec.decode_status(codec.encode_status(facts.status()))
    assert len(told.partners) == MOST and told.partners[OFTEN] == 3
    assert len(facts.partners) == MOST + 1, "the others are not forgotten yet"


def test_partners_are_counted_in_bounded_memory_and_the_frequent_ones_kept(facts: Facts) -> None:
    for number in range(5 * MOST):
        facts.exchanged_with(partner(number))
        if number % MOST == 0:
            facts.exchanged_with(OFTEN)
        assert len(facts.partners) <= 2 * MOST
    assert facts.partners[OFTEN] == 5 and facts.last_partner == partner(5 * MOST - 1)
