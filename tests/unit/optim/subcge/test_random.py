"""Counter-based numbers: fixed bits, the right moments, streams apart."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerloom.optim.subcge_random import (
    NORMAL_BITS,
    NORMAL_LIMIT,
    coordinates,
    hashes,
    key_of,
    message_seeds,
    mix,
    normal,
    normals,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_bits_are_those_written_here() -> None:
    """A machine or a torch that draws others would leave every swarm."""
    assert key_of("left", 1, 2) == -4479606207205348109
    digest = hashlib.sha256(normal(12345, 100_000).numpy().tobytes()).hexdigest()
    assert digest == "b68eba8be40fb1272edee55f5f748ad8018e505e71be1768c949954009eef676"
    assert message_seeds(7, torch.tensor([-5]), torch.tensor([3])).tolist() == [-4242988230534825787]
    assert coordinates(torch.tensor([9, -9]), torch.tensor([1, 2]), 32).tolist() == [[634, 966], [301, 401]]


@given(x=INT64)
def test_mix_is_splitmix64(x: int) -> None:
    y = x % 2**64
    y = (y ^ (y >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    y = (y ^ (y >> 27)) * 0x94D049BB133111EB % 2**64
    y ^= y >> 31
    assert int(mix(torch.tensor([x]))[0]) % 2**64 == y


def test_normals_have_a_normals_distribution() -> None:
    """Far finer than a sum of coins: of those the fourth moment is off by more than is allowed here."""
    z = normal(key_of("distribution"), 4_000_000).double()
    assert abs(z.mean()) < 0.002 and abs(z.var() - 1) < 0.003
    assert abs((z**3).mean()) < 0.01 and abs((z**4).mean() - 3) < 0.02
    for level in (-2.0, -1.0, -0.125, 0.0, 0.25, 1.5, 3.0):
        between = level - 2.0**-9  # of two of their multiples
        expected = torch.special.ndtr(torch.tensor(between, dtype=torch.float64))
        assert abs((z < between).double().mean() - expected) < 0.001
    values = normals()
    assert float(values.var(unbiased=False)) / 4**NORMAL_BITS == pytest.approx(1, abs=3e-5)
    found, expected = ((x.long() + NORMAL_LIMIT).bincount().double() for x in (z * 2**NORMAL_BITS, values))
    expected *= len(z) / len(values)
    off = (found - expected) ** 2 / expected.clamp_min(1)
    assert off.sum() / expected.count_nonzero() == pytest.approx(1, abs=0.2), "chi-squared a degree of freedom"


def test_an_element_depends_on_key_and_position_alone() -> None:
    whole = normal(5, 100_001)
    assert torch.equal(whole[:70_000], normal(5, 70_000))
    assert not torch.equal(whole, normal(6, 100_001))
    assert torch.equal(hashes(5, 10, 5), hashes(5, 0, 15)[10:])


def test_lengths_and_neighbours_are_not_correlated() -> None:
    z = normal(key_of("lag"), 200_000).double()
    for lag in (1, 2, 3, 4, 31, 576):
        assert abs((z[:-lag] * z[lag:]).mean()) < 0.01
    assert abs((z * normal(key_of("other"), 200_000)).mean()) < 0.01


@pytest.mark.parametrize("rank", [1, 3, 32])
def test_coordinates_are_uniform_and_apart_by_tensor(rank: int) -> None:
    found = coordinates(torch.arange(20_000), torch.tensor([key_of("a"), key_of("b")]), rank)
    assert int(found.min()) >= 0 and int(found.max()) < rank * rank
    shares = torch.bincount(found[:, 0], minlength=rank * rank).double() / 20_000 * rank**2
    assert shares.std(unbiased=False) < 2 * (rank**2 / 20_000) ** 0.5 + 1e-9
    same = (found[:, 0] == found[:, 1]).double().mean()
    assert abs(same - 1 / rank**2) < 0.01
