"""What BasisRotatedAdam refuses, by name and without a trace, and the basis that only fp64 finds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peerloom.optim.basis_rotation import BasisRotatedAdam
from peerloom.optim.eigenbasis import (
    Geometry,
    NonFiniteGradient,
    Rotation,
    Source,
    next_from_covariance,
    next_from_moment,
)

from .conftest import Draw
from .test_basis_rotation import GEOMETRIES, SOURCES, feed, optimizer


def test_a_basis_that_fp32_does_not_find_is_found_in_fp64(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    eigh, asked = torch.linalg.eigh, []

    def stubborn(matrix: Tensor) -> Any:
        asked.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    weight = nn.Parameter(draw(4, 3, dtype=torch.float32))
    tool = optimizer([weight])
    feed(tool, [weight], [draw(4, 3, dtype=torch.float32)])
    assert asked == [torch.float32, torch.float64] * 2
    assert tool.state[weight]["left"].dtype == torch.float32


@pytest.mark.parametrize("step", [1, 2, 4])  # the first refresh, between two, at one
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e20])  # the last one's square is too large
@pytest.mark.parametrize(("source", "geometry"), list(itertools.product(SOURCES, GEOMETRIES)))
def test_a_gradient_that_is_not_finite_is_refused_and_leaves_no_trace(
    draw: Draw, source: Source, geometry: Geometry, value: float, step: int
) -> None:
    shapes = [(4, 3), (5, 5), (3,)]
    start = [draw(*shape, dtype=torch.float32) for shape in shapes]
    spoilt, clean = ([nn.Parameter(weight.clone()) for weight in start] for _ in range(2))
    first, second = (optimizer(one, source=source, geometry=geometry, freq=4) for one in (spoilt, clean))
    for now in range(1, 9):
        gradients = [draw(*shape, dtype=torch.float32) for shape in shapes]
        if now == step:
            bad = [gradient.clone() for gradient in gradients]
            bad[1][2, 3] = value
            with pytest.raises(NonFiniteGradient, match="no eigenbasis .* NaN or infinity"):
                feed(first, spoilt, bad)
        feed(first, spoilt, gradients)
        feed(second, clean, gradients)
    for one, other in zip(spoilt, clean, strict=True):
        assert torch.equal(one, other) and bool(one.isfinite().all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_refresh_of_what_is_not_finite_is_refused(draw: Draw, value: float) -> None:
    """L, R or M that another optimizer, SOAP, let it into."""
    last = Rotation(torch.linalg.qr(draw(4, 4)).Q, torch.linalg.qr(draw(3, 3)).Q)
    moment, left, right = draw(4, 3), torch.eye(4).double(), torch.eye(3).double()
    moment[1, 1] = right[1, 1] = value
    with pytest.raises(NonFiniteGradient, match="no eigenbasis .* NaN or infinity"):
        next_from_covariance(last, left, right, draw(4, 3))
    with pytest.raises(NonFiniteGradient, match="no eigenbasis .* NaN or infinity"):
        next_from_moment(last, moment, draw(4, 3))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"freq": 0}, "freq"),
        ({"source": "3rd"}, "source"),
        ({"geometry": "both"}, "geometry"),
        ({"lr": -1.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"max_side": 0}, "max_side"),
    ],
)
def test_a_bad_argument_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        BasisRotatedAdam([nn.Parameter(torch.ones(2, 2))], **options)


@pytest.mark.parametrize("change", [{"geometry": "unilateral"}, {"rotate": False}, {"max_side": 2}])
def test_a_basis_is_not_taken_from_under_its_moments(draw: Draw, change: dict[str, Any]) -> None:
    weight = nn.Parameter(draw(4, 3))
    tool = optimizer([weight])
    feed(tool, [weight], [draw(4, 3)])
    tool.param_groups[0].update(change)
    with pytest.raises(ValueError, match="must stay"):
        feed(tool, [weight], [draw(4, 3)])


def test_a_group_that_is_refused_is_not_kept() -> None:
    tool = BasisRotatedAdam([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match="freq"):
        tool.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "freq": 0})
    assert len(tool.param_groups) == 1
