"""The dtypes of one unit, at rest, in its computation and on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from peerloom.optim.matrix_fsdp.modules import UnitModules


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """What parameters are at rest, in the forward pass, and gradients on the way; `sum` is for adding those up."""

    rest: torch.dtype
    forward: torch.dtype
    reduce: torch.dtype

    @property
    def sum(self) -> torch.dtype:
        """At least fp32: sums in 16 bits would lose what small gradients have to say, the more the more ranks."""
        return torch.promote_types(torch.promote_types(self.rest, self.reduce), torch.float32)


def dtypes_of(unit: UnitModules, mp: MixedPrecisionPolicy) -> Dtypes:
    """Those of a unit before it is sharded."""
    rest = unit.found[0].parameter.dtype if unit.found else torch.float32
    forward = mp.param_dtype or rest
    return Dtypes(rest=rest, forward=forward, reduce=mp.reduce_dtype or forward)
