"""A round's exchanges, in order: which matchings each fragment goes through, from (seed, round, size of the swarm).

A group that loses a member stays whole. A leg's pieces are averaged half and half or replaced by the partner's, never
summed up, and what a halving did not take its doubling does not give back: so whichever legs fail, on one side or on
both, each piece that a member holds is a mean of proposals with weights that sum to 1, the lost one's among them. All
legs between those who are left are kept that do not give back what came of the lost one's, and nobody waits longer for
it than for any partner that is not there. Of later rounds, the one in which its loss comes to be known may lack more:
who plans with it still does not meet those who do not, and has to catch up in the next. From then on all are whole.

What is moved is the mean of those who are left, off that of their own proposals. With the proposals' largest distance
as the unit, it is on average over the pieces, and at most in one, for groups of 4 and of 8:

    lost before the round            0.08, 0.17 and 0.09, 0.14
    after the first halving          0.13, 0.25 and 0.10, 0.14
    between halving and doubling     0.21, 0.33 and 0.15, 0.29
    after the first doubling         0.29, 0.33 and 0.19, 0.29
    after the round                  0.25, 0.25 and 0.13, 0.13

The lost one's weight in that mean is at most 1/4 and 1/8.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from peerloom.protocol import graphs
from peerloom.protocol.graphs import Edge, Leg
from peerloom.protocol.spec_gasloc import ONE_PARTNER, GaslocSpec
from peerloom.protocol.stability import FIXED, sequence_leg
from peerloom.protocol.types import Span


class Swap(NamedTuple):
    """The pieces that a node sends and receives in a leg.

    In a group, what is received is averaged with the node's own in the halving legs, and replaces it in the others,
    which give back what the leg `halved` has given away; -1 where there is no such leg.
    """

    send: Span
    receive: Span
    halved: int = -1


def in_sequence(spec: GaslocSpec) -> bool:
    """Whether a leg goes on from what the leg before left (groups), instead of adding a term of one y."""
    return spec.group_size > 2


def pieces(spec: GaslocSpec) -> int:
    """In how many parts a fragment is encoded: a group's members each have one to sum up."""
    return spec.group_size if in_sequence(spec) else 1


def is_plain(spec: GaslocSpec) -> bool:
    """Whether every round has the one exchange of weight 1 of the basic form."""
    return spec.pairing in ONE_PARTNER and spec.fragments == 1 and not in_sequence(spec)


def due_s(spec: GaslocSpec, fragment: int) -> float:
    """The seconds of a timed round's local steps after which a fragment is exchanged, the last at the round's end."""
    return spec.round_s * (fragment + 1) / spec.fragments


@lru_cache(maxsize=256)
def legs(spec: GaslocSpec, seed: int, round: int, fragment: int, n: int) -> tuple[Leg, ...]:
    """The matchings of 0..n-1 that a fragment goes through in a round, in order; perhaps none.

    Draws are made anew for each fragment; sequences go one step further with each, so that each fragment goes through
    the whole sequence, and the fragments of a round meet different peers.
    """
    draw, step = round * spec.fragments + fragment, round + fragment
    if n < 2:
        return ()
    if spec.pairing in FIXED:
        return _fixed(spec, seed, n)
    if in_sequence(spec):
        return tuple(graphs.group_legs(groups(spec, seed, round, fragment, n)))
    if spec.pairing == "two_peer":
        return tuple(_matching(seed, 2 * draw + half, n, 0.5) for half in (0, 1))
    if spec.pairing in ("hypercube", "exponential", "base"):
        return (sequence_leg(spec.pairing, n, step),)
    return (_matching(seed, draw, n, 1.0),)


def groups(spec: GaslocSpec, seed: int, round: int, fragment: int, n: int) -> list[tuple[int, ...]]:
    """The groups of a fragment in a round, n >= 2: on a hypercube where it is one, else at random."""
    size = min(spec.group_size, 1 << n.bit_length() - 1)
    if spec.pairing == "hypercube" and n & (n - 1) == 0:
        return graphs.hypercube_groups(n, size, round + fragment)
    return graphs.random_groups(n, size, seed, round * spec.fragments + fragment)


@lru_cache(maxsize=1024)
def swap(spec: GaslocSpec, seed: int, round: int, fragment: int, leg: int, n: int, node: int) -> Swap:
    """What `node` sends and receives in a leg; the whole fragment where it has no partner."""
    whole = (fragment * pieces(spec), (fragment + 1) * pieces(spec))
    if not in_sequence(spec) or n < 2:
        return Swap(whole, whole)
    drawn = groups(spec, seed, round, fragment, n)
    depth = max(map(len, drawn)).bit_length() - 1
    group = next(group for group in drawn if node in group)
    ranges = graphs.halvings(len(group), group.index(node), pieces(spec))
    halved = 2 * depth - 1 - leg if leg >= depth else -1
    own = (halved if halved >= 0 else leg) - (depth - len(ranges))  # a smaller group joins in the middle
    if not 0 <= own < len(ranges):
        return Swap(whole, whole)
    give, keep = ((whole[0] + first, whole[0] + last) for first, last in ranges[own])
    return Swap(give, keep) if halved < 0 else Swap(keep, give, halved)


def _matching(seed: int, draw: int, n: int, weight: float) -> Leg:
    return tuple(Edge(i, j, weight) for i, j in graphs.scheduled_matching(seed, draw, n))


@lru_cache(maxsize=64)
def _fixed(spec: GaslocSpec, seed: int, n: int) -> tuple[Leg, ...]:
    """A graph's edges as matchings; Metropolis weights where the spec has them."""
    metropolis = spec.weights == "metropolis"
    if spec.pairing == "complete":
        weight = 2 / n if metropolis else 1.0
        return tuple(tuple(Edge(i, j, weight) for i, j in pairs) for pairs in graphs.round_robin(n))
    if spec.pairing == "regular":
        pairs = graphs.random_regular(n, spec.degree, seed)
    else:
        pairs = graphs.ring(n) if spec.pairing == "ring" else graphs.torus(n)
    return tuple(graphs.matchings(n, graphs.weighted(n, pairs, metropolis)))
