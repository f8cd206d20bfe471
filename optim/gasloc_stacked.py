"""GASLoC of all workers at once, written to be read: what `gasloc`'s one worker is tested against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Momentum = Literal["pre", "post"]


def gossip_round(
    theta: Tensor,
    previous: Tensor,
    laplacian: Tensor,
    drift: Tensor,
    *,
    eta: float,
    alpha: float,
    gamma: float,
    momentum: Momentum = "pre",
    lossy: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One round of all n workers, written to be read: (theta, previous) (n, d) of the next round, in theta's dtype.

    `laplacian` is Lambda (n, n) with its half. `lossy` is what the encoding does to a proposal on its way.
    """
    y = theta + eta * drift
    seen = y if lossy is None else lossy(y)
    rows = []
    for i, entries in enumerate(laplacian.tolist()):
        row = y[i]
        terms = [-entry * (seen[i] - seen[j]) for j, entry in enumerate(entries) if j != i and entry != 0]
        if terms:
            row = row - alpha * sum(terms[1:], start=terms[0])
        rows.append(row)
    mixed = torch.stack(rows)
    carried = y if momentum == "pre" else mixed
    return mixed + gamma * (carried - previous), carried


def simulate_gossip(
    theta0: Tensor,
    laplacians: Tensor | Sequence[Tensor],
    drifts: Tensor | Sequence[Tensor],
    *,
    eta: float,
    alpha: float,
    gamma: float,
    momentum: Momentum = "pre",
    lossy: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """GASLoC of n workers at once: theta (T + 1, n, d), from theta0 (n, d) and drifts (T, n, d), in theta0's dtype.

    `laplacians` is one Lambda (n, n) for all rounds or one a round. In fp32 it equals, bit for bit, n `GASLoC` objects
    that are given their neighbours in ascending order. Raises ValueError for shapes that do not fit together and for
    hyper-parameters out of range.
    """
    check_hyperparameters(eta=eta, alpha=alpha, gamma=gamma, momentum=momentum)
    rounds, n = len(drifts), len(theta0)
    if isinstance(laplacians, Tensor) and laplacians.dim() == 2:
        laplacians = [laplacians] * rounds
    if len(laplacians) != rounds:
        raise ValueError(f"{len(laplacians)} Laplacians for {rounds} rounds of drifts; give one, or one a round")
    theta = previous = theta0
    history = [theta0]
    for laplacian, drift in zip(laplacians, drifts, strict=True):
        if laplacian.shape != (n, n) or drift.shape != theta0.shape:
            raise ValueError(
                f"theta0 is {tuple(theta0.shape)}: a Laplacian must be {(n, n)}, not {tuple(laplacian.shape)},"
                f" and a drift of theta0's shape, not {tuple(drift.shape)}"
            )
        theta, previous = gossip_round(
            theta, previous, laplacian, drift, eta=eta, alpha=alpha, gamma=gamma, momentum=momentum, lossy=lossy
        )
        history.append(theta)
    return torch.stack(history)


def check_hyperparameters(*, eta: float, alpha: float, gamma: float, momentum: str) -> None:
    """Raises ValueError, naming the value and what is allowed."""
    for name, value in (("eta", eta), ("alpha", alpha)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be a finite number greater than 0, got {value}")
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must be at least 0 and less than 1, got {gamma}")
    if momentum not in ("pre", "post"):
        raise ValueError(f'momentum must be "pre" or "post", got {momentum!r}')
