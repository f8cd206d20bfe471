"""The relative distance of the peers' sketches."""

from __future__ import annotations

import math
import random

import pytest

from peerloom.protocol.consensus import relative_distance


def test_nothing_to_tell_of_fewer_than_two() -> None:
    assert relative_distance([]) is None
    assert relative_distance([(), (1.0, 2.0)]) is None


def test_equal_peers_are_at_no_distance() -> None:
    assert relative_distance([(1.0, 2.0)] * 5) == 0.0
    assert relative_distance([(0.0, 0.0)] * 2) == 0.0


def test_the_formula() -> None:
    assert relative_distance([(3.0, 0.0), (5.0, 0.0)]) == pytest.approx(math.sqrt(2 / 34))
    rng = random.Random(0)
    base = [rng.gauss(0, 1) for _ in range(32)]
    apart = [tuple(value + rng.gauss(0, 0.01) for value in base) for _ in range(50)]
    assert relative_distance(apart) == pytest.approx(0.01, rel=0.25)
    assert relative_distance([tuple(1e25 * v for v in row) for row in apart]) == pytest.approx(
        relative_distance(apart)
    )


def test_a_stranger_of_another_length_is_left_out() -> None:
    assert relative_distance([(1.0, 2.0), (1.0, 2.0), (9.0,)]) == 0.0
