"""A subspace's algebra, and that estimates in it are unbiased."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerloom.optim.subcge import Subspace
from peerloom.optim.subcge_subspace import folded_shape

SHAPES = [(5, 7), (9, 1), (4, 3, 2)]


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    rank=st.integers(1, 6),
    messages=st.lists(st.tuples(st.integers(0, 10**6), st.integers(-(2**31), 2**31)), max_size=30),
)
def test_one_product_is_the_sum_of_rank_one_updates(
    shape: tuple[int, ...], rank: int, messages: list[tuple[int, int]]
) -> None:
    subspace = Subspace(shape, rank, seed=3, period=1)
    sums = torch.zeros(rank * rank, dtype=torch.int64)
    expected = torch.zeros(shape, dtype=torch.float64)
    for place, scalar in messages:
        sums[place % rank**2] += scalar
        expected += scalar * 2**-16 * subspace.direction(place % rank**2).double()
    total = torch.zeros(folded_shape(shape))
    for start in range(0, len(total), 2):  # in pieces, as large weights are
        piece = total[start : start + 2]
        subspace.add(piece, start, subspace.combined(sums.view(rank, rank), 2**-16), out=piece)
    scale = max(1.0, sum(abs(scalar) for _, scalar in messages) * 2**-16)
    torch.testing.assert_close(total.view(shape).double(), expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("shape", [(12, 8)])
def test_estimates_are_unbiased_over_subspaces(shape: tuple[int, ...]) -> None:
    """E[<G, Z> Z] = G: cosine and length, with no scale beside MeZO's."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean = torch.zeros_like(gradient)
    periods, rank = 1200, 4
    for period in range(periods):
        subspace = Subspace(shape, rank, seed=8, period=period)
        for place in (0, 5, 10, 15):  # a coordinate of its own in each row and column: independent
            z = subspace.direction(place).double()
            mean += (gradient * z).sum() * z / (4 * periods)
    cosine = (mean * gradient).sum() / mean.norm() / gradient.norm()
    assert cosine > 0.97
    assert (mean * gradient).sum() / gradient.norm() ** 2 == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("rank", "messages"), [(4, 8), (4, 64), (16, 64)])
def test_a_period_s_mean_is_noisier_by_its_messages_over_its_directions(rank: int, messages: int) -> None:
    """What is said of the choice of a rank: 1 + N / r^2 times the variance that full-rank directions have, d / N."""
    side, periods = 96, 120
    generator = torch.Generator().manual_seed(5)
    gradient = torch.randn(side, side, generator=generator)
    found = []
    for period in range(periods):
        subspace = Subspace((side, side), rank, seed=1, period=period)
        slopes = subspace.left @ gradient @ subspace.right.T
        counts = torch.bincount(torch.randint(rank**2, (messages,), generator=generator), minlength=rank**2)
        mean = subspace.left.T @ (slopes * counts.view(rank, rank) / messages) @ subspace.right
        found.append(((mean - gradient) ** 2).sum() / (gradient**2).sum())
    expected = side**2 / messages * (1 + messages / rank**2)
    assert torch.stack(found).mean().item() == pytest.approx(expected, rel=0.35)


def test_periods_seeds_and_sides_are_apart() -> None:
    first = Subspace((8, 8), 4, seed=1, period=0)
    assert torch.equal(first.left, Subspace((8, 3), 4, seed=1, period=0).left)
    for other in (Subspace((8, 8), 4, seed=1, period=1), Subspace((8, 8), 4, seed=2, period=0)):
        assert not torch.equal(first.left, other.left) and not torch.equal(first.right, other.right)
    assert not torch.equal(first.left, first.right)


@pytest.mark.parametrize(("shape", "rank"), [((3, 3), 0), ((0, 3), 2), ((3,), 2), ((), 2)])
def test_what_is_no_subspace(shape: tuple[int, ...], rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        Subspace(shape, rank, 0, 0)
