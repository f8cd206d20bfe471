"""Small groups that take their exact mean by pairwise exchanges: who is in a group, and who sends which part when.

A group of g = 2^m members halves m times (each keeps the sum over one half of what it had, and sends the other half),
then doubles m times (the finished parts travel back). A member sends 2 (1 - 1/g) copies in all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Phase = Literal["reduce", "share"]
Groups = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Swap:
    """One member's part in one step: send [send_start, send_stop) of the flat vector to `peer`, receive the other one.

    In "reduce" what is received is added to the member's own, in "share" it replaces it. `peer` is a place in the
    group.
    """

    phase: Phase
    peer: int
    send_start: int
    send_stop: int
    receive_start: int
    receive_stop: int


def schedule(size: int, member: int, numel: int) -> list[Swap]:
    """The 2 log2(size) steps of the member at place `member`, in order; both ends of a step list it at the same index.

    Halving at distance size/2, size/4, ..., 1, doubling back at 1, 2, ..., size/2. Raises ValueError unless size is a
    power of 2 and 0 <= member < size.
    """
    _check_size(size)
    if not 0 <= member < size:
        raise ValueError(f"member is {member}; a group of {size} has places 0 to {size - 1}")
    start, stop = 0, numel
    swaps: list[Swap] = []
    distance = size // 2
    while distance:
        middle = start + (stop - start) // 2
        low, high = (start, middle), (middle, stop)
        keep, give = (high, low) if member & distance else (low, high)
        swaps.append(Swap("reduce", member ^ distance, *give, *keep))
        start, stop = keep
        distance //= 2
    shares = [Swap("share", s.peer, s.receive_start, s.receive_stop, s.send_start, s.send_stop) for s in swaps]
    return swaps + shares[::-1]


def group_mean(stacked: Tensor) -> Tensor:
    """What the schedule computes on the members' vectors (g, d), executed step by step: (g, d), all rows equal.

    Every element is summed by one member as a balanced tree: pairs g/2 apart first, then g/4, and so on; addition is
    commutative and the division by a power of 2 exact, so that all members hold the same bits.
    """
    size, numel = stacked.shape
    rows = stacked.clone()
    plans = [schedule(size, member, numel) for member in range(size)]
    for step in range(len(plans[0])):
        before = rows.clone()
        for member, plan in enumerate(plans):
            swap = plan[step]
            part = slice(swap.receive_start, swap.receive_stop)
            received = before[swap.peer, part]
            rows[member, part] = rows[member, part] + received if swap.phase == "reduce" else received
        if step == len(plans[0]) // 2 - 1:
            rows = rows / size
    return rows


def copies_sent(size: int) -> float:
    """Model copies that each member sends for one mean: 2 (1 - 1/size)."""
    _check_size(size)
    return 2 * (1 - 1 / size)


def hypercube_groups(n: int, size: int, round: int) -> Groups:
    """Groups along log2(size) dimensions of a hypercube of n nodes, the dimensions moving on every round.

    Round t takes dimensions t m, ..., t m + m - 1 modulo log2(n), m = log2(size): ceil(log2 n / m) rounds in a row
    average all n exactly. Raises ValueError unless both are powers of 2 and size <= n.
    """
    _check_size(size)
    if n < 1 or n & (n - 1) or size > n:
        raise ValueError(f"hypercube groups need a power of 2 of nodes, at least the group's {size}, got {n}")
    dimensions, m = n.bit_length() - 1, size.bit_length() - 1
    bits = [1 << (round * m + k) % dimensions for k in range(m)] if dimensions else []
    mask = sum(bits)
    corners = [sum(bit for k, bit in enumerate(sorted(bits)) if place >> k & 1) for place in range(size)]
    return [tuple(base | corner for corner in corners) for base in range(n) if not base & mask]


def random_groups(n: int, size: int, seed: int, round: int) -> Groups:
    """Random groups of 0..n-1, the same on every machine; who is left over forms smaller powers of 2, perhaps of one.

    The nodes in order of the SHA-256 digest of f"peerloom-groups-v1:{seed}:{round}:{i}" are cut into groups of `size`.
    The order within a group is that of its indices.
    """
    _check_size(size)
    if n < 0:
        raise ValueError(f"groups need n >= 0, got {n}")
    order = sorted(range(n), key=lambda i: hashlib.sha256(f"peerloom-groups-v1:{seed}:{round}:{i}".encode()).digest())
    groups: Groups = []
    start = 0
    while start < n:
        while size > n - start:
            size //= 2
        groups.append(tuple(sorted(order[start : start + size])))
        start += size
    return sorted(groups)


def mixing_matrix(n: int, groups: Groups) -> Tensor:
    """The (n, n) fp64 matrix that replaces each node by the mean of its group; a node in no group keeps its own."""
    matrix = torch.eye(n, dtype=torch.float64)
    for group in groups:
        for i in group:
            matrix[i, i] = 0.0
        for i in group:
            for j in group:
                matrix[i, j] = 1 / len(group)
    return matrix


def _check_size(size: int) -> None:
    if size < 1 or size & (size - 1):
        raise ValueError(f"a group's size must be a power of 2, got {size}")
