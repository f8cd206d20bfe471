"""The benchmark of the caps: what it takes for the busiest time."""

from __future__ import annotations

import pytest

from tests.benchmarks.caps import busiest


def test_the_busiest_five_seconds_are_found_wherever_they_begin() -> None:
    steady = [(float(at), 100 * at) for at in range(20)]
    assert busiest(steady) == pytest.approx(100.0)
    burst = [(at, moved + (1000 if at > 9 else 0)) for at, moved in steady]
    assert busiest(burst) == pytest.approx(300.0)
    assert busiest(steady[:5]) == 0.0, "four seconds are too few to say"
