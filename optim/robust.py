"""How far one peer may move a node: the mixing term is cut at a multiple of the usual distance between peers."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 18


class MedianClip:
    """Scales a neighbour's weight so that it counts as no farther away than `radius` times the running median distance.

    With lambda = alpha = 1 a lone neighbour moves a node by half its distance, so that any neighbour at all moves it by
    at most radius / 2 times the median. The median is of the last `window` distances, each cut alike before it is
    kept: fewer than half of them being lies, it stays between honest ones. The two ends of an edge may scale
    differently: the mean then moves, by as little as the cut leaves. Raises ValueError for radius < 1, window < 1 and
    distances that are not finite.

    Where drifts grow by the round, as in a warm-up of few steps a round, the median alone would cut all partners, who
    then drift apart and are cut the more. So what is `expected` of two drifts as long as the node's own, sqrt(2) times
    its length, is always within the usual.
    """

    LEAST = 5

    def __init__(self, radius: float, window: int = 32, distances: Iterable[float] = ()) -> None:
        if not (radius >= 1 and math.isfinite(radius)) or window < 1:
            raise ValueError(f"a clip needs a finite radius and a window of at least 1, got {radius} and {window}")
        self.radius = radius
        self._distances: deque[float] = deque((_checked(d) for d in distances), maxlen=window)

    def median(self) -> float | None:
        """The running median; None while nothing is known."""
        return statistics.median(self._distances) if self._distances else None

    def update(self, distance: float, expected: float = 0.0) -> float:
        """The scale in (0, 1] for a neighbour this far away, and the distance into the median.

        Usual is the median or `expected`, whichever is more; the first neighbour of all counts whole. Until `LEAST`
        distances are known the nearest stands for the median, so that a liar met twice among the first does not become
        what is usual.
        """
        distance, expected = _checked(distance), _checked(expected)
        median = self.median()
        if len(self._distances) < self.LEAST:
            median = min((each for each in self._distances if each), default=None)
        limit = self.radius * max(median, expected) if median else math.inf
        self._distances.append(min(distance, limit))
        return 1.0 if distance <= limit else limit / distance

    def state(self) -> list[float]:
        """The distances kept, at most `window`: `MedianClip(radius, window, state)` goes on from them."""
        return list(self._distances)


def distance(y: Tensor, other: Tensor) -> float:
    """Euclidean distance of two flat tensors, summed in fp64 piece by piece; NaN or infinite where one of them is."""
    if y.shape != other.shape or y.dim() != 1:
        raise ValueError(f"two flat tensors of one length are needed, not {tuple(y.shape)} and {tuple(other.shape)}")
    total = 0.0
    for start in range(0, y.numel(), _CHUNK):
        difference = y[start : start + _CHUNK] - other[start : start + _CHUNK]
        total += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
    return math.sqrt(total)


def _checked(distance: float) -> float:
    if not (distance >= 0 and math.isfinite(distance)):
        raise ValueError(f"a distance between parameters is {distance}; it must be finite and at least 0")
    return distance
