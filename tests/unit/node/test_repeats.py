"""Peers whose parameters stand still: the same bytes in two rounds."""

from __future__ import annotations

import pytest

from peerloom.node.repeats import KEPT, Repeats
from peerloom.protocol.errors import BadPayload
from peerloom.protocol.types import PeerId, Span

A, B = PeerId("a"), PeerId("b")
PIECES: Span = (0, 1)


def check(repeats: Repeats, peer: PeerId, round: int, digest: bytes, own: bytes = b"") -> None:
    """As a node that moves, unless `own` says what it has there; both are in the same round."""
    repeats.check(peer, round, digest, pieces=PIECES, own_round=round, own=own or b"own %d" % round)


def test_the_same_bytes_in_another_round_are_refused() -> None:
    repeats = Repeats()
    check(repeats, A, 3, b"x")
    check(repeats, A, 3, b"x")  # an exchange that broke, tried again
    check(repeats, B, 4, b"x")  # two peers may agree
    check(repeats, A, 4, b"y")
    with pytest.raises(BadPayload, match="round 5 are those of round 3"):
        check(repeats, A, 5, b"x")


def test_what_no_training_moves_may_repeat() -> None:
    repeats = Repeats()
    for round in range(5):
        check(repeats, A, round, b"as ours", own=b"as ours")
        check(repeats, B, round, b"by a bit another", own=b"as ours")  # what mixing rounds off stays so for ever


def test_what_is_as_this_nodes_own_holds_nobody_back() -> None:
    repeats = Repeats()
    check(repeats, A, 0, b"x", own=b"x")
    check(repeats, B, 1, b"y", own=b"y")
    check(repeats, A, 2, b"x", own=b"x")
    with pytest.raises(BadPayload):
        check(repeats, B, 3, b"y", own=b"z")


def test_each_part_of_the_model_moves_or_stands_by_itself() -> None:
    repeats = Repeats()
    for round in range(3):
        repeats.check(A, round, b"%d" % round, pieces=(0, 1), own_round=round, own=b"moves %d" % round)
        repeats.check(A, round, b"rows", pieces=(1, 2), own_round=round, own=b"stands")


def test_a_nodes_own_round_is_one_however_many_it_meets_there() -> None:
    """A later leg's bytes are a mean: that they are others than the first leg's does not say that training moves."""
    repeats = Repeats()
    for round, own in ((7, b"first leg"), (7, b"mean"), (8, b"first leg")):
        repeats.check(A, round, b"rows", pieces=PIECES, own_round=round, own=own)


def test_what_is_kept_is_bounded() -> None:
    repeats = Repeats()
    for round in range(KEPT + 1):
        check(repeats, A, round, round.to_bytes(4, "big"))
    check(repeats, A, KEPT + 1, bytes(4))  # the oldest is forgotten
