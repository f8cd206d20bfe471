"""Which (alpha, gamma) a topology bears, and the ones to begin with.

Disagreement without drift is linear. With W = I - alpha Lambda a round is

    "pre":   theta' = W theta + gamma (theta - previous),            previous' = theta
    "post":  theta' = (1 + gamma) W theta - gamma previous,          previous' = W theta

(arXiv 2606.11081, both variants). A rate is the factor by which disagreement shrinks a round, in the long run: under 1
is stable. A fixed graph is decided by its eigenvalues, a repeated sequence by its period's spectral radius, and random
matchings and groups by the recursion of second moments, which closes, since all nodes are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from peerloom.optim.finite_time import period, sequence_graph
from peerloom.optim.topology import Graph, Momentum, Tuning

Kind = Literal["ring", "torus", "complete", "regular", "1peer", "2peer", "groups", "hypercube", "exponential", "base"]
FIXED = ("ring", "torus", "complete", "regular")
RANDOM = ("1peer", "2peer", "groups")
SEQUENCES = ("hypercube", "exponential", "base")

_LEAST_GAMMA = 0.3  # below it the averaged model loses more by less momentum than it gains in consensus
_ALPHAS = tuple(k / 50 for k in range(1, 126))  # times 1 / lambda_max
_GAMMAS = tuple(k / 20 for k in range(6, 19))


def alpha_bound(gamma: float, l_max: float, momentum: Momentum) -> float:
    """On a fixed graph disagreement dies out for 0 < alpha < this, given 0 <= gamma < 1."""
    return 2 * (1 + gamma) / (1 if momentum == "pre" else 1 + 2 * gamma) / l_max


def fixed_rate(eigenvalues: Tensor, alpha: float, gamma: float, momentum: Momentum) -> float:
    """The rate over the nonzero eigenvalues of Lambda."""
    c = 1 - alpha * eigenvalues.double()
    trace, determinant = (c + gamma, torch.full_like(c, gamma)) if momentum == "pre" else (c * (1 + gamma), c * gamma)
    root = (trace**2 - 4 * determinant).to(torch.complex128).sqrt()
    return float(torch.maximum(((trace + root) / 2).abs(), ((trace - root) / 2).abs()).max())


def sequence_rate(graphs: Sequence[Graph], alpha: float, gamma: float, momentum: Momentum) -> float:
    """The rate of graphs that follow each other again and again; 0 for one that averages exactly without momentum."""
    n = graphs[0].n
    if n == 1:
        return 0.0
    basis = torch.linalg.qr(torch.cat([torch.ones(n, 1), torch.eye(n)[:, 1:]], dim=1).double())[0][:, 1:]
    identity, product = torch.eye(n - 1, dtype=torch.float64), torch.eye(2 * n - 2, dtype=torch.float64)
    for graph in graphs:
        w = identity - alpha * (basis.T @ graph.laplacian() @ basis)
        if momentum == "pre":
            step = torch.cat([torch.cat([w + gamma * identity, -gamma * identity], 1), _left(identity)])
        else:
            step = torch.cat([torch.cat([(1 + gamma) * w, -gamma * identity], 1), _left(w)])
        product = step @ product
    radius = float(torch.linalg.eigvals(product).abs().max())
    return float(radius ** (1 / len(graphs)))


def random_rate(n: int, alpha: float, gamma: float, momentum: Momentum, *, peers: int = 1, group: int = 2) -> float:
    """The rate of the root mean square, exact, for `peers` independent random matchings of weight 1 / peers a round.

    With peers = 1, random groups of `group` that take their mean. Their Laplacian P projects, E[P] = c on disagreement,
    c = floor(n / group) (group - 1) / (n - 1); so W has E[W] = 1 - alpha c and
    E[W^2] = 1 - 2 alpha c + alpha^2 (c + (peers - 1) c^2) / peers, and the second moments of (theta, previous) follow a
    3 x 3 recursion whose spectral radius this is the root of.
    """
    if n < 2:
        return 0.0
    matrix = second_moments(n, alpha, gamma, momentum, peers=peers, group=group)
    return math.sqrt(float(torch.linalg.eigvals(matrix).abs().max()))


def second_moments(n: int, alpha: float, gamma: float, momentum: Momentum, *, peers: int = 1, group: int = 2) -> Tensor:
    """(3, 3) fp64: takes E of the disagreement's (theta theta, theta previous, previous previous) to the next round."""
    c = sum(size - 1 for size in _group_sizes(n, group)) / (n - 1)
    m1 = 1 - alpha * c
    m2 = 1 - 2 * alpha * c + alpha**2 * (c + (peers - 1) * c**2) / peers
    g = gamma
    if momentum == "pre":
        rows = [[m2 + 2 * g * m1 + g * g, -2 * g * (m1 + g), g * g], [m1 + g, -g, 0.0], [1.0, 0.0, 0.0]]
    else:
        rows = [[(1 + g) ** 2 * m2, -2 * g * (1 + g) * m1, g * g], [(1 + g) * m2, -g * m1, 0.0], [m2, 0.0, 0.0]]
    return torch.tensor(rows, dtype=torch.float64)


