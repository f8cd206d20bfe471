"""SOAP: AdamW in the eigenbasis of Shampoo's preconditioner, arXiv 2409.11321, Algorithm 3.

For a matrix W (m, n) with gradient G at step t = 1, 2, ...:

    M = b1 M + (1 - b1) G,  G~ = Q_L^T G Q_R,  M~ = Q_L^T M Q_R
    V = b2 V + (1 - b2) G~ G~                                             elementwise, in the rotated basis
    W = (1 - lr wd) W - lr sqrt(1 - b2^t) / (1 - b1^t) Q_L (M~ / (sqrt(V) + eps)) Q_R^T
    L = b3 L + (1 - b3) G G^T,  R = b3 R + (1 - b3) G^T G
    Q_L = QR(L Q_L), Q_R = QR(R Q_R)                                      where t % freq == 0

The first gradient only makes L, R and, by eigenvectors, Q_L and Q_R, as in the authors' code; no weight moves by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from peerloom.optim.eigenbasis import Rotation, first_from_covariance, next_from_covariance

MAX_SIDE = 8192


class SOAP(Optimizer):
    """SOAP for matrices, with decoupled weight decay; a side longer than `max_side` keeps the identity.

    State of a parameter: `step`, `exp_avg`, `exp_avg_sq`, and on each rotated side `left_cov`, `left` (m, m) and
    `right_cov`, `right` (n, n). Raises ValueError for parameters that are no matrices and settings out of range, and in
    `step` NonFiniteGradient, a ValueError, where a basis is asked of what is not finite.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        freq: int = 10,
        *,
        max_side: int = MAX_SIDE,
    ) -> None:
        if not lr >= 0 or not eps > 0 or not weight_decay >= 0 or freq < 1:
            given = f"{lr}, {eps}, {weight_decay}, {freq}"
            raise ValueError(f"SOAP needs lr >= 0, eps > 0, weight_decay >= 0 and freq >= 1, not {given}")
        if not all(0 <= beta < 1 for beta in (*betas, shampoo_beta)):
            raise ValueError(f"SOAP's betas lie in [0, 1), not {(*betas, shampoo_beta)}")
        defaults = {
            "lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps, "weight_decay": weight_decay,
            "freq": freq, "max_side": max_side,
        }  # fmt: skip
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"SOAP takes matrices, not a parameter of shape {tuple(parameter.shape)}")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if state:
                    _update(parameter, parameter.grad, state, group)
                else:
                    _begin(parameter, parameter.grad, state, group)
        return loss


def _begin(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    state["step"] = torch.zeros(())
    state["exp_avg"] = torch.zeros_like(parameter)
    state["exp_avg_sq"] = torch.zeros_like(parameter)
    for side, outer in _outer_products(gradient, group["max_side"]).items():
        state[f"{side}_cov"] = outer.mul_(1 - group["shampoo_beta"])
    _keep(state, first_from_covariance(state.get("left_cov"), state.get("right_cov")))


def _update(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    state["step"] += 1
    step = int(state["step"])
    basis = Rotation(state.get("left"), state.get("right"))
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    rotated = basis.into(gradient)
    state["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
    update = basis.into(state["exp_avg"]) / (state["exp_avg_sq"].sqrt() + group["eps"])
    scale = math.sqrt(1 - beta2**step) / (1 - beta1**step)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_(basis.back(update), alpha=group["lr"] * scale)
    for side, outer in _outer_products(gradient, group["max_side"]).items():
        state[f"{side}_cov"].lerp_(outer, 1 - group["shampoo_beta"])
    if step % group["freq"] == 0:
        basis, second = next_from_covariance(
            basis, state.get("left_cov"), state.get("right_cov"), state["exp_avg_sq"]
        )
        state["exp_avg_sq"] = second.contiguous()
        _keep(state, basis)


def _keep(state: dict[str, Any], basis: Rotation) -> None:
    state |= {side: found.contiguous() for side, found in basis._asdict().items() if found is not None}


def _outer_products(gradient: Tensor, max_side: int) -> dict[str, Tensor]:
    rows, columns = gradient.shape
    found = {}
    if 1 < rows <= max_side:
        found["left"] = gradient @ gradient.T
    if 1 < columns <= max_side:
        found["right"] = gradient.T @ gradient
    return found
