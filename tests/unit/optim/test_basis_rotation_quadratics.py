"""What delay does to Adam on quadratics, and what the basis has to do with it: figures found once, in another program.

Every rate and delay is a weight of its own in one optimizer; figures are final over initial loss at the best rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from peerloom.optim.basis_rotation import BasisRotatedAdam
from peerloom.optim.delayed import DelayedWeights

Gradient = Callable[[Tensor], Tensor]
BASES_KNOWN = ("aligned", "oracle")
NOISES = 4  # of the matrix quadratic, for the method whose figures vary with it by 3


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
    alike = {delay: [k for k, other in enumerate(delays) if other == delay] for delay in delays}
    stores = {delay: torch.stack([starts[k] for k in chosen]) for delay, chosen in alike.items()}  # copied as one
    weights = [nn.Parameter(stores[delay][alike[delay].index(k)]) for k, delay in enumerate(delays)]
    groups = [{"params": [weight], **one} for weight, one in zip(weights, options, strict=True)]
    tool = BasisRotatedAdam(groups, weight_decay=0.0)
    rates = [group["lr"] for group in tool.param_groups]
    delayed = DelayedWeights([[store] for store in stores.values()], list(stores))

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
        "oracle": {0: 1.8e-27, 4: 1.7e-9, 16: 4.5e-6, 32: 4.8e-4},
    }
    values, basis, start = vector_problem()
    cases = {"aligned": (values.diag(), start), "rotated": (basis @ values.diag() @ basis.T, basis @ start)}
    rows = [(name, delay, rate) for name in cases for delay in (0, 4, 16, 32) for rate in (0.01, 0.03, 0.1, 0.3)]
    hessians = torch.stack([cases[name][0] for name, _, _ in rows])
    starts = [cases[name][1] for name, _, _ in rows]
    options = [{"lr": rate, "rotate": False} for _, _, rate in rows]
    ends = descend(starts, options, [delay for _, delay, _ in rows], lambda w: hessians @ w, 600, 0.0)
    known = [(delay, rate) for delay in (0, 4, 16, 32) for rate in (0.01, 0.03, 0.1, 0.3)]
    ends += oracle_ends(known)
    rows += [("oracle", *row) for row in known]
    starts += [cases["rotated"][1]] * len(known)
    hessians = torch.cat([hessians, cases["rotated"][0].expand(len(known), -1, -1)])
    found: dict[tuple[str, int], float] = {}
    for (name, delay, _), hessian, first, last in zip(rows, hessians, starts, ends, strict=True):
        ratio = float((last.T @ hessian @ last) / (first.T @ hessian @ first))
        found[name, delay] = min(ratio, found.get((name, delay), math.inf))
    for name, by_delay in expected.items():
        for delay, figure in by_delay.items():
            if figure > 1e-20:  # below, it is rounding
                assert figure / 2 < found[name, delay] < figure * 2, (name, delay)
    assert all(found[name, 0] < 1e-24 for name in BASES_KNOWN)
    for name in (*cases, "oracle"):
        assert found[name, 0] < found[name, 4] < found[name, 16] < found[name, 32]
    assert all(found[name, delay] < found["rotated", delay] / 10 for name in BASES_KNOWN for delay in (0, 4, 16, 32))


def oracle_ends(rows: Sequence[tuple[int, float]]) -> list[Tensor]:
    """Ends of the rotated problem with the true basis known, at each delay and rate."""
    values, basis, start = vector_problem()
    pair = basis @ torch.cat([start, start.flip(0)], dim=1)  # two starts beside each other make the weight a matrix
    options = [{"lr": rate, "freq": 10**6} for _, rate in rows]
    hessian = basis @ values.diag() @ basis.T
    delays = [delay for delay, _ in rows]
    ends = descend([pair] * len(rows), options, delays, hessian.__matmul__, 601, 0.0, know(basis), wait=1)
    return [end[:, :1] for end in ends]


def know(basis: Tensor) -> Callable[[BasisRotatedAdam], None]:
    """Puts the true basis in place of the first, both moments as if it had been there."""

    def put(tool: BasisRotatedAdam) -> None:
        for state in tool.state.values():
            moment = state["left"] @ state["exp_avg"] @ state["right"].T
            state["left"].copy_(basis)
            state["right"].copy_(torch.eye(2))
            state["exp_avg"].copy_(basis.T @ moment)
            state["exp_avg_sq"].copy_((state["exp_avg"] / (1 - 0.9)).square() * (1 - 0.999))

    return put


@pytest.mark.parametrize("delay", [0, 4, 16, 32])
def test_rotated_with_the_true_basis_is_aligned(delay: int) -> None:
    """The same trajectory after the change of variables."""
    values, basis, start = vector_problem()
    start = torch.cat([start, start.flip(0)], dim=1)
    cases = [
        (start, {"rotate": False}, values.diag(), None),
        (basis @ start, {"freq": 10**6}, basis @ values.diag() @ basis.T, know(basis)),
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
    rows = [
        (name, delay, noise, rate)
        for name in expected
        for delay in delays
        for noise in range(NOISES if name == "1st" else 1)
        for rate in (0.01, 0.03, 0.1)
    ]
    options = [
        {"lr": rate, "rotate": False} if name == "adam" else {"lr": rate, "source": name} for name, _, _, rate in rows
    ]
    generators = [generator, *(np.random.default_rng(noise) for noise in range(1, NOISES))]
    noise_of = torch.tensor([noise for _, _, noise, _ in rows])

    def gradient(w: Tensor) -> Tensor:
        noises = torch.stack([normal(each, 16, 12) for each in generators])
        return factors[0] @ w @ factors[1] + 0.02 * (roots[0] @ noises @ roots[1])[noise_of]

    ends = descend([start] * len(rows), options, [delay for _, delay, _, _ in rows], gradient, 1500, 0.1)

    def loss(w: Tensor) -> float:
        return float((w * (factors[0] @ w @ factors[1])).sum())

    best: dict[tuple[str, int, int], float] = {}
    for (name, delay, noise, _), end in zip(rows, ends, strict=True):
        best[name, delay, noise] = min(loss(end) / loss(start), best.get((name, delay, noise), math.inf))
    found = {
        (name, delay): math.exp(mean(math.log(value) for key, value in best.items() if key[:2] == (name, delay)))
        for name, delay, _ in best
    }
    for name in expected:
        for delay, figure in zip(delays, expected[name], strict=True):
            assert figure / 2 < found[name, delay] < figure * 2, (name, delay, found[name, delay])
    assert all(found["2nd", delay] < found["1st", delay] < found["adam", delay] for delay in delays)
    assert found["adam", 31] > 20 * found["adam", 0] and found["2nd", 31] < 2 * found["2nd", 0]
