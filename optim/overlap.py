"""Overlap: the exchange of a round runs under the next local steps, and what it changes is added when it is over.

The local steps go on from the proposal itself, and end at the latest before the next one:

    y_t      = theta_t + eta (params - theta_t),  params = y_t           sent; local steps go on from it
    theta_t+1 as `gasloc` says                                           once the exchange is over, then
    params   = theta_t+1 + (params - y_t)                                keeps the steps taken meanwhile

No mixing term is ever left out of a proposal or applied to another y than the one sent, so that without drift every
mode is the blocking one, z^2 - (1 - alpha l + gamma) z + gamma = 0. What is late is the point at which the gradients of
the steps in between are taken. Where local steps take a disagreement c of the way back (0 <= c <= 1), and the exchange
lasts through all of them, "pre" has the modes

    z^2 - (1 - alpha l + gamma - eta c) z + gamma = 0,        stable for alpha l + eta c < 2 (1 + gamma)

where blocking has (1 - eta c) times the last two coefficients of c = 0. "post" has, by the same reckoning,

    z^2 - ((1 + gamma)(1 - alpha l) - eta c) z + gamma (1 - alpha l) = 0,
                                                    stable for alpha l (1 + 2 gamma) + eta c < 2 (1 + gamma).

A form that adds the mixing term after the next proposal, a whole round late, has the modes z^3 - z^2 +
(alpha l - gamma) z + gamma = 0 without drift: at alpha l = 1, gamma = 0.3 a root of modulus 1.03, so it loses consensus
where this one, with moduli of 0.55, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from peerloom.optim.gasloc import GASLoC, check_hyperparameters, gossip_round


class OverlappedGASLoC(GASLoC):
    """A GASLoC whose proposal lives in `y`, flat fp32 as `params`, so that `params` may train on until `mix`.

    `proposal()` copies `params` to `y` and `y` back; `mix` and the like move `params` by what they move `y`. `y` is
    constant from one to the other. The call order is the base's, with local steps allowed at the exchange.
    """

    def __init__(self, params: Tensor, y: Tensor, **arguments: Any) -> None:
        if params.shape != y.shape or not (params.dtype == y.dtype == torch.float32):
            raise ValueError(f"y must be flat float32 like params, not {y.dtype} of shape {tuple(y.shape)}")
        y.copy_(params)
        super().__init__(y, **arguments)
        self._live = params.detach()

    def proposal(self) -> Tensor:
        """Ends the round's local steps; the next round's may begin at once."""
        self._expect("in local steps", "proposal")
        self._y.copy_(self._live)
        y = super().proposal()
        self._live.copy_(y)
        return y

    def _end_round(self, mix: Callable[[slice], None]) -> None:
        self._live.sub_(self._y)
        super()._end_round(mix)
        self._live.add_(self._y)

    def _restore(self, theta: Tensor, previous: Tensor) -> None:
        super()._restore(theta, previous)
        self._live.copy_(self.theta)


def simulate_overlap(
    theta0: Tensor,
    laplacians: Sequence[Tensor],
    step: Callable[[Tensor], Tensor],
    *,
    local_steps: int,
    late: int,
    **outer: Any,
) -> Tensor:
    """Overlapped GASLoC of n workers at once: theta (T + 1, n, d); `step` maps params (n, d) to those after a step.

    Each exchange is over after `late` of the next local steps, 0 <= late <= local_steps; 0 is the blocking form.
    `outer` is eta, alpha, gamma and momentum. Written to be read; in fp32 it equals n `OverlappedGASLoC` bit for bit.
    """
    if not 0 <= late <= local_steps:
        raise ValueError(f"late is from 0 to local_steps = {local_steps}, not {late}")
    check_hyperparameters(**{"momentum": "pre", **outer})
    theta = previous = params = theta0
    following = (theta0, theta0)
    sent: Tensor | None = None  # the y under way
    history = [theta0]
    for laplacian in [*laplacians, None]:
        for done in range(local_steps + 1):
            if sent is not None and done == late:
                theta, previous = following
                params, sent = theta + (params - sent), None
                history.append(theta)
            if done < local_steps:
                params = step(params)
        if laplacian is not None:
            following = gossip_round(theta, previous, laplacian, params - theta, **outer)
            sent = params = theta + outer["eta"] * (params - theta)
    return torch.stack(history)
