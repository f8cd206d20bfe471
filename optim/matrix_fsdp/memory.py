"""What a rank needs at once for its share of a model, in bytes, before anything of it is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from peerloom.optim.matrix_fsdp.layout import lay_out
from peerloom.optim.matrix_fsdp.modules import UnitModules
from peerloom.optim.matrix_fsdp.planner import OwnerPlan, UnitPlan
from peerloom.optim.matrix_fsdp.runtime import REDUCTIONS_KEPT
from peerloom.optim.matrix_fsdp.unit import Dtypes


def needed(
    plan: OwnerPlan, units: Sequence[UnitModules], dtypes: Sequence[Dtypes], rank: int, reshard_after_forward: bool
) -> int:
    """Of a backward pass, where it is most: what rests, the rest of the model open, and the block that takes most.

    While a block computes it is open, and the one before it, too, or without `reshard_after_forward` all before it; its
    gradients are there, and those of the blocks after it that are not at their owners yet. At rest are values and,
    where they are trained, gradients and two moments. Left out are activations, which the model and its batch decide,
    and the gradients that `no_sync` keeps.
    """
    at_rest, full, reducing, largest = 0, [], [], 0
    for unit, modules, dtype in zip(plan.units, units, dtypes, strict=True):
        trained = {found.name for found in modules.found if found.parameter.requires_grad}
        at_rest += dtype.rest.itemsize * (unit.owned_numel(rank) + 3 * lay_out(unit, trained).owned_numel[rank])
        alone = plan.world_size == 1 and dtype.forward == dtype.rest  # what rests is the full buffer
        full.append(0 if alone else unit.numel * dtype.forward.itemsize)
        reducing.append(_reducing(unit, trained, dtype, rank))
        if dtype.reduce != dtype.forward:  # as autograd hands it over, beside what travels
            gradients = [found.parameter.numel() for found in modules.found if found.name in trained]
            largest = max(largest, dtype.forward.itemsize * max(gradients, default=0))
        packed = [parcel.numel for parcel in lay_out(unit, trained).parcels() if len(parcel.pieces) > 1]
        largest = max(largest, dtype.reduce.itemsize * max(packed, default=0))  # a copy beside what it is made of
    at_once = 2 if reshard_after_forward else REDUCTIONS_KEPT + 1
    blocks = []
    for block in range(1, len(full)):
        first = max(1, block - 1) if reshard_after_forward else 1
        blocks.append(sum(full[first : block + 1]) + sum(reducing[block : block + at_once]))
    return at_rest + full[0] + reducing[0] + max(blocks, default=0) + largest


def _reducing(unit: UnitPlan, trained: set[str], dtype: Dtypes, rank: int) -> int:
    """All gradients of a unit, what the other ranks send of what is owned here, and its sum."""
    layout = lay_out(unit, trained)
    others, mine = unit.world_size - 1, layout.owned_numel[rank]
    sums = mine * dtype.sum.itemsize if dtype.sum != dtype.reduce else 0  # else it takes the place of one that came
    return dtype.reduce.itemsize * (layout.numel + others * mine) + sums
