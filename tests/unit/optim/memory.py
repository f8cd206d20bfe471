"""Tensors in memory that two processes could share, as the worker's are; torch's own way leaves a helper process."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def shared(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros in an anonymous shared mapping."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)
