"""Flat fp32 numbers as int8 in blocks of 128 that share a scale, rounded up or down at random so that the mean is kept.

Bytes: one little-endian fp32 scale a block (the last one may be short), then one int8 a number. A number is its int8
times its block's scale, one fp32 multiplication, so that both ends of a link decode the same bits. The scale is the
block's largest magnitude / 127; a block under 1.3e-36 everywhere becomes zeros.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
_CHUNK = 1 << 16  # numbers handled at a time, a multiple of BLOCK: the scratch memory stays in the cache
_TINY = 1e-38  # a smaller scale has no fp32 inverse to rely on


class Dither(NamedTuple):
    """What the random rounding is drawn from: no two payloads of a run should share one."""

    seed: int
    round: int
    sender: str


def encoded_bytes(numel: int) -> int:
    """The length of `numel` encoded numbers."""
    return numel + 4 * -(-numel // BLOCK)


def numel_of(length: int) -> int:
    """How many numbers an encoding of this length holds; ValueError where none has it."""
    numel = length - 4 * -(-length // (BLOCK + 4))
    if numel < 0 or encoded_bytes(numel) != length:
        raise ValueError(f"{length} bytes are not a whole int8 encoding: a block takes 4 bytes more than its numbers")
    return numel


def split(raw: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """(scales fp32, numbers int8) in the memory of the encoding `raw`."""
    head = 4 * -(-numel // BLOCK)
    return raw[:head].view(torch.float32), raw[head:].view(torch.int8)


def write(y: Tensor, scales: Tensor, numbers: Tensor, dither: Dither) -> None:
    """Encodes y into both parts; raises ValueError where y is not finite.

    A number x = y / scale becomes floor(x + u), u uniform on 2^16 values in (0, 1): the mean is off by at most 2^-16 of
    a step. u is a 32-bit integer hash of the position within a chunk, keyed by SHA-256 of the dither and the chunk.
    """
    for index, start in enumerate(range(0, y.numel(), _CHUNK)):
        piece = y[start : start + _CHUNK]
        blocks = _rows(piece)
        scale = scales[start // BLOCK : start // BLOCK + len(blocks)]
        torch.div(blocks.abs().amax(1), 127, out=scale)
        if not bool(scale.isfinite().all()):
            raise ValueError("the parameters hold NaN or infinite numbers; int8 has no place for them")
        scale.masked_fill_(scale < _TINY, 0)
        inverse = scale.reciprocal().masked_fill_(scale == 0, 0)
        scaled = (blocks * inverse[:, None]).view(-1)
        scaled.add_(_uniform(scaled.numel(), dither, index, y.device)).floor_().clamp_(-127, 127)
        numbers[start : start + _CHUNK].copy_(scaled[: piece.numel()])


def read(scales: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Decodes both parts into `out`, fp32."""
    whole = numbers.numel() // BLOCK * BLOCK
    torch.mul(numbers[:whole].view(-1, BLOCK), scales[: whole // BLOCK, None], out=out[:whole].view(-1, BLOCK))
    if whole < numbers.numel():
        torch.mul(numbers[whole:], scales[-1], out=out[whole:])


def count_non_finite(scales: Tensor, numbers: Tensor) -> int:
    """How many numbers decode to NaN or infinity: those of blocks whose scale times 128 is not finite."""
    bad = (scales * 128).isfinite().logical_not()
    total = int(bad.sum()) * BLOCK
    short = numbers.numel() % BLOCK
    return total - (BLOCK - short if short and bool(bad[-1]) else 0)


def _rows(piece: Tensor) -> Tensor:
    """(blocks, BLOCK), the last one filled up with zeros."""
    short = -piece.numel() % BLOCK
    return (torch.nn.functional.pad(piece, (0, short)) if short else piece).view(-1, BLOCK)


def _uniform(count: int, dither: Dither, index: int, device: torch.device) -> Tensor:
    """(count,) fp32 in (0, 1): (k + 1/2) / 2^16, k the middle bits of the hash."""
    key = hashlib.sha256(f"peerloom-dither-v1:{dither.seed}:{dither.round}:{dither.sender}:{index}".encode()).digest()
    first, second = (int.from_bytes(key[k : k + 4], "little", signed=True) for k in (0, 4))
    x = _positions(device)[:count] ^ first
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x2C1B3C6D).add_(second)
    x.bitwise_xor_((x >> 12).bitwise_and_(0xFFFFF)).mul_(0x297A2D39)
    return (x >> 15).bitwise_and_(0xFFFF).float().add_(0.5).mul_(2**-16)


@cache
def _positions(device: torch.device) -> Tensor:
    """(_CHUNK,) int32 Weyl sequence: the counter, spread over all bits."""
    return (torch.arange(_CHUNK, dtype=torch.int64) * 0x9E3779B1 % 2**32 - 2**31).to(torch.int32).to(device)
