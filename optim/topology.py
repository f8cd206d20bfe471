"""Who mixes with whom: fixed graphs, random matchings, and the step sizes that keep a graph stable.

One convention holds throughout (GASLoC, arXiv 2606.11081): every undirected edge is counted once, and the mixing matrix
carries a half,

    Lambda = 1/2 * sum over edges (i, j) of lambda_ij (e_i - e_j)(e_i - e_j)^T,

so that a single edge of weight 1 with alpha = 1 averages its two ends exactly. `Graph.laplacian()` is this Lambda, and
`lambda_max` and `lambda_2` are its eigenvalues. `Graph.unit_laplacian()` is the textbook D - A, without the half: twice
Lambda. An alpha tuned for D - A is therefore doubled before it is used with Lambda.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Momentum = Literal["pre", "post"]


class Edge(NamedTuple):
    """An undirected edge with i < j and weight lambda > 0."""

    i: int
    j: int
    weight: float


@dataclass(frozen=True)
class Graph:
    """An undirected weighted graph on 0..n-1, each edge once with i < j, sorted; others raise ValueError."""

    n: int
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"a graph needs at least one node, got n={self.n}")
        edges = tuple(sorted(Edge(*edge) for edge in self.edges))
        for edge in edges:
            if not 0 <= edge.i < edge.j < self.n:
                raise ValueError(f"edge ({edge.i}, {edge.j}) needs 0 <= i < j < n={self.n}")
            if not (edge.weight > 0 and math.isfinite(edge.weight)):
                raise ValueError(f"edge ({edge.i}, {edge.j}) has weight {edge.weight}; it must be positive and finite")
        if len({edge[:2] for edge in edges}) != len(edges):
            raise ValueError("an edge is given twice; give each undirected edge once, with its whole weight")
        object.__setattr__(self, "edges", edges)

    @classmethod
    def from_pairs(cls, n: int, pairs: Iterable[tuple[int, int]], weight: float = 1.0) -> Graph:
        """The graph of these pairs, in either order and perhaps repeated, each with the same weight."""
        unique = {(min(i, j), max(i, j)) for i, j in pairs}
        return cls(n, tuple(Edge(i, j, weight) for i, j in unique))

    @classmethod
    def ring(cls, n: int) -> Graph:
        """A cycle of n nodes; one edge for n = 2, none for n = 1."""
        return cls.from_pairs(n, ((i, (i + 1) % n) for i in range(n) if n > 1))

    @classmethod
    def torus(cls, a: int, b: int) -> Graph:
        """An a x b grid closed both ways, node (row, column) at row * b + column; a side of 2 has no double edges."""
        if a < 1 or b < 1:
            raise ValueError(f"a torus needs sides of at least 1, got {a} x {b}")
        cells = [(row, column) for row in range(a) for column in range(b)]
        right = [(row * b + column, row * b + (column + 1) % b) for row, column in cells if b > 1]
        down = [(row * b + column, (row + 1) % a * b + column) for row, column in cells if a > 1]
        return cls.from_pairs(a * b, right + down)

    @classmethod
    def complete(cls, n: int) -> Graph:
        """Every pair of n nodes."""
        return cls.from_pairs(n, _all_pairs(n))

    @classmethod
    def random_regular(cls, n: int, d: int, seed: int) -> Graph:
        """A random graph with d neighbours each, connected for d >= 2; the same on every machine for equal arguments.

        Raises ValueError unless 1 <= d < n and n * d is even.
        """
        if not 1 <= d < n or n * d % 2:
            raise ValueError(f"a regular graph needs 1 <= d < n and n * d even, got n={n}, d={d}")
        return cls.from_pairs(n, _regular_pairs(n, d, seed))

    def degrees(self) -> list[int]:
        """The number of neighbours of each node."""
        counts = [0] * self.n
        for edge in self.edges:
            counts[edge.i] += 1
            counts[edge.j] += 1
        return counts

    def neighbors(self, i: int) -> list[tuple[int, float]]:
        """(j, lambda_ij) of node i, ascending in j."""
        pairs = [(e.j, e.weight) for e in self.edges if e.i == i] + [(e.i, e.weight) for e in self.edges if e.j == i]
        return sorted(pairs)

    def metropolis(self) -> Graph:
        """The same edges with Metropolis weights: I - Lambda is then the Metropolis-Hastings matrix (alpha = 1).

        lambda_ij = 2 / (1 + max(degree_i, degree_j)); the 2 undoes Lambda's half.
        """
        degree = self.degrees()
        return Graph(self.n, tuple(Edge(i, j, 2.0 / (1 + max(degree[i], degree[j]))) for i, j, _ in self.edges))

    def laplacian(self) -> Tensor:
        """Lambda with its half, (n, n) fp64."""
        return self.unit_laplacian() / 2

    def unit_laplacian(self) -> Tensor:
        """D - A, (n, n) fp64: twice `laplacian()`."""
        matrix = torch.zeros(self.n, self.n, dtype=torch.float64)
        for i, j, weight in self.edges:
            matrix[i, j] -= weight
            matrix[j, i] -= weight
            matrix[i, i] += weight
            matrix[j, j] += weight
        return matrix

    @property
    def lambda_max(self) -> float:
        """Largest eigenvalue of `laplacian()`."""
        return float(torch.linalg.eigvalsh(self.laplacian())[-1])

    @property
    def lambda_2(self) -> float:
        """Second smallest eigenvalue of `laplacian()`, 0 if the graph is not connected; ValueError for n = 1."""
        if self.n == 1:
            raise ValueError("lambda_2 is not defined for a graph of one node")
        return max(0.0, float(torch.linalg.eigvalsh(self.laplacian())[1]))


def random_matching(n: int, seed: int, round: int) -> list[tuple[int, int]]:
    """A uniform random perfect matching of 0..n-1: pairs with i < j, sorted; for odd n one index is left out.

    The algorithm is part of the contract, so that any implementation can agree on it without a random generator: order
    the indices by the SHA-256 digest of the ASCII string f"peerloom-matching-v1:{seed}:{round}:{i}", compared as bytes;
    pair the first with the second, the third with the fourth and so on; the last of an odd number idles. How the
    paper draws its matchings is not known. Raises ValueError for a negative n.
    """
    if n < 0:
        raise ValueError(f"a matching needs n >= 0, got {n}")
    order = sorted(range(n), key=lambda i: _digest(f"peerloom-matching-v1:{seed}:{round}:{i}"))
    return sorted((min(i, j), max(i, j)) for i, j in zip(order[0::2], order[1::2], strict=False))


def two_peer(n: int, seed: int, round: int) -> Graph:
    """The union of two independent random matchings, weight 1/2 each; an edge that is in both has weight 1.

    They are `random_matching` of rounds 2 * round and 2 * round + 1. With alpha = 1 a node keeps half of its own and
    takes a quarter from each of two peers. The paper's weights are not known; 1/2 is ours.
    """
    weights: dict[tuple[int, int], float] = {}
    for pair in random_matching(n, seed, 2 * round) + random_matching(n, seed, 2 * round + 1):
        weights[pair] = weights.get(pair, 0.0) + 0.5
    return Graph(n, tuple(Edge(i, j, weight) for (i, j), weight in weights.items()))


class Tuning(NamedTuple):
    """A step size, a momentum, and the factor by which they shrink the consensus error a round."""

    alpha: float
    gamma: float
    rate: float


def best_plain(l_max: float, l_min: float) -> Tuning:
    """The best alpha without momentum for nonzero Laplacian eigenvalues in [l_min, l_max]: rate (k - 1) / (k + 1)."""
    _check_spectrum(l_max, l_min)
    kappa = l_max / l_min
    return Tuning(2 / (l_max + l_min), 0.0, (kappa - 1) / (kappa + 1))


def best_heavy_ball(l_max: float, l_min: float) -> Tuning:
    """The best (alpha, gamma) of "pre" momentum for nonzero eigenvalues in [l_min, l_max]: rate sqrt(gamma)."""
    _check_spectrum(l_max, l_min)
    root = math.sqrt(l_max / l_min)
    rate = (root - 1) / (root + 1)
    return Tuning(4 / (math.sqrt(l_max) + math.sqrt(l_min)) ** 2, rate**2, rate)


def stable(alpha: float, gamma: float, l_max: float, momentum: Momentum = "pre") -> bool:
    """Whether disagreement dies out on a fixed graph with no drift, `l_max` being Lambda's largest eigenvalue.

    0 <= gamma < 1 and, for "pre", 0 < alpha l_max < 2 (1 + gamma); for "post",
    0 < alpha l_max < 2 (1 + gamma) / (1 + 2 gamma).
    Matchings redrawn every round are not covered: a sequence of them can diverge where each of them alone is stable.
    """
    if momentum not in ("pre", "post"):
        raise ValueError(f'momentum must be "pre" or "post", got {momentum!r}')
    bound = 2 * (1 + gamma) / (1 if momentum == "pre" else 1 + 2 * gamma)
    return 0 <= gamma < 1 and 0 < alpha * l_max < bound


def _check_spectrum(l_max: float, l_min: float) -> None:
    if not 0 < l_min <= l_max < math.inf:
        raise ValueError(f"eigenvalues need 0 < smallest <= largest, got smallest {l_min} and largest {l_max}")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("ascii")).digest()


def _all_pairs(n: int) -> set[tuple[int, int]]:
    return {(i, j) for i in range(n) for j in range(i + 1, n)}


def _regular_pairs(n: int, d: int, seed: int) -> set[tuple[int, int]]:
    if d == n - 1:
        return _all_pairs(n)
    sparse = d if d <= (n - 1) // 2 else n - 1 - d  # a dense graph is drawn as the complement of a sparse one
    attempt = 0
    while True:
        pairs = _draw_regular(n, sparse, f"peerloom-regular-v1:{seed}:{attempt}")
        if pairs is not None:
            chosen = pairs if sparse == d else _all_pairs(n) - pairs
            if d < 2 or _connected(n, chosen):
                return chosen
        attempt += 1


def _draw_regular(n: int, d: int, key: str) -> set[tuple[int, int]] | None:
    """Pairs free stubs at random, again and again, keeping the pairs that are allowed; None when it gets stuck."""
    pairs: set[tuple[int, int]] = set()
    stubs = [i for i in range(n) for _ in range(d)]
    sweep = 0
    while stubs:
        by_digest = sorted(range(len(stubs)), key=lambda k: _digest(f"{key}:{sweep}:{k}"))
        order = [stubs[k] for k in by_digest]
        left: list[int] = []
        for i, j in zip(order[0::2], order[1::2], strict=True):
            pair = (min(i, j), max(i, j))
            if i == j or pair in pairs:
                left += [i, j]
            else:
                pairs.add(pair)
        if len(left) == len(stubs) and not _any_allowed(left, pairs):
            return None
        stubs = sorted(left)
        sweep += 1
    return pairs


def _any_allowed(stubs: list[int], pairs: set[tuple[int, int]]) -> bool:
    free = sorted(set(stubs))
    return any((i, j) not in pairs for k, i in enumerate(free) for j in free[k + 1 :])


def _connected(n: int, pairs: set[tuple[int, int]]) -> bool:
    near: list[list[int]] = [[] for _ in range(n)]
    for i, j in pairs:
        near[i].append(j)
        near[j].append(i)
    seen, frontier = {0}, {0}
    while frontier:
        frontier = {j for i in frontier for j in near[i]} - seen
        seen |= frontier
    return len(seen) == n
