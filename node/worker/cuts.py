"""Where a model of layers in a row is cut into stages of about equal cost."""

from __future__ import annotations

from peerloom.protocol.spec_pipeline import PipelineSpec

EMBEDDING_SHARE = 1 / 3  # of its parameters: they take memory and an update, but no multiplication


def layer_costs(layers: int, layer: float, embedding: float, head: float) -> list[float]:
    """The cost of each layer, embedding and head being paid by the first and the last."""
    costs = [layer] * layers
    costs[0] += EMBEDDING_SHARE * embedding
    costs[-1] += head
    return costs


def cut(costs: list[float], stages: int) -> list[range]:
    """The layers of each stage, at least one: the costliest stage is as cheap as it can be.

    Raises ValueError when there are fewer layers than stages.
    """
    if len(costs) < stages:
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    worst: list[list[float]] = [[total[end] for end in range(len(total))]]  # by stages used - 1 and layers covered
    begins: list[list[int]] = [[0] * len(total)]
    for used in range(1, stages):
        row, begin = [float("inf")] * len(total), [0] * len(total)
        for end in range(used + 1, len(total)):
            options = ((max(worst[used - 1][at], total[end] - total[at]), at) for at in range(used, end))
            row[end], begin[end] = min(options)
        worst.append(row)
        begins.append(begin)
    cuts, end = [], len(costs)
    for used in reversed(range(stages)):
        begin_at = begins[used][end]
        cuts.append(range(begin_at, end))
        end = begin_at
    return cuts[::-1]


def stage_layers(
    spec: PipelineSpec, *, layers: int, hidden: int, layer_parameters: int, vocabulary: int, length: int
) -> list[range]:
    """The layers of each stage of a Llama: multiplications a token, attention over `length` tokens included."""
    layer = layer_parameters + length * hidden
    return cut(layer_costs(layers, layer, vocabulary * hidden, vocabulary * hidden), spec.stages)
