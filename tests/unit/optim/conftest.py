"""What the optim tests share: one torch thread, and fp64 random data from a seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Draw = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def small_tensors(one_thread: None) -> None:
    """Threads would only compete with the other tests."""


@pytest.fixture
def draw() -> Draw:
    """draw(*shape, dtype=fp64): standard normal numbers, the same in every run."""
    generator = torch.Generator().manual_seed(20260609)

    def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return normal
