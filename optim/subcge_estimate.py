"""The two-point estimate of the loss's slope in a seed's direction (SPSA, Spall 1992; MeZO, arXiv 2305.17333)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

LossFn = Callable[[], Tensor | float]


class NotFinite(ArithmeticError):
    """The loss at theta + eps z or theta - eps z is no finite number."""


class Perturbed(Protocol):
    """What moves a model along a seed's direction, from wherever it stood, and back."""

    def perturb(self, seed: int, sign: int) -> None: ...

    def restore(self) -> None: ...


def two_point(
    model: nn.Module,
    mover: Perturbed,
    loss_fn: LossFn,
    seed: int,
    eps: float,
    bound: int,
    bits: int,
    share: float = 1.0,
) -> int:
    """(loss(theta + eps z) - loss(theta - eps z)) / 2 eps, in units of 2^-bits, clipped to the bound, times share.

    Both papers are silent on bounds: clipping is this project's, so that a sum of scalars cannot overflow.
    Raises NotFinite.
    """
    losses = []
    with torch.no_grad(), evaluating(model):
        try:
            for sign in (1, -1):
                mover.perturb(seed, sign)
                losses.append(float(loss_fn()))
        finally:
            mover.restore()
    plus, minus = losses
    if not (math.isfinite(plus) and math.isfinite(minus)):
        raise NotFinite(f"the loss is {plus} and {minus} at theta +- eps z; lower eps or the learning rate")
    return fixed((plus - minus) / (2 * eps), bound, bits, share)


def fixed(slope: float, bound: int, bits: int, share: float = 1.0) -> int:
    """A slope as it travels: clipped, then times the share of the learning rate, at most 1; in units of 2^-bits."""
    scalar: int = round(share * max(-bound, min(bound, slope * 2**bits)))
    return scalar


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside: no dropout, and no running statistics that both passes would move."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
