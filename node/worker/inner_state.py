"""What an optimizer keeps of a parameter: a checkpoint's tensors are held against it, for they may be a peer's.

A fused kernel reads and writes as many numbers as its parameter has, whatever the state's tensors hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from peerloom.optim.basis_rotation import MAX_SIDE
from peerloom.optim.eigenbasis import rotated_sides
from peerloom.protocol.runspec import TrainSpec

STEP = "step"
MAX_STEP = 2**24  # a step counted in float32 goes no further


def state_shapes(shape: torch.Size, *, hidden: bool, train: TrainSpec) -> dict[str, torch.Size]:
    """By name, what is kept of a parameter once it took a step; `hidden` matrices are the run's optimizer's own."""
    optimizer = train.optimizer if hidden else "adamw"
    if optimizer == "muon":
        return {"momentum_buffer": shape}
    found = {STEP: torch.Size(()), "exp_avg": shape, "exp_avg_sq": shape}
    if optimizer == "adamw":
        return found
    m, n = shape
    if optimizer == "soap":
        sides = tuple(1 < side <= MAX_SIDE for side in shape)
    else:
        sides = rotated_sides(m, n, train.rotation_geometry, MAX_SIDE)
    covariances = optimizer == "soap" or train.rotation_source == "2nd"
    for name, used, size in (("left", sides[0], m), ("right", sides[1], n)):
        if used:
            square = torch.Size((size, size))
            found |= {name: square, f"{name}_cov": square} if covariances else {name: square}
    return found


def check_state(name: str, state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
    """Raises ValueError unless `state` is nothing, or all that `shapes` names and no more, in numbers that can be."""
    if not state:
        return
    if set(state) != set(shapes):
        raise ValueError(f"the state of {name} has {sorted(state)}, not {sorted(shapes)}")
    for what, value in state.items():
        if value.shape != shapes[what]:
            raise ValueError(f"{what} of {name} has shape {tuple(value.shape)}, not {tuple(shapes[what])}")
        if value.dtype != (torch.float32 if what == STEP else dtype):
            raise ValueError(f"{what} of {name} is of {value.dtype}")
    step, second = state.get(STEP), state.get("exp_avg_sq")
    if step is not None and not (0 <= float(step) <= MAX_STEP and float(step).is_integer()):
        raise ValueError(f"{name} took {float(step)} steps")
    if second is not None and not bool((second >= 0).all()):
        raise ValueError(f"exp_avg_sq of {name} has what is no square")
