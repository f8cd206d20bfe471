"""What a layer, embedding and head cost a stage in an update: from the spec alone, so that all nodes cut alike.

The unit is a multiplication of a token's forward pass, which training makes three of. Figures per number are those of
one core, where they are small against the matrix products of any width over a hundred.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from peerloom.node.worker.cuts import cut
from peerloom.optim import soap
from peerloom.optim.basis_rotation import MAX_SIDE, stage_frequencies
from peerloom.optim.eigenbasis import rotated_sides
from peerloom.protocol.runspec import RunSpec, TrainSpec

TRAINING = 4  # multiplications of an optimizer in the time of a forward pass's one, backward pass and the rest included
LOSS = 40  # of a logit and its gradient
UPDATE = 20  # of a weight: clipping, its moments, and the copy that a version is
GATHERED = 7  # of an embedding's weight a microbatch: its gradient is as large as it is
QR = 2.5  # of a square matrix, over its product with another
NEWTON_SCHULZ = 5  # steps of Muon's


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a Llama: `matrices` are the shapes of those of one layer, `layer` the number of all its weights."""

    layers: int
    matrices: tuple[tuple[int, int], ...]
    layer: int
    hidden: int
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> Sizes:
        """Of a transformers model, which may be on the meta device."""
        layers, weights = model.model.layers, list(model.model.layers[0].parameters())
        return cls(
            layers=len(layers),
            matrices=tuple((weight.shape[0], weight.shape[1]) for weight in weights if weight.dim() == 2),
            layer=sum(weight.numel() for weight in weights),
            hidden=model.config.hidden_size,
            vocabulary=model.config.vocab_size,
        )


def stage_layers(spec: RunSpec, sizes: Sizes) -> list[range]:
    """The layers of each stage, so that none takes longer than it must."""
    return cut([layer_costs(spec, sizes, stage) for stage in range(spec.pipeline.stages)])


def layer_costs(spec: RunSpec, sizes: Sizes, stage: int) -> list[float]:
    """Of each layer, were it that stage's; the first pays for the embedding, the last for head and loss."""
    tokens, outer = spec.train.batch_size * spec.data.sequence_length, sizes.vocabulary * sizes.hidden
    train = stage_train(spec, stage)
    stepping = sum(optimizer_products(rows, columns, train) for rows, columns in sizes.matrices) / TRAINING
    attention = spec.data.sequence_length * sizes.hidden
    costs = [tokens * (sizes.layer + attention) + UPDATE * sizes.layer + stepping] * sizes.layers
    costs[0] += (UPDATE + GATHERED * spec.pipeline.microbatches) * outer
    costs[-1] += tokens * sizes.vocabulary * (sizes.hidden + LOSS) + UPDATE * outer
    return costs


def optimizer_products(rows: int, columns: int, train: TrainSpec) -> float:
    """Multiplications of a step of a hidden matrix, a refresh of its bases shared out over the steps between two."""
    if train.optimizer == "muon":
        short, long = sorted((rows, columns))
        return NEWTON_SCHULZ * (2 * short**2 * long + short**3)
    if train.optimizer == "soap":  # covariance, gradient and moment rotated, the step turned back
        sides = tuple(1 < size <= soap.MAX_SIDE for size in (rows, columns))
        return _rotations(rows, columns, sides, 4, 1 + QR, 0, train.rotation_freq)
    if train.optimizer == "basis_rotated":
        sides = rotated_sides(rows, columns, train.rotation_geometry, MAX_SIDE)
        if train.rotation_source == "2nd":
            return _rotations(rows, columns, sides, 3, 1 + QR, 2, train.rotation_freq)
        return _rotations(rows, columns, sides, 2, QR, 4, train.rotation_freq)
    return 0.0


def _rotations(
    rows: int, columns: int, sides: tuple[bool, ...], each: int, cubes: float, turned: int, freq: int
) -> float:
    """`each` products of a basis with the matrix a step; `cubes` of a basis and `turned` with the matrix a refresh."""
    pairs = ((rows, columns), (columns, rows))
    used = [pair for pair, rotated in zip(pairs, sides, strict=True) if rotated]
    return sum(size**2 * (each * other + (cubes * size + turned * other) / freq) for size, other in used)


def stage_train(spec: RunSpec, stage: int) -> TrainSpec:
    """The inner optimizer of a stage: of the refreshes of rotated bases, the more delayed stages get more."""
    if spec.pipeline.lag(0) == 0:
        return spec.train
    freq = stage_frequencies(spec.pipeline.stages, spec.train.rotation_freq)[stage]
    return replace(spec.train, rotation_freq=freq)
