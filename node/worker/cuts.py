"""Where a model of layers in a row is cut into stages that take about as long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def cut(costs: Sequence[Sequence[float]]) -> list[range]:
    """The layers of each stage, at least one: the costliest stage is as cheap as it can be.

    `costs` are those of each layer, a row for each stage that may have it. Raises ValueError when there are fewer
    layers than stages.
    """
    stages, layers = len(costs), len(costs[0])
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    totals = [list(accumulate(row, initial=0.0)) for row in costs]
    worst: list[list[float]] = [totals[0]]  # by stages used - 1 and layers covered
    begins: list[list[int]] = [[0] * (layers + 1)]
    for used in range(1, stages):
        row, begin, total = [float("inf")] * (layers + 1), [0] * (layers + 1), totals[used]
        for end in range(used + 1, layers + 1):
            options = ((max(worst[used - 1][at], total[end] - total[at]), at) for at in range(used, end))
            row[end], begin[end] = min(options)
        worst.append(row)
        begins.append(begin)
    cuts, end = [], layers
    for used in reversed(range(stages)):
        begin_at = begins[used][end]
        cuts.append(range(begin_at, end))
        end = begin_at
    return cuts[::-1]
