"""What a whole training step costs with BasisRotatedAdam over AdamW, forward and backward included, in turn."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.optim.basis_rotation import BasisRotatedAdam
from tests.benchmarks.rows import Row, median


def cost_rows(*, quick: bool) -> list[Row]:
    return []
