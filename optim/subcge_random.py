"""Random numbers that are the same bits on every machine: a hash of a 64-bit key and a counter, and nothing stateful.

Integers: the output function of SplitMix64 (Steele, Lea and Flood 2014) over key + counter * odd constant, in int64
whose products wrap. Normals: of a hash's 64 bits, 48 are counted (a binomial) and the two low bytes are added in units
of 1/256, which smooths it to a piecewise linear density. That integer is below 2^24, hence exact in float32; one
multiplication by a constant, which IEEE 754 rounds the same everywhere, makes its variance 1. No logarithm, no cosine,
no table: those differ in the last bit from one library or device to another. Mean 0 and variance 1 are exact, the
distribution symmetric, excess kurtosis -0.04, the furthest value 7.2.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_CHUNK = 1 << 15  # elements hashed at a time: the temporaries stay in the cache
_CENTRE = 24 * 256 + 255
_SCALE = 1 / math.sqrt(12 * 2**16 + 2 * (2**16 - 1) / 12)
_PAIRS, _FOURS, _EIGHTS, _ONES = 0x555555555555, 0x333333333333, 0x0F0F0F0F0F0F, 0x010101010101


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
    """(count,) float32 on the CPU, iid with mean 0 and variance 1; element i depends on `key` and i alone."""
    out = torch.empty(count, dtype=torch.float32)
    for start in range(0, count, _CHUNK):
        piece = out[start : start + _CHUNK]
        piece.copy_(_binomial(hashes(key, start, len(piece)))).mul_(_SCALE)
    return out


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


def _binomial(bits: Tensor) -> Tensor:
    """256 times (set bits among the upper 48, plus two uniforms of a byte each), minus its mean."""
    low = (bits & 255).add_((bits >> 8) & 255)
    x = (bits >> 16) & 0xFFFFFFFFFFFF
    x -= (x >> 1) & _PAIRS
    x = (x & _FOURS).add_((x >> 2) & _FOURS)
    x = x.add_(x >> 4).bitwise_and_(_EIGHTS)
    x = (x.mul_(_ONES) >> 40).bitwise_and_(255)
    return x.mul_(256).add_(low).sub_(_CENTRE)
