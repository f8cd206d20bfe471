"""What delay does to Adam on quadratics, and what the basis has to do with it: figures found once, in another program.

Every rate and delay is a weight of its own in one optimizer; figures are final over initial loss at the best rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from peerloom.optim.basis_rotation import BasisRotatedAdam
from peerloom.optim.delayed import DelayedWeights

Gradient = Callable[[Tensor], Tensor]


def normal(generator: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(generator.standard_normal(shape))


def orthogonal(generator: np.random.Generator, n: int) -> Tensor:
    return torch.from_numpy(np.linalg.qr(generator.standard_normal((n, n)))[0])


def descend(
    starts: Sequence[Tensor],
    options: Sequence[dict[str, Any]],
    delays: Sequence[int],
    gradient: Gradient,
    steps: int,
    floor: float,
    prepare: Callable[[BasisRotatedAdam], None] | None = None,
    wait: int = 0,
) -> list[Tensor]:
    """The weights after `steps` of a cosine to `floor`, the first `wait` at a rate of 0, and `prepare` after the first.

    `gradient` maps all the weights, stacked (count, m, n), to their gradients.
    """
    weights = [nn.Parameter(start.clone()) for start in starts]
    groups = [{"params": [weight], **one} for weight, one in zip(weights, options, strict=True)]
    tool = BasisRotatedAdam(groups, weight_decay=0.0)
    rates = [group["lr"] for group in tool.param_groups]
    delayed = DelayedWeights([[weight] for weight in weights], delays)

    def pull() -> Tensor:  # its gradient is `gradient`
        stacked = torch.stack(list(weights))
        return (stacked * gradient(stacked.detach())).sum()

    for step in range(steps):
        scale = (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * step / steps))) * (step >= wait)
        for group, rate in zip(tool.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        tool.zero_grad()
        delayed.backward(pull)
        tool.step()
        if prepare is not None and step == 0:
            prepare(tool)
        delayed.commit()
    return [weight.detach() for weight in weights]


def vector_problem() -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues (20,), an orthogonal basis, a start (20, 1) in the eigenbasis."""
    generator = np.random.default_rng(0)
    basis = orthogonal(generator, 20)
    return torch.logspace(0, -3, 20, dtype=torch.float64), basis, normal(generator, 20, 1)


def test_adam_minds_delay_where_the_hessian_is_not_aligned() -> None:
    expected = {
        "aligned": {0: 1.8e-27, 4: 1.7e-9, 16: 4.5e-6, 32: 4.8e-4},
        "rotated": {0: 6.7e-7, 4: 1.5e-3, 16: 7.3e-3, 32: 2.0e-2},
    }
    values, basis, start = vector_problem()
    cases = {"aligned": (values.diag(), start), "rotated": (basis @ values.diag() @ basis.T, basis @ start)}
    rows = [(name, delay, rate) for name in cases for delay in (0, 4, 16, 32) for rate in (0.01, 0.03, 0.1, 0.3)]
    hessians = torch.stack([cases[name][0] for name, _, _ in rows])
    starts = [cases[name][1] for name, _, _ in rows]
    options = [{"lr": rate, "rotate": False} for _, _, rate in rows]
    ends = descend(starts, options, [delay for _, delay, _ in rows], lambda w: hessians @ w, 600, 0.0)
    found: dict[tuple[str, int], float] = {}
    for (name, delay, _), hessian, first, last in zip(rows, hessians, starts, ends, strict=True):
        ratio = float((last.T @ hessian @ last) / (first.T @ hessian @ first))
        found[name, delay] = min(ratio, found.get((name, delay), math.inf))
    for name, by_delay in expected.items():
        for delay, figure in by_delay.items():
            if figure > 1e-20:  # below, it is rounding
                assert figure / 2 < found[name, delay] < figure * 2, (name, delay)
    assert found["aligned", 0] < 1e-24
    for name in cases:
        assert found[name, 0] < found[name, 4] < found[name, 16] < found[name, 32]
    assert all(found["aligned", delay] < found["rotated", delay] / 10 for delay in (0, 4, 16, 32))


