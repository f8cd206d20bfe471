"""A few numbers from which the distance between two parameter vectors can be told: a seeded random projection.

Row r of the vector, seen as (rows, count), is turned by a random shift and given random signs; the rows are then added
(a count sketch, Charikar, Chen and Farach-Colton 2002, whose buckets are the columns). For vectors x, E |Px|^2 = |x|^2,
and as far as x is spread over many rows the standard deviation of |Px|^2 / |x|^2 is at most about sqrt(2 / count): the
distance itself is right within 13 % (one deviation) for 32 numbers, 9 % for 64. All integers come from a hash of the
position, so that all machines use one matrix; it is never built.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

COUNT = 32
_ROWS = 1 << 12  # handled at a time


def project(theta: Tensor, seed: int, count: int = COUNT, share: tuple[int, int] = (0, 1)) -> Tensor:
    """The projection of flat theta, (count,) fp64 on the CPU; linear in theta but for rounding.

    Of `share` (k, n) it is the k-th of n parts, which add up to the whole. Raises ValueError unless count is a power of
    2 up to 64.
    """
    if theta.dim() != 1 or not theta.is_floating_point():
        raise ValueError(f"theta must be flat floating point, not {theta.dtype} of shape {tuple(theta.shape)}")
    if count not in (1, 2, 4, 8, 16, 32, 64):
        raise ValueError(f"a projection has a power of 2 of numbers, at most 64, got {count}")
    total = torch.zeros(count, dtype=torch.float64)
    columns = torch.arange(count, dtype=torch.int32, device=theta.device)
    with torch.no_grad():
        for index, start in [*enumerate(range(0, theta.numel(), _ROWS * count))][share[0] :: share[1]]:
            piece = theta[start : start + _ROWS * count].detach().float()
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % count)).view(-1, count)
            bits = _hash(piece.numel(), f"peerloom-projection-v1:{seed}:{index}", theta.device).view(-1, count)
            signed = piece * (1 - 2 * (bits & 1)).float()
            turned = columns + ((bits[:, :1] >> 8) & 63)
            total += signed.gather(1, (turned % count).long()).sum(0, dtype=torch.float64).cpu()
    return total


def distance(a: Tensor, b: Tensor) -> float:
    """An estimate of the distance of the vectors that a and b are projections of, by the same seed and count."""
    return float(torch.linalg.vector_norm(a.double() - b.double()))


def consensus_distance(projections: Tensor) -> float:
    """An estimate of sqrt(mean_i |theta_i - mean theta|^2), from (n, count) projections."""
    centred = projections.double() - projections.double().mean(0)
    return math.sqrt(float(centred.square().sum()) / len(projections))


def _hash(count: int, key: str, device: torch.device) -> Tensor:
    """(count,) int32, well mixed, from SHA-256 of the key and the position."""
    digest = hashlib.sha256(key.encode("ascii")).digest()
    first, second = (int.from_bytes(digest[k : k + 4], "little", signed=True) for k in (0, 4))
    x = torch.arange(count, dtype=torch.int32, device=device).mul_(-1640531527).bitwise_xor_(first)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x2C1B3C6D).add_(second)
    x.bitwise_xor_((x >> 12).bitwise_and_(0xFFFFF)).mul_(0x297A2D39)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
