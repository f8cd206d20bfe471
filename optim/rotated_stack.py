"""Equal-shaped weights that take their basis-rotated steps together, and what one step does to the stack."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peerloom.optim.eigenbasis import (
    Geometry,
    Rotation,
    Source,
    first_from_covariance,
    first_from_moment,
    next_from_covariance,
    next_from_moment,
    no_basis,
    rotated_sides,
)

State = dict[str, Tensor]


class Setting(NamedTuple):
    """What all members of a stack share."""

    beta1: float
    beta2: float
    eps: float
    source: Source
    geometry: Geometry
    freq: int
    max_side: int

    @classmethod
    def of(cls, group: dict[str, Any]) -> Setting:
        beta1, beta2 = group["betas"]
        return cls(
            beta1, beta2, group["eps"], group["source"], group["geometry"], group["freq"], group["max_side"]
        )


class RotatedStack:
    """Weights of one shape, seen as (count, m, n). Their states become views of the stack's own tensors."""

    def __init__(
        self,
        members: Sequence[tuple[Tensor, dict[str, Any]]],
        states: MutableMapping[Tensor, State],
        setting: Setting,
    ) -> None:
        self._members = list(members)
        self._parameters = [parameter for parameter, _ in members]
        self.setting = setting
        first = self._parameters[0]
        m, n = first.shape[0], first.numel() // first.shape[0]
        self._shape = (m, n)
        self._dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self._sides = rotated_sides(m, n, setting.geometry, setting.max_side)
        self._states = [states[parameter] for parameter in self._parameters]
        self.count = int(self._states[0].get("step", 0))
        self._check_bases()
        self.tensors = {name: self._stack(name, shape) for name, shape in self._layout().items()}
        self._views = [self._hand_out(k) for k in range(len(self._parameters))]

    def _check_bases(self) -> None:
        """Moments of a basis are of no use in another one."""
        held = {tuple(name in state for name in ("left", "right")) for state in self._states}
        if self.count and held != {self._sides}:
            raise ValueError("geometry, rotate and max_side must stay as they are once a weight took its first step")

    def _layout(self) -> dict[str, tuple[int, int]]:
        m, n = self._shape
        layout = {"exp_avg": (m, n), "exp_avg_sq": (m, n)}
        for name, used, size in (("left", self._sides[0], m), ("right", self._sides[1], n)):
            if used:
                layout[name] = (size, size)
                if self.setting.source == "2nd":
                    layout[f"{name}_cov"] = (size, size)
        return layout

    def _stack(self, name: str, shape: tuple[int, int]) -> Tensor:
        device = self._parameters[0].device
        stacked = torch.zeros(len(self._parameters), *shape, dtype=self._dtype, device=device)
        for row, state in zip(stacked, self._states, strict=True):
            if name in state:
                row.copy_(state[name].reshape(shape))
        return stacked

    def _hand_out(self, k: int) -> State:
        """Member k's views, put into its state; what its state held besides is dropped."""
        parameter, state = self._parameters[k], self._states[k]
        views = {name: tensor[k] for name, tensor in self.tensors.items()}
        for name in ("exp_avg", "exp_avg_sq"):
            views[name] = views[name].view(parameter.shape)
        views["step"] = torch.tensor(float(self.count))
        state.clear()
        state.update(views)
        return views

    def stale(self) -> bool:
        """Whether some member's state is no longer what this stack handed out."""
        return any(
            state.get(name) is not view
            for state, views in zip(self._states, self._views, strict=True)
            for name, view in views.items()
        )

    def check(self) -> None:
        """Raises NonFiniteGradient for a gradient whose squares, summed over the matrix, overflow."""
        norms = torch._foreach_norm(self._gradients(), 2, dtype=self._dtype)  # the largest number is found far slower
        if not float(torch.stack(norms).max()) <= math.sqrt(torch.finfo(self._dtype).max):  # NaN is refused too
            raise no_basis(self._shape)

    def step(self) -> None:
        """One update of all members, which all must have a gradient."""
        gradient = self.begin()
        setting, tensors = self.setting, self.tensors
        update_covariances(gradient, tensors.get("left_cov"), tensors.get("right_cov"), setting.beta2)
        if any(self._sides) and (self.count == 1 or self.count % setting.freq == 0):
            self.refresh(gradient)
        rotation = Rotation(tensors.get("left"), tensors.get("right"))
        direction = rotated_direction(
            gradient, rotation, tensors["exp_avg"], tensors["exp_avg_sq"], setting.beta1, setting.beta2, setting.eps
        )
        self.apply(direction, self.count)

    def begin(self) -> Tensor:
        """Counts the step and gives the gradients, (members, m, n)."""
        self.count += 1
        torch._foreach_add_([views["step"] for views in self._views], 1)
        return torch.stack([grad.reshape(self._shape) for grad in self._gradients()]).to(self._dtype)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def apply(self, direction: Tensor, taken: int) -> None:
        """Moves the weights along it; `taken` gradients are in the moments, whose bias is corrected."""
        beta1, beta2 = self.setting.beta1, self.setting.beta2
        correction = math.sqrt(1 - beta2**taken) / (1 - beta1**taken)
        rates = [float(group["lr"]) for _, group in self._members]
        decays = [1 - rate * group["weight_decay"] for rate, (_, group) in zip(rates, self._members, strict=True)]
        moves = [row.view(parameter.shape) for row, parameter in zip(direction, self._parameters, strict=True)]
        torch._foreach_mul_(moves, [-rate * correction for rate in rates])
        torch._foreach_mul_(self._parameters, decays)
        torch._foreach_add_(self._parameters, moves)

    def refresh(self, gradient: Tensor) -> None:
        """New bases, the second moment permuted with them and the first turned from the old to the new."""
        tensors, setting = self.tensors, self.setting
        last = Rotation(tensors.get("left"), tensors.get("right"))
        covariances = tensors.get("left_cov"), tensors.get("right_cov")
        first, second = tensors["exp_avg"], tensors["exp_avg_sq"]
        moment = first if self.count == 1 else last.back(first)  # in the weight's own coordinates
        permuted = second
        if setting.source == "2nd":
            if self.count == 1:
                found = first_from_covariance(*covariances)
            else:
                found, permuted = next_from_covariance(last, *covariances, second)
        else:
            seen = moment.lerp(gradient, 1 - setting.beta1)  # looked ahead by this step
            if self.count == 1:
                found = first_from_moment(seen, self._sides)
            else:
                found, permuted = next_from_moment(last, seen, second)
        if permuted is not second:
            second.copy_(permuted)
        for name, basis in zip(("left", "right"), found, strict=True):
            if basis is not None:
                tensors[name].copy_(basis)
        first.copy_(found.into(moment))


def update_covariances(gradient: Tensor, left: Tensor | None, right: Tensor | None, beta2: float) -> None:
    """L = b2 L + (1 - b2) G G^T and R = b2 R + (1 - b2) G^T G, in place."""
    if left is not None:
        left.baddbmm_(gradient, gradient.mT, beta=beta2, alpha=1 - beta2)
    if right is not None:
        right.baddbmm_(gradient.mT, gradient, beta=beta2, alpha=1 - beta2)


def rotated_direction(
    gradient: Tensor, rotation: Rotation, first: Tensor, second: Tensor, beta1: float, beta2: float, eps: float
) -> Tensor:
    """U (M~ / (sqrt(V~) + eps)) V^T after both moments took in the gradient, in place; all (count, m, n).

    Nothing in it hangs on values: torch.compile takes it whole.
    """
    rotated = rotation.into(gradient)
    first.lerp_(rotated, 1 - beta1)
    second.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
    return rotation.back(first / second.sqrt().add_(eps))
