"""Tensors of at most one dimension: for each message an iid Gaussian of their own, in fixed point, and exact sums.

Numbers are those of `subcge_random.normals`, whole multiples of 2^-8. One times a scalar is an integer, and integers
below 2^53 are exact in float64: a product sums them, in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peerloom.optim.subcge_random import NORMAL_BITS, hashes, intervals, key_of, mix, normals

_CHUNK = 1 << 15  # hashes at a time: the temporaries stay in the cache
_ROWS = 1 << 11  # messages in one product, at most: with scalars of 31 bits its sums stay below 2^53


class SmallTensors:
    """The small tensors of a model, by their keys and numbers of elements, one after the other in a flat tensor."""

    def __init__(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.numel = sum(sizes)
        parts, kept, at = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)], 0
        for key, size in zip(keys, sizes, strict=True):
            groups = -(-size // 4)
            parts.append(hashes(key_of("small", key), 0, groups))
            kept.append(torch.arange(at, at + size))
            at += 4 * groups
        self._keys, self._kept = torch.cat(parts), torch.cat(kept)  # a key for four elements of a tensor

    def normals(self, seed: int) -> Tensor:
        """(numel,) float32: the direction of a message in all of them."""
        bits = mix(self._keys ^ seed).unsqueeze(0)
        return self._elements(_numbers(bits)[0]).float().mul_(2.0**-NORMAL_BITS)

    def sum_of(self, seeds: Tensor, scalars: Tensor) -> Tensor:
        """(numel,) int64: the sum of scalar * direction over messages, in units of the scalars' times 2^-8.

        `scalars` are int64, of at most 31 bits.
        """
        total = torch.zeros(4 * len(self._keys), dtype=torch.int64)
        weights = scalars.double()
        for start in range(0, len(self._keys), _CHUNK):
            keys = self._keys[start : start + _CHUNK]
            rows = max(1, min(_ROWS, _CHUNK // len(keys)))
            part = total[4 * start : 4 * (start + len(keys))]
            for first in range(0, len(seeds), rows):
                bits = mix(seeds[first : first + rows].unsqueeze(1) ^ keys)
                part.add_((weights[first : first + rows] @ _numbers(bits)).long())
        return self._elements(total)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of a flat tensor, one a small tensor."""
        return torch.split(flat, self.sizes)

    def _elements(self, padded: Tensor) -> Tensor:
        """Without what pads each tensor to groups of four."""
        return padded if len(padded) == self.numel else padded[self._kept]


def _numbers(bits: Tensor) -> Tensor:
    """(messages, 4 groups) float64 of (messages, groups) int64 hashes; of each hash the low bits first."""
    places = intervals(bits)
    return normals().index_select(0, places.flatten()).view(places.shape)
