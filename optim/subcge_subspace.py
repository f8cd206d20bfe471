"""The random subspace of one matrix in one period (SubCGE): directions u_p v_q^T, and sums of them by one product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from peerloom.optim.subcge_random import key_of, normal


class Subspace:
    """Directions Z(p, q) = u_p v_q^T for a matrix of `shape`, u and v columns of iid Gaussian factors of `rank`.

    The factors are a function of (seed, period): the same bits on every machine. The paper is silent on their
    distribution; N(0, 1) is taken, since then, with p, q uniform, E[<G, Z> Z] = G over the factors, and no scale is
    needed beside MeZO. (Orthonormal ones would need m n / r^2.) It is silent too on the order of the coordinate and the
    sign of the direction: p is of the rows, q of the columns, and the sign is plus. The mean over N messages of one
    period has about 1 + N / rank^2 times the variance that it has with full-rank Gaussian directions (ours; for ranks
    well below the sides), so that a rank^2 of several N loses little to MeZO. A tensor of 3 or more dimensions is taken
    as (shape[0], rest); for those of fewer than 2 see `SmallTensors`.

    `left` is (rank, rows), `right` (rank, columns), float32. Raises ValueError for a rank below 1, fewer than 2
    dimensions or an empty shape.
    """

    def __init__(
        self, shape: Sequence[int], rank: int, seed: int, period: int, device: torch.device | str = "cpu"
    ) -> None:
        if rank < 1 or len(shape) < 2 or math.prod(shape) < 1:
            raise ValueError(f"a subspace takes a rank of at least 1 and a matrix, not rank {rank}, shape {shape}")
        self.shape = tuple(shape)
        self.rank = rank
        self.period = period
        rows, columns = folded_shape(self.shape)
        self.left = normal(key_of("left", seed, period), rank * rows).view(rank, rows).to(device)
        self.right = normal(key_of("right", seed, period), rank * columns).view(rank, columns).to(device)

    def factors(self, coordinate: int) -> tuple[Tensor, Tensor]:
        """(u, v) of the coordinate p * rank + q: views of (rows,) and (columns,)."""
        p, q = divmod(coordinate, self.rank)
        return self.left[p], self.right[q]

    def direction(self, coordinate: int) -> Tensor:
        """Z, in the tensor's shape."""
        return torch.outer(*self.factors(coordinate)).view(self.shape)

    def combined(self, sums: Tensor, weight: float) -> Tensor:
        """(rank, columns): weight * sums V^T, for `add`; `sums` are (rank, rank) integers on the CPU."""
        return (sums.double() * weight).float().to(self.right.device) @ self.right

    def add(self, begin: Tensor, start: int, combined: Tensor, out: Tensor) -> Tensor:
        """begin + the sum of all directions that `combined` stands for, of rows from `start`; writes and returns `out`.

        `begin` and `out`, which may be one, are float32, (rows, columns) as in `folded_shape`.
        """
        return torch.addmm(begin, self.left[:, start : start + len(begin)].T, combined, out=out)


def folded_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) in which a tensor of 2 or more dimensions is handled."""
    return shape[0], math.prod(shape[1:])
