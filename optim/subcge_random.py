"""Random numbers that are the same bits on every machine: a hash of a 64-bit key and a counter, and nothing stateful.

Integers: the output function of SplitMix64 (Steele, Lea and Flood 2014) over key + counter * odd constant, in int64
whose products wrap. Normals: a hash of 64 bits gives four. Sixteen bits choose one of 65,536 equally likely intervals
of N(0, 1); the number is that interval's median, rounded to a multiple of 2^-8: mean 0, variance 0.99998, excess
kurtosis -0.0008, the furthest value 4.32. Medians lie 10^-5 and more from where their rounding would tip, so whatever a
machine's logarithm has in its last bits, all machines have one table, and its numbers are exact in float32.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_INTERVALS = 1 << 16
_CHUNK = 1 << 13  # hashes at a time: the temporaries stay in the cache
NORMAL_BITS = 8  # normals are whole multiples of 2^-8
NORMAL_LIMIT = 1107  # the largest, in these


def key_of(*parts: int | str) -> int:
    """A 64-bit key, as int64, from SHA-256 of the parts."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in ("peerloom-subcge-1", *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def mix(x: Tensor) -> Tensor:
    """A new int64 tensor of well mixed bits; a bijection of 64-bit integers."""
    x = x ^ ((x >> 30) & 0x3FFFFFFFF)
    x.mul_(_FIRST)
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x.mul_(_SECOND)
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


def hashes(key: int, start: int, count: int) -> Tensor:
    """(count,) int64: the hashes of `key` and the counters from `start`."""
    return mix(torch.arange(start + 1, start + 1 + count, dtype=torch.int64).mul_(_GOLDEN).add_(key))


def normal(key: int, count: int) -> Tensor:
    """(count,) float32 on the CPU, iid N(0, 1) but for rounding; element i depends on `key` and i alone."""
    out = torch.empty(count, dtype=torch.float32)
    groups = -(-count // 4)
    for start in range(0, groups, _CHUNK):
        piece = out[4 * start : 4 * (start + _CHUNK)]
        bits = hashes(key, start, -(-len(piece) // 4))
        torch.index_select(_standard(), 0, intervals(bits)[: len(piece)], out=piece)
    return out


def intervals(bits: Tensor) -> Tensor:
    """(..., 4 n) int32 of hashes (..., n): four 16-bit fields of each, the low bits first, as places in `normals`."""
    fields = bits.view(torch.int16)
    if sys.byteorder == "big":
        fields = fields.view(*fields.shape[:-1], -1, 4).flip(-1).flatten(-2)
    return fields.to(torch.int32).bitwise_and_(_INTERVALS - 1)


@cache
def normals() -> Tensor:
    """(65536,) float64: the interval's median in units of 2^-8, by the 16 bits; the upper half mirrors the lower."""
    standard = NormalDist()
    above = [(_INTERVALS + 2 * index + 1) / (2 * _INTERVALS) for index in range(_INTERVALS // 2)]
    half = [round(standard.inv_cdf(share) * 2**NORMAL_BITS) for share in above]
    return torch.tensor(half + [-value for value in reversed(half)], dtype=torch.float64, device="cpu")


def message_seeds(run_seed: int, origins: Tensor, sequences: Tensor) -> Tensor:
    """The seeds of messages, int64: a hash of run seed, origin and sequence.

    SeedFlood's paper sends a seed or is silent on what it is made of; derived, it need not travel.
    """
    return mix(mix(origins ^ key_of("message", run_seed)).add_(sequences * _GOLDEN))


def coordinates(seeds: Tensor, keys: Tensor, rank: int) -> Tensor:
    """(messages, tensors) int64: p * rank + q, each uniform below `rank`, of every message in every tensor.

    SeedFlood's paper is silent on how coordinates are drawn: here with replacement, one a message and tensor, and of
    each tensor independently, for the same in all would be another estimator.
    """
    bits = mix(seeds.unsqueeze(1) ^ keys)
    p = ((bits & 0xFFFFFFFF) * rank) >> 32
    q = (((bits >> 32) & 0xFFFFFFFF) * rank) >> 32
    return p.mul_(rank).add_(q)


@cache
def _standard() -> Tensor:
    """(65536,) float32: `normals` in units of 1."""
    return normals().float().mul_(2.0**-NORMAL_BITS)
