"""Peers whose parameters stand still: the same bytes in two rounds."""

from __future__ import annotations

import pytest

from peerloom.node.repeats import KEPT, Repeats
from peerloom.protocol.errors import BadPayload
from peerloom.protocol.types import PeerId

A, B = PeerId("a"), PeerId("b")


def test_the_same_bytes_in_another_round_are_refused() -> None:
    repeats = Repeats()
    repeats.check(A, 3, b"x")
    repeats.check(A, 3, b"x")  # an exchange that broke, tried again
    repeats.check(B, 4, b"x")  # two peers may agree
    repeats.check(A, 4, b"y")
    with pytest.raises(BadPayload, match="round 5 are those of round 3"):
        repeats.check(A, 5, b"x")


def test_what_is_kept_is_bounded() -> None:
    repeats = Repeats()
    for round in range(KEPT + 1):
        repeats.check(A, round, round.to_bytes(4, "big"))
    repeats.check(A, KEPT + 1, bytes(4))  # the oldest is forgotten
