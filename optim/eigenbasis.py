"""Eigenbases of a weight's gradient, two axes of choice: arXiv 2602.03515, Algorithm 2.

source    "2nd": eigenvectors of L = E[G G^T] and R = E[G^T G];  "1st": of M M^T and M^T M, M the first moment
geometry  "bilateral": U (m, m) and V (n, n);  "unilateral": the smaller side's alone (left if m < n, else right)

All tensors carry leading batch dimensions. The first basis is exact, in order of descending eigenvalues; each later one
comes from a power step of the last, whose columns are sorted first, and the second moment with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Source = Literal["1st", "2nd"]
Geometry = Literal["unilateral", "bilateral"]


class NonFiniteGradient(ValueError):
    """A gradient, or what was gathered of gradients, is NaN, infinite, or too large to be squared."""


class Rotation(NamedTuple):
    """Orthogonal U (..., m, m) and V (..., n, n); None is the identity."""

    left: Tensor | None
    right: Tensor | None

    def into(self, x: Tensor) -> Tensor:
        """U^T x V."""
        x = x if self.left is None else self.left.mT @ x
        return x if self.right is None else x @ self.right

    def back(self, x: Tensor) -> Tensor:
        """U x V^T."""
        x = x if self.left is None else self.left @ x
        return x if self.right is None else x @ self.right.mT


def rotated_sides(m: int, n: int, geometry: Geometry, max_side: int) -> tuple[bool, bool]:
    """Whether U and V are more than the identity for a weight (m, n): not on a side over `max_side`, nor for a vector.

    A vector's covariance grows by one rank a step, so that directions new to the basis would meet a second moment of
    about zero, and the weight a step thousands of times too long.
    """
    if min(m, n) == 1:
        return False, False
    fits = (m <= max_side, n <= max_side)
    if geometry == "bilateral":
        return fits
    return (fits[0], False) if m < n else (False, fits[1])


def no_basis(shape: Sequence[int]) -> NonFiniteGradient:
    """What is raised where a matrix of that shape is not finite."""
    return NonFiniteGradient(
        f"no eigenbasis of {tuple(shape)}: the gradient holds NaN or infinity; skip the step or lower the rate"
    )


def first_from_covariance(left: Tensor | None, right: Tensor | None) -> Rotation:
    """The eigenvectors of L and R, the largest eigenvalue's first.

    Raises NonFiniteGradient where these are not finite.
    """
    return Rotation(*(None if side is None else _robust(_descending, side)[0] for side in (left, right)))


def next_from_covariance(
    last: Rotation, left: Tensor | None, right: Tensor | None, second: Tensor
) -> tuple[Rotation, Tensor]:
    """One power step on each side, and the second moment (..., m, n) permuted on the sides that were sorted.

    Raises NonFiniteGradient where L or R is not finite.
    """
    bases: list[Tensor | None] = []
    for basis, covariance, dim in ((last.left, left, -2), (last.right, right, -1)):
        if basis is None or covariance is None:
            bases.append(None)
            continue
        image = covariance @ basis
        order = (basis * image).sum(-2).argsort(dim=-1, descending=True, stable=True)
        bases.append(_orthogonal(_permute(image, order, -1)))  # K (Q sorted) is (K Q) sorted
        second = _permute(second, order, dim)
    return Rotation(*bases), second


def first_from_moment(moment: Tensor, sides: tuple[bool, bool]) -> Rotation:
    """The singular vectors of M (..., m, n) on the sides asked for; raises NonFiniteGradient as above.

    Both together are in full; one alone must be the shorter side's, as `rotated_sides` has it.
    """
    left, right = _robust(_singular if all(sides) else _singular_short, moment)
    return Rotation(left if sides[0] else None, right if sides[1] else None)


def next_from_moment(last: Rotation, moment: Tensor, second: Tensor) -> tuple[Rotation, Tensor]:
    """One power step of M M^T or M^T M; with both sides, through M itself: U from M V, then V from M^T U.

    Of a longer side M says a part alone, the range of M or M^T. There the paper's QR leaves the rest to chance, to be
    drawn anew each time under second moments that stay; here the rest is the last basis's own, its weakest columns made
    orthogonal to the range, so that each keeps the second moment it gathered. Raises NonFiniteGradient as above.
    """
    left, right = last
    if left is not None:
        order = (moment.mT @ left).square().sum(-2).argsort(dim=-1, descending=True, stable=True)
        left, second = _permute(left, order, -1), _permute(second, order, -2)
    if right is not None:
        order = (moment @ right).square().sum(-2).argsort(dim=-1, descending=True, stable=True)
        right, second = _permute(right, order, -1), _permute(second, order, -1)
    if left is not None and right is not None:
        left = _orthogonal(_filled(moment @ right, left))
        right = _orthogonal(_filled(moment.mT @ left, right))
    elif left is not None:
        left = _orthogonal(moment @ (moment.mT @ left))
    elif right is not None:
        right = _orthogonal(moment.mT @ (moment @ right))
    return Rotation(left, right), second


def _filled(image: Tensor, last: Tensor) -> Tensor:
    """(..., m, n) -> (..., m, max(m, n)): with `last`'s columns from n on behind its own."""
    return torch.cat([image, last[..., image.shape[-1] :]], dim=-1)


def _orthogonal(matrix: Tensor) -> Tensor:
    """(..., m, n) with n >= m -> (..., m, m): the Q of its QR."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    if not bool(basis.sum().isfinite()):  # of numbers up to 1, which says it of all in a fraction of the time
        raise no_basis(matrix.shape)
    return basis


def _permute(x: Tensor, order: Tensor, dim: int) -> Tensor:
    index = order.unsqueeze(-2 if dim == -1 else -1).expand_as(x)
    return x.gather(dim, index)


def _descending(covariance: Tensor) -> tuple[Tensor, ...]:
    return (torch.linalg.eigh(covariance).eigenvectors.flip(-1),)


def _singular(moment: Tensor) -> tuple[Tensor, ...]:
    left, _, right = torch.linalg.svd(moment, full_matrices=True)
    return left, right.mT


def _singular_short(moment: Tensor) -> tuple[Tensor, ...]:
    left, _, right = torch.linalg.svd(moment, full_matrices=False)
    return left, right.mT


def _robust(decompose: Callable[[Tensor], tuple[Tensor, ...]], matrix: Tensor) -> tuple[Tensor, ...]:
    """`decompose` in the matrix's own precision, in fp64 where that does not converge."""
    for trial in (matrix, matrix.double()):
        try:
            found = decompose(trial)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but not in __all__
            continue
        if all(bool(part.sum().isfinite()) for part in found):
            return tuple(part.to(matrix.dtype).contiguous() for part in found)
    raise no_basis(matrix.shape)
