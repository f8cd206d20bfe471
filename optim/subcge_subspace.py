"""The random subspace of one tensor in one period (SubCGE): directions u_p v_q^T, and sums of them by one product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from peerloom.optim.subcge_random import key_of, normal


class Subspace:
    """Directions Z(p, q) = u_p v_q^T for a tensor of `shape`, u and v columns of iid Gaussian factors of `rank`.

    The factors are a function of (seed, period): the same bits on every machine. The paper is silent on their
    distribution; N(0, 1) is taken, since then, with p, q uniform, E[<G, Z> Z] = G over the factors, and no scale is
    needed beside MeZO. (Orthonormal ones would need m n / r^2.) It is silent too on the order of the coordinate and the
    sign of the direction: p is of the rows, q of the columns, and the sign is plus. A tensor of 3 or more dimensions is
    taken as (shape[0], rest). On tensors of 1 dimension the paper is silent: one of m elements takes the diagonal of
    the matrix direction, Z(p, q) = u_p * v_q element by element with u, v of m elements, so that its state is r x r
    integers like a matrix's, and its directions span all of it as far as m <= rank^2; E[Z Z^T] = 1 for it as for a
    Gaussian of its own.

    `left` is (rank, rows), `right` (rank, columns), float32. Raises ValueError for a rank below 1 or an empty shape.
    """

    def __init__(
        self, shape: Sequence[int], rank: int, seed: int, period: int, device: torch.device | str = "cpu"
    ) -> None:
        if rank < 1 or math.prod(shape) < 1:
            raise ValueError(f"a subspace takes a rank of at least 1 and elements, not rank {rank}, shape {shape}")
        self.shape = tuple(shape)
        self.rank = rank
        self.period = period
        self.diagonal = len(self.shape) < 2
        self.rows, columns = folded_shape(self.shape)
        width = self.rows if self.diagonal else columns
        self.left = normal(key_of("left", seed, period), rank * self.rows).view(rank, self.rows).to(device)
        self.right = normal(key_of("right", seed, period), rank * width).view(rank, width).to(device)

    def factors(self, coordinate: int) -> tuple[Tensor, Tensor]:
        """(u, v) of the coordinate p * rank + q: views of (rows,) and (columns,)."""
        p, q = divmod(coordinate, self.rank)
        return self.left[p], self.right[q]

    def direction(self, coordinate: int) -> Tensor:
        """Z, in the tensor's shape."""
        u, v = self.factors(coordinate)
        return (u * v if self.diagonal else torch.outer(u, v)).view(self.shape)

    def add(self, total: Tensor, start: int, sums: Tensor, weight: float) -> None:
        """total += weight * (sum over p, q of sums[p, q] Z(p, q)), rows from `start`.

        `total` is float32, (rows, columns) as in `folded_shape`; `sums` (rank, rank) of integers, on the CPU.
        """
        scaled = (sums.double() * weight).float().to(total.device)
        left = self.left[:, start : start + len(total)].T @ scaled
        if self.diagonal:
            total.add_((left * self.right[:, start : start + len(total)].T).sum(1, keepdim=True))
        else:
            total.addmm_(left, self.right)


def folded_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) in which a tensor is handled: a vector is a column."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])
