"""Adam in the eigenbasis of each weight's gradient, which bears delayed gradients: arXiv 2602.03515, Algorithm 1.

For a weight W (m, n) with gradient G at step t = 1, 2, ..., in this order:

    L = b2 L + (1 - b2) G G^T,  R = b2 R + (1 - b2) G^T G                 source "2nd" only; no bias correction
    U, V = an eigenbasis                                                  at t = 1 and where t % freq == 0
    M = b1 M + (1 - b1) G,  G~ = U^T G V,  M~ = U^T M V
    V~ = b2 V~ + (1 - b2) G~ G~                                           elementwise; permuted with U, V, not rotated
    W = (1 - lr wd) W - lr sqrt(1 - b2^t) / (1 - b1^t) U (M~ / (sqrt(V~) + eps)) V^T

What is stored is M~, which follows M~ = b1 M~ + (1 - b1) G~ while the basis stands and is turned with it when it
changes: the same M, with one rotation a step less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from peerloom.optim.eigenbasis import Geometry, Source
from peerloom.optim.rotated_stack import RotatedStack, Setting

Group = dict[str, Any]

MAX_SIDE = 8192  # of a matrix: a longer side keeps the identity
STACK_ELEMENTS = 1 << 24  # of equal shapes worked on at a time: small matrices share a kernel, large ones need not


class BasisRotatedAdam(Optimizer):
    """Basis-rotated Adam with decoupled weight decay; `freq` steps between refreshes of a basis.

    Parameters with two dimensions or more are matrices (out, the rest), as convolutions are; those with fewer, those of
    one row or column, and those of groups with `rotate` False (embeddings, the head), get plain AdamW. A side longer
    than `max_side` keeps the identity. Every argument but `params` may be set by group; groups that differ in `lr` or
    `weight_decay` alone are still worked on together. Memory beyond AdamW's: 2 (m^2 + n^2) elements a matrix for
    ("2nd", "bilateral"), half of it for "1st", and for "unilateral" the smaller side's alone. Moments and bases of
    rotated weights are fp32, or fp64 for fp64 weights; plain AdamW's moments are as their parameter.

    A parameter's state holds `step`, `exp_avg`, `exp_avg_sq` (both in the rotated basis) and, where they are used,
    `left`, `right` (U, V) and `left_cov`, `right_cov` (L, R).

    Raises ValueError for hyper-parameters out of range, and in `step` for a weight whose rotated sides were changed
    after its first step; NonFiniteGradient, a ValueError, for a rotated weight's gradient that is NaN, infinite, or so
    large that its squares are, which would stay in L, R and the bases for good: nothing has changed then, and the step
    may be left out.
    """

    stack_type: type[RotatedStack] = RotatedStack  # what takes the steps of equal-shaped weights

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        source: Source = "2nd",
        geometry: Geometry = "bilateral",
        freq: int = 10,
        *,
        rotate: bool = True,
        max_side: int = MAX_SIDE,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "source": source,
            "geometry": geometry, "freq": freq, "rotate": rotate, "max_side": max_side,
        }  # fmt: skip
        self._forget_stacks()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_stacks()

    def _forget_stacks(self) -> None:
        self._stacks: list[RotatedStack] = []
        self._signature: tuple[object, ...] = ()

    def add_param_group(self, param_group: Group) -> None:
        """As torch.optim.Optimizer; raises ValueError for a hyper-parameter out of range."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim.Optimizer, but each tensor keeps its dtype: fp32 bases of bf16 weights stay fp32."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                device = "cpu" if name == "step" else parameter.device
                self.state[parameter][name] = torch.as_tensor(value).detach().to(device).clone()
        self._forget_stacks()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rotated: list[tuple[Tensor, Group]] = []
        plains: list[tuple[list[Tensor], Group]] = []
        for group in self.param_groups:
            plain: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse or parameter.is_complex():
                    raise ValueError("BasisRotatedAdam takes neither sparse gradients nor complex parameters")
                if group["rotate"] and parameter.dim() >= 2 and parameter.numel():
                    rotated.append((parameter, group))
                else:
                    plain.append(parameter)
            plains.append((plain, group))
        stacks = self._stacked(rotated)
        for stack in stacks:
            stack.check()
        for plain, group in plains:
            if plain:
                self._step_plain(plain, group)
        for stack in stacks:
            stack.step()
        return loss

    def _step_plain(self, parameters: list[Tensor], group: Group) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            elif "left" in state or "right" in state:
                raise ValueError("rotate must stay as it is once a weight took its first step")
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=all(parameter.device.type == "cpu" for parameter in parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _stacked(self, chosen: list[tuple[Tensor, Group]]) -> list[RotatedStack]:
        """The stacks over `chosen`, kept from step to step, made anew when these or their state changed."""
        settings = [Setting.of(group) for _, group in chosen]
        signature = tuple((id(parameter), setting) for (parameter, _), setting in zip(chosen, settings, strict=True))
        if signature != self._signature or any(stack.stale() for stack in self._stacks):
            buckets: dict[object, list[tuple[Tensor, Group]]] = {}
            for (parameter, group), setting in zip(chosen, settings, strict=True):
                step = int(self.state[parameter].get("step", 0))
                key = (setting, parameter.shape, parameter.dtype, parameter.device, step)
                buckets.setdefault(key, []).append((parameter, group))
            self._stacks = [
                self.stack_type(members, self.state, Setting.of(members[0][1]))
                for bucket in buckets.values()
                for members in _chunks(bucket)
            ]
            self._signature = signature
        return self._stacks


def stage_frequencies(num_stages: int, freq: int) -> list[int]:
    """Steps between refreshes for each stage of a pipeline, first stage first, at the budget of `freq` everywhere.

    Refresh rates go with the delay, as tau_k + 1 = num_stages - k, none above 1 a step, and sum to num_stages /
    freq as nearly as whole numbers allow. How the paper's stage-aware budget is weighted is not known; tau + 1 is
    ours. Raises ValueError unless both arguments are at least 1.
    """
    if num_stages < 1 or freq < 1:
        raise ValueError(f"num_stages and freq must be at least 1, got {num_stages} and {freq}")
    frequencies: list[int] = []
    left = num_stages / freq  # the rate not yet given out
    for stage in range(num_stages):
        weight, weights = num_stages - stage, (num_stages - stage) * (num_stages - stage + 1) / 2
        wanted = left * weight / weights
        found = max(1, round(1 / wanted)) if wanted > 0 else freq * num_stages
        frequencies.append(max(found, frequencies[-1] if frequencies else 1))
        left = max(left - 1 / frequencies[-1], 0.0)
    return frequencies


def _chunks(members: list[tuple[Tensor, Group]]) -> list[list[tuple[Tensor, Group]]]:
    size = max(1, STACK_ELEMENTS // members[0][0].numel())
    return [members[start : start + size] for start in range(0, len(members), size)]


def _check(group: Group) -> None:
    ranges = {
        "lr": 0 <= group["lr"] < math.inf,
        "betas": all(0 <= beta < 1 for beta in group["betas"]),
        "eps": group["eps"] > 0,
        "weight_decay": 0 <= group["weight_decay"] < math.inf,
        "source": group["source"] in ("1st", "2nd"),
        "geometry": group["geometry"] in ("unilateral", "bilateral"),
        "freq": isinstance(group["freq"], int) and group["freq"] >= 1,
        "max_side": group["max_side"] >= 1,
    }
    allowed = {
        "lr": "finite and at least 0", "betas": "two numbers in [0, 1)", "eps": "above 0",
        "weight_decay": "finite and at least 0", "source": '"1st" or "2nd"',
        "geometry": '"unilateral" or "bilateral"', "freq": "a whole number of at least 1", "max_side": "at least 1",
    }  # fmt: skip
    for name, fine in ranges.items():
        if not fine:
            raise ValueError(f"{name} must be {allowed[name]}, got {group[name]!r}")
