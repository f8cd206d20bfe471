"""What a rank needs at once for its share of a model, in bytes, before anything of it is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

from peerloom.optim.matrix_fsdp.board import BoardLayout
from peerloom.optim.matrix_fsdp.dtypes import Dtypes
from peerloom.optim.matrix_fsdp.layout import UnitLayout
from peerloom.optim.matrix_fsdp.runtime import REDUCTIONS_KEPT

_Layouts: TypeAlias = Sequence[tuple[UnitLayout, UnitLayout]]


def needed(
    layouts: _Layouts, dtypes: Sequence[Dtypes], rank: int, reshard_after_forward: bool, board: BoardLayout | None
) -> int:
    """Of a backward pass, where it is most; `layouts` are of each unit's parameters and gradients.

    At rest are values and, where they are trained, gradients and two moments. Left out are activations, which the model
    and its batch decide, and the gradients that `no_sync` keeps.
    """
    at_rest, largest = 0, 0
    for (layout, gradients), dtype in zip(layouts, dtypes, strict=True):
        at_rest += dtype.rest.itemsize * (layout.owned_numel[rank] + 3 * gradients.owned_numel[rank])
        sizes = Counter[str]()  # of whole parameters
        for piece, _ in chain.from_iterable(gradients.owned):
            sizes[piece.name] += piece.numel
        if dtype.reduce != dtype.forward:  # as autograd hands it over, beside what travels
            largest = max(largest, dtype.forward.itemsize * max(sizes.values(), default=0))
        packed = [parcel.numel for parcel in gradients.parcels() if len(parcel.pieces) > 1]
        largest = max(largest, dtype.reduce.itemsize * max(packed, default=0))  # a copy beside what it is made of
    if board is not None:
        return at_rest + largest + _looked_at(layouts, dtypes, rank, board)
    return at_rest + largest + _sent(layouts, dtypes, rank, reshard_after_forward)


def _looked_at(layouts: _Layouts, dtypes: Sequence[Dtypes], rank: int, board: BoardLayout) -> int:
    """On the board and beside it: a copy in another dtype, the slots, gradients that are not added up yet.

    Those are all of the rest's, of the block that takes most, and the own ones of the block after it.
    """
    copies, whole, mine = 0, [], []
    for (layout, gradients), dtype in zip(layouts, dtypes, strict=True):
        copies += layout.owned_numel[rank] * dtype.forward.itemsize if dtype.rest != dtype.forward else 0
        whole.append(gradients.numel * dtype.reduce.itemsize)
        sums = dtype.sum.itemsize if dtype.sum != dtype.rest else 0  # else it is what rests as .grad
        mine.append(gradients.owned_numel[rank] * (dtype.reduce.itemsize + sums))
    blocks = [this + after for this, after in zip(whole[1:], [*mine[2:], 0], strict=True)] if len(whole) > 1 else []
    return copies + sum(board.slot_bytes[rank]) + whole[0] + max(blocks, default=0)


def _sent(layouts: _Layouts, dtypes: Sequence[Dtypes], rank: int, reshard_after_forward: bool) -> int:
    """The rest of the model open, and the block that takes most, with what is under way.

    While a block computes it is open, and the one before it, too, or without `reshard_after_forward` all before it; its
    gradients are there, and those of the blocks after it that are not at their owners yet.
    """
    full, reducing = [], []
    for (layout, gradients), dtype in zip(layouts, dtypes, strict=True):
        alone = len(layout.owned_numel) == 1 and dtype.forward == dtype.rest  # what rests is the full buffer
        full.append(0 if alone else layout.numel * dtype.forward.itemsize)
        reducing.append(_reducing(gradients, dtype, rank))
    at_once = 2 if reshard_after_forward else REDUCTIONS_KEPT + 1
    blocks = []
    for block in range(1, len(full)):
        first = max(1, block - 1) if reshard_after_forward else 1
        blocks.append(sum(full[first : block + 1]) + sum(reducing[block : block + at_once]))
    return full[0] + reducing[0] + max(blocks, default=0)


def _reducing(gradients: UnitLayout, dtype: Dtypes, rank: int) -> int:
    """All gradients of a unit, what the other ranks send of what is owned here, and its sum."""
    others, mine = len(gradients.owned_numel) - 1, gradients.owned_numel[rank]
    sums = mine * dtype.sum.itemsize if dtype.sum != dtype.reduce else 0  # else it takes the place of one that came
    return dtype.reduce.itemsize * (gradients.numel + others * mine) + sums
