"""SOAP by its properties: AdamW without a basis, blind to rotations with one, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peerloom.optim.soap import SOAP
from tests.unit.optim.conftest import Draw


def stepped(start: Tensor, gradients: list[Tensor], **settings: Any) -> Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = SOAP([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_without_a_basis_it_is_adamw_after_the_first_gradient(draw: Draw) -> None:
    start, gradients = draw(5, 7), [draw(5, 7) for _ in range(6)]
    ours = stepped(start, gradients, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, max_side=1, eps=1e-12)
    parameter = torch.nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([parameter], 0.01, (0.9, 0.99), weight_decay=0.1, eps=1e-12)
    for gradient in gradients[1:]:
        parameter.grad = gradient.clone()
        adamw.step()
    torch.testing.assert_close(ours, parameter.detach(), atol=1e-9, rtol=0)


def test_it_is_blind_to_rotations_of_either_side_which_adamw_is_not(draw: Draw) -> None:
    # square: where a first gradient is not of full rank, some columns of a basis are any
    left, right = torch.linalg.qr(draw(6, 6)).Q, torch.linalg.qr(draw(6, 6)).Q
    start, gradients = draw(6, 6), [draw(6, 6) for _ in range(9)]
    turned = [left @ gradient @ right for gradient in gradients]
    for settings, blind in (({"freq": 3}, True), ({"freq": 3, "max_side": 1}, False)):
        straight = stepped(start, gradients, lr=0.05, **settings)
        other = stepped(left @ start @ right, turned, lr=0.05, **settings)
        distance = float((left @ straight @ right - other).abs().max())
        assert (distance < 1e-9) == blind


def test_the_state_of_each_side_has_its_size_and_an_orthogonal_basis(draw: Draw) -> None:
    parameter = torch.nn.Parameter(draw(4, 9))
    optimizer = SOAP([parameter], freq=1, max_side=8)
    for _ in range(3):
        parameter.grad = draw(4, 9)
        optimizer.step()
    state = optimizer.state[parameter]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "left", "left_cov"}, "the right side is too long"
    torch.testing.assert_close(state["left"] @ state["left"].T, torch.eye(4, dtype=torch.float64))


def test_steps_are_those_of_the_equations_as_they_are_written(draw: Draw) -> None:
    """M in the weight's own coordinates, the covariances after the step, the second moment sorted with its basis."""
    start, gradients = draw(4, 4), [draw(4, 4) for _ in range(12)]
    lean = draw(4, 4)  # directions of lasting size, so that columns change places
    gradients = [gradient + 2 * lean * (1 if step < 5 else -0.2) for step, gradient in enumerate(gradients)]
    beta1, beta2, beta3, rate, decay, eps, freq = 0.9, 0.99, 0.8, 0.02, 0.1, 1e-8, 2
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    covariances = [(1 - beta3) * gradients[0] @ gradients[0].T, (1 - beta3) * gradients[0].T @ gradients[0]]
    left, right = (torch.linalg.eigh(covariance).eigenvectors.flip(1) for covariance in covariances)
    swaps = 0
    for step, gradient in enumerate(gradients[1:], 1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * (left.T @ gradient @ right).square()
        scale = rate * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        w = (1 - rate * decay) * w - scale * left @ ((left.T @ m @ right) / (v.sqrt() + eps)) @ right.T
        outer = gradient @ gradient.T, gradient.T @ gradient
        covariances = [beta3 * old + (1 - beta3) * new for old, new in zip(covariances, outer, strict=True)]
        if step % freq == 0:
            rows = (-torch.diag(left.T @ covariances[0] @ left)).argsort()
            columns = (-torch.diag(right.T @ covariances[1] @ right)).argsort()
            swaps += int((rows.diff() < 0).any()) + int((columns.diff() < 0).any())
            v = v[rows][:, columns]
            left = torch.linalg.qr(covariances[0] @ left[:, rows]).Q
            right = torch.linalg.qr(covariances[1] @ right[:, columns]).Q
    settings: dict[str, Any] = {"lr": rate, "betas": (beta1, beta2), "shampoo_beta": beta3, "weight_decay": decay}
    ours = stepped(start, gradients, **settings, eps=eps, freq=freq)
    torch.testing.assert_close(ours, w, atol=1e-9, rtol=0)
    assert swaps, "or the order of the second moment is not seen"


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"eps": 0.0}, {"freq": 0}, {"betas": (1.0, 0.9)}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="SOAP"):
        SOAP([torch.nn.Parameter(torch.zeros(2, 2))], **settings)


def test_only_matrices_are_taken() -> None:
    with pytest.raises(ValueError, match=r"not a parameter of shape \(3,\)"):
        SOAP([torch.nn.Parameter(torch.zeros(3))])
