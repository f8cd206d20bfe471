"""Delayed gradients in one process: what an asynchronous 1F1B pipeline computes, exactly, in its steady state.

Stage k of P runs tau_k = P - 1 - k updates late: the gradient of step t is taken at its weights W_{t - tau_k} and
updates the newest, W_t. Before W_{-1} lies W_0: the first microbatches of every stage see the initial weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def pipeline_delays(num_stages: int) -> list[int]:
    """tau_k of each stage, the first stage's first; raises ValueError for fewer than one stage."""
    if num_stages < 1:
        raise ValueError(f"a pipeline has at least one stage, got {num_stages}")
    return [num_stages - 1 - stage for stage in range(num_stages)]


class DelayedWeights:
    """Keeps tau_k + 1 versions of each stage's parameters, which hold the newest between calls.

    A step is `backward(loss_fn)`, the optimizer's own step, and `commit()`. With `stash`, forward and backward both see
    the old weights; without it, the backward pass sees the newest, and its gradient is of no function at all, as in a
    pipeline that keeps no copies. Parameters are changed in place, memory and identity kept.

    Raises ValueError when there is not one delay of at least 0 for each stage.
    """

    def __init__(self, stages: Sequence[Iterable[Tensor]], delays: Sequence[int], *, stash: bool = True) -> None:
        if len(stages) != len(delays) or any(delay < 0 for delay in delays):
            raise ValueError(f"{len(stages)} stages need as many delays of at least 0, got {list(delays)}")
        self._stages = [[parameter.detach() for parameter in stage] for stage in stages]
        self._versions: list[deque[list[Tensor]]] = [
            deque([_copy(stage)], maxlen=delay + 1) for stage, delay in zip(self._stages, delays, strict=True)
        ]
        self._stash = stash

    def backward(self, loss_fn: Callable[[], Tensor]) -> Tensor:
        """Runs `loss_fn` at the delayed weights, adds its gradients to `.grad`, and gives the loss, detached."""
        self._install(0)
        try:
            loss = loss_fn()
            if not self._stash:
                self._install(-1)
            torch.autograd.backward(loss)
        finally:
            self._install(-1)
        return loss.detach()

    def commit(self) -> None:
        """Takes the parameters as they stand for the newest version; the oldest goes."""
        for stage, versions in zip(self._stages, self._versions, strict=True):
            if versions.maxlen == 1:
                continue  # it is never old
            if len(versions) < (versions.maxlen or 1):
                versions.append(_copy(stage))
            else:
                versions.rotate(-1)
                _write(versions[-1], stage)

    def _install(self, version: int) -> None:
        for stage, versions in zip(self._stages, self._versions, strict=True):
            if len(versions) > 1:
                _write(stage, versions[version])


def _copy(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _write(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.data.copy_(source)  # past autograd's version counter: a backward pass without stash reads the new values