@pytest.mark.parametrize("delay", [0, 4, 32])
def test_rotated_with_the_true_basis_is_aligned(delay: int) -> None:
    """The same trajectory after the change of variables. Two starts beside each other make the weight a matrix."""
    values, basis, start = vector_problem()
    start = torch.cat([start, start.flip(0)], dim=1)

    def know(tool: BasisRotatedAdam) -> None:
        """The true basis in place of the first, both moments as if it had been there."""
        state = next(iter(tool.state.values()))
        moment = state["left"] @ state["exp_avg"] @ state["right"].T
        state["left"].copy_(basis)
        state["right"].copy_(torch.eye(2))
        state["exp_avg"].copy_(basis.T @ moment)
        state["exp_avg_sq"].copy_((state["exp_avg"] / (1 - 0.9)).square() * (1 - 0.999))

    cases = [
        (start, {"rotate": False}, values.diag(), None),
        (basis @ start, {"freq": 10**6}, basis @ values.diag() @ basis.T, know),
    ]
    straight, turned = (
        descend([first], [{"lr": 0.03, "eps": 1e-30, **one}], [delay], hessian.__matmul__, 200, 0.0, prepare, wait=1)[0]
        for first, one, hessian, prepare in cases
    )
    torch.testing.assert_close(basis.T @ turned, straight, rtol=0, atol=1e-10)
    assert float(straight.norm()) < float(start.norm())


def test_rotation_bears_delay_on_a_matrix_quadratic() -> None:
    """f = <W, A W B> / 2 of a (16, 12), condition 100 a factor, noise of the Hessian's own shape."""
    delays = (0, 7, 15, 31)
    expected = {
        "adam": (2.1e-4, 3.1e-3, 7.4e-3, 1.6e-2),
        "1st": (1.5e-4, 7.5e-4, 3.6e-4, 9.8e-4),
        "2nd": (6.7e-5, 5.0e-5, 3.8e-5, 2.6e-5),
    }
    generator = np.random.default_rng(0)
    roots, factors = [], []
    bases = [orthogonal(generator, n) for n in (16, 12)]
    for basis in bases:
        values = torch.logspace(0, -2, len(basis), dtype=torch.float64)
        factors.append(basis @ values.diag() @ basis.T)
        roots.append(basis @ values.sqrt().diag() @ basis.T)
    start = normal(generator, 16, 12)
    rows = [(name, delay, rate) for name in expected for delay in delays for rate in (0.01, 0.03, 0.1)]
    options = [
        {"lr": rate, "rotate": False} if name == "adam" else {"lr": rate, "source": name} for name, _, rate in rows
    ]

    def gradient(w: Tensor) -> Tensor:
        return factors[0] @ w @ factors[1] + 0.02 * (roots[0] @ normal(generator, 16, 12) @ roots[1])

    ends = descend([start] * len(rows), options, [delay for _, delay, _ in rows], gradient, 1500, 0.1)

    def loss(w: Tensor) -> float:
        return float((w * (factors[0] @ w @ factors[1])).sum())

    found: dict[tuple[str, int], float] = {}
    for (name, delay, _), end in zip(rows, ends, strict=True):
        found[name, delay] = min(loss(end) / loss(start), found.get((name, delay), math.inf))
    for name in ("adam", "2nd"):
        for delay, figure in zip(delays, expected[name], strict=True):
            assert figure / 2 < found[name, delay] < figure * 2, (name, delay, found[name, delay])
    by_first = math.prod(found["1st", delay] for delay in delays) ** 0.25  # one by one they vary with the noise by 3
    assert 0.5 < by_first / math.prod(expected["1st"]) ** 0.25 < 2
    assert all(found["2nd", delay] < found["1st", delay] < found["adam", delay] for delay in delays)
    assert found["adam", 31] > 20 * found["adam", 0] and found["2nd", 31] < 2 * found["2nd", 0]
