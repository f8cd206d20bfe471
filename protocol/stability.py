"""From which mixing rate a topology loses consensus, whatever the size of its swarm.

Disagreement without drift is linear. With W = I - alpha Lambda a round is, for the two variants of arXiv 2606.11081,

    "pre":   theta' = W theta + gamma (theta - previous),            previous' = theta
    "post":  theta' = (1 + gamma) W theta - gamma previous,          previous' = W theta

A fixed graph is decided by Lambda's largest eigenvalue, random matchings and groups by their second moments, and a
sequence by what is left of a disagreement after many periods.

Overlap. Where an exchange lasts through the next local steps, these begin at theta, not at W theta, and may take a
disagreement back by a share c of it, times eta: theta' is then less by `pull` theta, 0 <= pull <= eta, for some part of
the parameters. What is stable without a pull and with all of it is taken for stable (for a pair it is: the conditions
are linear in the pull). Overlap goes with one partner a round alone.

Random matchings are judged by the mean square in a large swarm, which of all sizes is the worst. It asks for a little
more than that disagreement should die out nearly always: of 16 nodes "post" with alpha 1 and gamma 0.8 still comes to
rest, after 317 rounds, and is refused. "rendezvous" is judged alike: whom it meets is not drawn, but no more can be
said of it than that it is anybody.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

from peerloom.protocol import graphs

Momentum = Literal["pre", "post"]
Weights = Literal["unit", "metropolis"]

FIXED = ("ring", "torus", "complete", "regular")
SEQUENCES = ("hypercube", "exponential", "base")
SIZES = (2, 3, 4, 6, 8, 9, 16)  # swarms on which a sequence is tried: longer periods come out alike
MOST_ALPHA = 4.0
WELL_DAMPED = 1.25  # alpha times the largest eigenvalue: near the best rate of "post" from rings to dense graphs


def pair_bound(gamma: float, l_max: float, momentum: Momentum, pull: float = 0.0) -> float:
    """A fixed graph is stable for 0 < alpha < this.

    Modes: z^2 - (1 - alpha l + gamma - pull) z + gamma = 0 for "pre",
    z^2 - ((1 + gamma)(1 - alpha l) - pull) z + gamma (1 - alpha l) = 0 for "post".
    """
    plain = max(0.0, 2 * (1 + gamma) - pull) / l_max
    return plain if momentum == "pre" else plain / (1 + 2 * gamma)


def largest_eigenvalue(pairing: str, weights: Weights, degree: int) -> float:
    """Of Lambda, over all sizes of a swarm: at most the largest degree times the weight; inf if unbounded."""
    if pairing == "complete":
        return 1.0 if weights == "metropolis" else math.inf  # n / 2 with unit weights
    most = {"ring": 2, "torus": 4, "regular": degree}[pairing]
    return most * (2 / (1 + most) if weights == "metropolis" else 1.0)


def alpha_bound(
    pairing: str,
    alpha: float,
    gamma: float,
    momentum: Momentum,
    *,
    weights: Weights,
    degree: int,
    group_size: int,
    pull: float = 0.0,
) -> float | None:
    """The mixing rate from which this topology diverges, where `alpha` is at or past it; 0 where any rate does.

    `pull` is eta where exchanges overlap with local steps, which only pairings with one partner a round allow.
    """
    if pairing in FIXED:
        l_max = largest_eigenvalue(pairing, weights, degree)
        bound = pair_bound(gamma, l_max, momentum) if l_max < math.inf else 0.0
        return bound if alpha >= bound else None
    pair = pair_bound(gamma, 1.0, momentum, pull)
    if alpha < pair and _stable(pairing, alpha, gamma, momentum, group_size, pull):
        return None
    return min(pair, _largest(pairing, gamma, momentum, group_size, pull))


@lru_cache(maxsize=256)
def _stable(pairing: str, alpha: float, gamma: float, momentum: Momentum, group_size: int, most_pull: float) -> bool:
    if pairing in SEQUENCES and group_size == 2:
        return all(_fades(pairing, n, alpha, gamma, momentum, pull) for n in SIZES for pull in {0.0, most_pull})
    peers = 2 if pairing == "two_peer" else 1
    return all(_random_rate(alpha, gamma, momentum, peers, group_size, pull) < 1 for pull in {0.0, most_pull})


@lru_cache(maxsize=256)
def _largest(pairing: str, gamma: float, momentum: Momentum, group_size: int, pull: float) -> float:
    """By bisection, to 0.01."""
    low, high = 0.01, MOST_ALPHA
    if not _stable(pairing, low, gamma, momentum, group_size, pull):
        return 0.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if _stable(pairing, middle, gamma, momentum, group_size, pull) else (low, middle)
    return round(high, 2)


def _fades(pairing: str, n: int, alpha: float, gamma: float, momentum: Momentum, pull: float = 0.0) -> bool:
    """Whether a disagreement of n nodes shrinks, in the long run, under a sequence of matchings."""
    if pairing == "hypercube" and n & (n - 1):
        return True  # a swarm of that size takes the Base-2 graph
    theta = [math.sin(1.0 + 7.0 * i) for i in range(n)]
    theta = _centred(theta)
    previous, logs = list(theta), [0.0]
    for round in range(40 * max(1, n.bit_length())):
        mixed = list(theta)
        for i, j, weight in sequence_leg(pairing, n, round):
            moved = alpha * weight / 2 * (theta[i] - theta[j])
            mixed[i] -= moved
            mixed[j] += moved
        carried = theta if momentum == "pre" else mixed
        together = zip(theta, mixed, carried, previous, strict=True)
        theta, previous = [m + gamma * (c - p) - pull * t for t, m, c, p in together], carried
        theta, previous = _centred(theta), _centred(previous)  # else rounding in the mean is all that is left
        size = math.sqrt(sum(x * x for x in theta) + sum(x * x for x in previous))
        if size < 1e-12:
            return True  # exact averages
        theta, previous = [x / size for x in theta], [x / size for x in previous]
        logs.append(logs[-1] + math.log(size))
    half = len(logs) // 2
    return logs[-1] < logs[half]


def _centred(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [x - mean for x in values]


def sequence_leg(pairing: str, n: int, round: int) -> graphs.Leg:
    """The matching of a round of "hypercube" (Base-2 where n is no power of 2), "exponential" or "base"."""
    if pairing == "base" or (pairing == "hypercube" and n & (n - 1)):
        return graphs.base_leg(n, round)
    pairs = graphs.hypercube(n, round) if pairing == "hypercube" else graphs.exponential(n, round)
    return tuple(graphs.Edge(i, j, 1.0) for i, j in pairs)


def _random_rate(alpha: float, gamma: float, momentum: Momentum, peers: int, group: int, pull: float = 0.0) -> float:
    """The root mean square's rate for `peers` random matchings of weight 1 / peers, or random groups, in a large swarm.

    Their Laplacian P projects and E[P] = c = (group - 1) / group on disagreement, so that the second moments of
    (theta, previous) follow a 3 x 3 recursion, whose spectral radius comes from squaring it. With W = I - alpha P,
    theta' = A theta - gamma previous for A = W + gamma - pull ("pre") or (1 + gamma) W - pull ("post").
    """
    c, g = (group - 1) / group, gamma
    w1 = 1 - alpha * c
    w2 = 1 - 2 * alpha * c + alpha**2 * (c + (peers - 1) * c**2) / peers
    if momentum == "pre":
        shift = g - pull
        a1, a2 = w1 + shift, w2 + 2 * shift * w1 + shift**2
        rows = [[a2, -2 * g * a1, g * g], [a1, -g, 0.0], [1.0, 0.0, 0.0]]
    else:
        a1, a2 = (1 + g) * w1 - pull, (1 + g) ** 2 * w2 - 2 * (1 + g) * pull * w1 + pull**2
        rows = [[a2, -2 * g * a1, g * g], [(1 + g) * w2 - pull * w1, -g * w1, 0.0], [w2, 0.0, 0.0]]
    log, power = 0.0, 1
    for _ in range(20):
        rows = [[sum(rows[i][k] * rows[k][j] for k in range(3)) for j in range(3)] for i in range(3)]
        power *= 2
        size = max(abs(x) for row in rows for x in row)
        if size == 0:
            return 0.0
        log = 2 * log + math.log(size)
        rows = [[x / size for x in row] for row in rows]
    return math.exp(log / power / 2)


def default_tuning(
    pairing: str, momentum: Momentum, *, weights: Weights, degree: int, group_size: int
) -> tuple[float, float]:
    """(alpha, gamma) for a topology whose spec names none.

    Derived: a fixed graph takes alpha = 1.25 / l_max, which is near the best rate of "post" for rings, tori and random
    regular graphs of 8 to 32 nodes (the best there is 1.16 to 1.32; longer rings want more gamma) and well inside
    "pre"; the complete graph takes 1, its exact mean. Measured (tests/benchmarks/gasloc and trials before it):
    matchings, sequences and groups are made for alpha = 1 and do best with gamma 0.3. 16 workers in groups of 4
    (110,912 parameters, 4 fragments, H = 24) ended at 1.753 with it, on one seed, where 0.5 gave 1.772, none 1.762.

    One random partner, the spec's own default: alpha = 1 is the pair's mean, and of all alpha has the best rate without
    momentum, 0.707 a round. Momentum only takes from that, and takes more in "pre", the published form: 0.743 with
    gamma 0.2, 0.786 with 0.3, 0.890 with 0.5, and consensus is lost from 0.71 on; in "post" it is 0.727, 0.757, 0.847
    and 0.78. What it gives is the outer step's speed, eta / (1 - gamma). So each form has the gamma that makes
    consensus to a thousandth take about a quarter more rounds (22 and 23 of 16 nodes, where 18 do without): "pre" 0.2,
    "post" 0.3, of 0 to 0.9 the ones with the lowest loss in a trial of 8 nodes with H = 16. In the sweep of 16 workers
    it makes little odds: 0.2 in "pre" ended 0.2 % above none, 0.3 in "post" 0.5 %; with H = 24 0.3 was the best.
    """
    if pairing in ("rendezvous", "scheduled") and group_size == 2:
        return 1.0, 0.2 if momentum == "pre" else 0.3
    if pairing not in FIXED or pairing == "complete":
        return 1.0, 0.3
    return round(WELL_DAMPED / largest_eigenvalue(pairing, weights, degree), 4), 0.3
