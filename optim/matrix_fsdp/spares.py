"""Memory for gradients on the way, used again from unit to unit of a backward pass."""

from __future__ import annotations

import torch
from torch import Tensor


class Spares:
    """Flat tensors that nobody points at any more.

    What malloc gives back to the system and gets again costs a page fault a page: with 67 MB of parameters half of all
    of a step on the CPU.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor, its content undefined."""
        for at, spare in enumerate(self._free):
            if (spare.numel(), spare.dtype, spare.device) == (numel, dtype, device):
                return self._free.pop(at)
        if self._free:  # of another size: no more is kept than was in use at once
            self._free.pop(0)
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensor: Tensor) -> None:
        """What `take` has given."""
        self._free.append(tensor)

    def clear(self) -> None:
        self._free.clear()
