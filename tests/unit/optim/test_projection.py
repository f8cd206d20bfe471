"""The projection: distances within its bound whatever the vector's shape, and the same on every machine."""

from __future__ import annotations

import math

import pytest
import torch

from peerloom.optim import projection as module
from peerloom.optim.projection import consensus_distance, distance, project

from .conftest import Draw


@pytest.mark.parametrize("count", [16, 32, 64])
@pytest.mark.parametrize("kind", ["normal", "one column", "a few rows", "constant"])
def test_squares_are_unbiased_and_within_the_bound(kind: str, count: int, draw: Draw) -> None:
    """Over 300 seeds: the mean within 4 standard errors, the deviation of |Px|^2 at most 1.15 sqrt(2 / count)."""
    x = draw(16000, dtype=torch.float32)
    place = torch.arange(16000)
    x = {
        "normal": x,
        "one column": x * (place % 64 == 5),
        "a few rows": x * (place < 20 * 64),
        "constant": torch.ones(16000),
    }[kind]
    squares = torch.tensor([float(project(x, seed, count).square().sum()) for seed in range(300)])
    ratios = squares / x.square().sum()
    bound = math.sqrt(2 / count)
    assert abs(ratios.mean().item() - 1) < 4 * bound / math.sqrt(300)
    assert ratios.std().item() < 1.15 * bound


def test_distances_between_near_vectors_survive_their_length(draw: Draw) -> None:
    base = 10 * draw(50000, dtype=torch.float32)
    near = base + 1e-3 * draw(50000, dtype=torch.float32)
    true = float((base.double() - near.double()).norm())
    estimates = [distance(project(base, seed, 64), project(near, seed, 64)) for seed in range(40)]
    assert sum(estimates) / 40 == pytest.approx(true, rel=0.06)


def test_consensus_distance(draw: Draw) -> None:
    thetas = draw(1, 20000, dtype=torch.float32) + 0.1 * draw(16, 20000, dtype=torch.float32)
    true = math.sqrt(float((thetas - thetas.mean(0)).square().sum()) / 16)
    estimate = consensus_distance(torch.stack([project(theta, 7, 64) for theta in thetas]))
    assert estimate == pytest.approx(true, rel=0.15)
    assert consensus_distance(torch.ones(3, 8)) == 0


def test_it_is_linear_and_pieces_do_not_matter_to_the_length(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = draw(2, 3001)
    whole = project(a, 5) - project(b, 5)
    torch.testing.assert_close(project(a.float() - b.float(), 5), whole, atol=1e-4, rtol=0)
    monkeypatch.setattr(module, "_ROWS", 8)
    assert project(a, 5).shape == (32,)


def test_the_matrix_stays_as_it_is() -> None:
    """The wire contract: peers compare projections, so the integers behind them may not change."""
    x = torch.arange(1, 11, dtype=torch.float32)
    assert project(x, seed=1, count=4).tolist() == PINNED
    assert project(x, seed=2, count=4).tolist() != PINNED
    assert project(x, 1, 4).tolist() == project(x.double(), 1, 4).tolist()


PINNED = [-9.0, -3.0, 16.0, -13.0]


def test_refusals() -> None:
    for call, message in [
        (lambda: project(torch.zeros(2, 2), 0), "flat floating point"),
        (lambda: project(torch.zeros(4, dtype=torch.int32), 0), "flat floating point"),
        (lambda: project(torch.zeros(4), 0, 48), "power of 2 of numbers, at most 64, got 48"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_parts_add_up_to_the_whole() -> None:
    theta = torch.randn(5 * 4096 * 32 + 77, generator=torch.Generator().manual_seed(0))
    for count in (1, 2, 3, 8):
        parts = [project(theta, 3, share=(part, count)) for part in range(count)]
        torch.testing.assert_close(torch.stack(parts).sum(0), project(theta, 3), rtol=1e-12, atol=1e-9)