def rate(
    kind: Kind, n: int, alpha: float, gamma: float, momentum: Momentum, *, graph: Graph | None = None, group: int = 4
) -> float:
    """The rate of a topology on n nodes; `graph` replaces the one of `kind` where it is fixed ("regular" needs it)."""
    if n < 2:
        return 0.0
    if kind in FIXED:
        return fixed_rate(_spectrum(kind, n, graph), alpha, gamma, momentum)
    if kind in RANDOM:
        size = group if kind == "groups" else 2
        return random_rate(n, alpha, gamma, momentum, peers=2 if kind == "2peer" else 1, group=size)
    graphs = [sequence_graph(kind, n, t) for t in range(period(kind, n))]
    return sequence_rate(graphs, alpha, gamma, momentum)


def check_tuning(
    kind: Kind, n: int, alpha: float, gamma: float, momentum: Momentum, *, graph: Graph | None = None, group: int = 4
) -> None:
    """Raises ValueError, with the largest alpha that this gamma bears, where disagreement would not die out."""
    if not 0 <= gamma < 1 or not alpha > 0:
        raise ValueError(f"alpha must be over 0 and gamma in [0, 1), got alpha {alpha:g} and gamma {gamma:g}")
    if rate(kind, n, alpha, gamma, momentum, graph=graph, group=group) < 1:
        return
    if kind in FIXED:
        bound = alpha_bound(gamma, float(_spectrum(kind, n, graph).max()), momentum)
    else:
        bound = _largest_alpha(kind, n, gamma, momentum, group)
    advice = f"alpha must stay under {bound:.4g} there" if bound > 0 else "no alpha is stable there; lower gamma"
    raise ValueError(
        f'alpha {alpha:g} with gamma {gamma:g} and momentum "{momentum}" loses consensus on {kind} with {n} nodes:'
        f" {advice}"
    )


def default_tuning(
    kind: Kind, n: int, momentum: Momentum = "post", *, graph: Graph | None = None, group: int = 4
) -> tuple[float, float]:
    """(alpha, gamma) to begin with.

    Derived: on a fixed graph, the pair of a grid with gamma at least 0.3 at the best rate over the graph's own spectrum
    (for "pre" it comes near `best_heavy_ball` on sparse graphs). Matchings, sequences and groups are made for
    alpha = 1. Measured (`python -m tests.benchmarks.gasloc`, 16 workers): groups in fragments and two peers do best at
    0.3. One random peer hardly gains by momentum, which costs it consensus: with H = 16 it ends 0.5 % higher with 0.3
    than with none, in "pre" 0.2 % higher with 0.2; with H = 24, and with H = 1, some is best. Where that gamma is not
    stable, the largest multiple of 0.05 with a rate under 0.98.
    """
    if kind in FIXED and n > 1:
        return _best_fixed(_spectrum(kind, n, graph), momentum)[:2]
    most = 0.2 if kind == "1peer" and momentum == "pre" else _LEAST_GAMMA
    for steps in range(round(most * 20), 0, -1):
        if rate(kind, n, 1.0, steps / 20, momentum, group=group) < 0.98:
            return 1.0, steps / 20
    return 1.0, 0.0


def _best_fixed(eigenvalues: Tensor, momentum: Momentum) -> Tuning:
    l_max = float(eigenvalues.max())
    options = []
    for gamma in _GAMMAS:
        for scaled in _ALPHAS:
            alpha = scaled / l_max
            if alpha < alpha_bound(gamma, l_max, momentum):
                options.append(Tuning(alpha, gamma, fixed_rate(eigenvalues, alpha, gamma, momentum)))
    nearest = 2 / (l_max + float(eigenvalues.min()))  # "pre" has the rate sqrt(gamma) over a whole range of alpha
    return min(options, key=lambda option: (round(option.rate, 6), option.gamma, abs(option.alpha - nearest)))


def _largest_alpha(kind: Kind, n: int, gamma: float, momentum: Momentum, group: int) -> float:
    """By bisection, alpha up to 4; 0 where even a small one is not stable."""
    low, high = 1e-3, 4.0
    if rate(kind, n, low, gamma, momentum, group=group) >= 1:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(kind, n, middle, gamma, momentum, group=group) < 1 else (low, middle)
    return low


def _spectrum(kind: Kind, n: int, graph: Graph | None) -> Tensor:
    """The eigenvalues of Lambda but for the smallest, which is 0; ValueError where the graph is not connected."""
    if graph is None:
        if kind == "regular":
            raise ValueError("a random regular graph has no closed form; give the graph")
        graph = {"ring": Graph.ring, "complete": Graph.complete, "torus": near_square_torus}[kind](n)
    eigenvalues: Tensor = torch.linalg.eigvalsh(graph.laplacian())[1:]
    if eigenvalues[0] < 1e-9:
        raise ValueError(f"the {kind} graph on {n} nodes is not connected: its parts would never agree")
    return eigenvalues


def near_square_torus(n: int) -> Graph:
    """The torus a x b = n with a <= b as close as can be; a ring where n is prime."""
    a = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    return Graph.torus(a, n // a)


def _group_sizes(n: int, group: int) -> list[int]:
    sizes = []
    while n:
        while group > n:
            group //= 2
        sizes.append(group)
        n -= group
    return sizes


def _left(block: Tensor) -> Tensor:
    return torch.cat([block, torch.zeros_like(block)], 1)
