"""Who mixes with whom in pure Python: fixed graphs as matchings, finite-time sequences, groups.

All is a pure function of integers, the same on every machine. An edge is (i, j, lambda), i < j, counted once; Lambda
has its half (arXiv 2606.11081), so that an edge of weight 1 with alpha = 1 averages its ends. A fixed graph becomes
*legs*: the matchings of an edge colouring, since a node meets one peer at a time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

Pairs = list[tuple[int, int]]


class Edge(NamedTuple):
    """An undirected edge with i < j and weight lambda > 0."""

    i: int
    j: int
    weight: float


Leg = tuple[Edge, ...]  # a matching: no node twice


def scheduled_matching(seed: int, round: int, n: int) -> Pairs:
    """A uniform random matching of 0..n-1 as sorted pairs (i, j), i < j; an odd n leaves one index out.

    The indices are ordered by SHA-256 of "peerloom-matching-v1:{seed}:{round}:{i}" and paired consecutively, so every
    node, on any machine, draws the same matching.
    """
    if n < 0:
        raise ValueError(f"n is {n}: a matching needs a number of peers, 0 or more")
    order = sorted(range(n), key=lambda i: _digest(f"peerloom-matching-v1:{seed}:{round}:{i}"))
    return sorted((min(pair), max(pair)) for pair in zip(order[::2], order[1::2], strict=False))


# --- fixed graphs


def ring(n: int) -> Pairs:
    """A cycle of n nodes; one edge for n = 2, none for n = 1."""
    return sorted({_pair(i, (i + 1) % n) for i in range(n) if n > 1})


def torus(n: int) -> Pairs:
    """The grid a x b = n closed both ways, a <= b as close as can be; a ring where n is prime."""
    a = torus_rows(n)
    b = n // a
    cells = [(row, column) for row in range(a) for column in range(b)]
    right = {_pair(row * b + column, row * b + (column + 1) % b) for row, column in cells if b > 1}
    down = {_pair(row * b + column, (row + 1) % a * b + column) for row, column in cells if a > 1}
    return sorted(right | down)


def torus_rows(n: int) -> int:
    """The largest divisor of n up to its root."""
    return next((a for a in range(math.isqrt(n), 0, -1) if n % a == 0), 1)


def complete(n: int) -> Pairs:
    """Every pair of n nodes."""
    return [(i, j) for i in range(n) for j in range(i + 1, n)]


def fitting_degree(n: int, degree: int) -> int:
    """The degree nearest to the one asked for that a regular graph on n nodes can have: n - 1 at most, n * d even."""
    d = min(degree, n - 1)
    return d + 1 if n * d % 2 else d


def random_regular(n: int, degree: int, seed: int) -> Pairs:
    """A random graph of `fitting_degree`, connected from degree 2 on; a dense one is a sparse one's complement.

    Stubs are paired again and again in the order of the SHA-256 digests of "{key}:{sweep}:{stub}", with the key
    "peerloom-regular-v1:{seed}:{attempt}", and pairs that are allowed are kept.
    """
    d = fitting_degree(n, degree)
    if d == n - 1:
        return complete(n)
    sparse = d if d <= (n - 1) // 2 else n - 1 - d
    attempt = 0
    while True:
        drawn = _draw_regular(n, sparse, f"peerloom-regular-v1:{seed}:{attempt}")
        if drawn is not None:
            chosen = drawn if sparse == d else set(complete(n)) - drawn
            if d < 2 or _connected(n, chosen):
                return sorted(chosen)
        attempt += 1


def weighted(n: int, pairs: Pairs, metropolis: bool) -> list[Edge]:
    """The edges with weight 1 each, or 2 / (1 + the larger degree): I - Lambda is then the Metropolis matrix."""
    degree = [0] * n
    for i, j in pairs:
        degree[i] += 1
        degree[j] += 1
    return [Edge(i, j, 2.0 / (1 + max(degree[i], degree[j])) if metropolis else 1.0) for i, j in pairs]


# --- edge colourings


def matchings(n: int, edges: list[Edge]) -> list[Leg]:
    """The edges as few matchings, in a fixed order: as many as the largest degree where no odd cycle forbids it.

    Each edge takes a colour that is free at both ends; if none is, a chain of two colours is turned round (Kempe), and
    where that fails a colour is added.
    """
    at: list[dict[int, int]] = [{} for _ in range(n)]  # node -> colour -> the other end
    most = max((sum(i in edge[:2] for edge in edges) for i in range(n)), default=0)
    for i, j, _ in edges:
        colour = _free_colour(at, i, j, most)
        at[i][colour], at[j][colour] = j, i
    legs: dict[int, list[Edge]] = {}
    for edge in edges:
        colour = next(colour for colour, other in at[edge.i].items() if other == edge.j)
        legs.setdefault(colour, []).append(edge)
    return [tuple(legs[colour]) for colour in sorted(legs)]


def _free_colour(at: list[dict[int, int]], i: int, j: int, most: int) -> int:
    """A colour free at both ends, of the first `most`, else of one more (Vizing: enough in theory), else a new one."""
    for count in (most, most + 1):
        free_i, free_j = ([c for c in range(count) if c not in at[end]] for end in (i, j))
        if both := sorted(set(free_i) & set(free_j)):
            return both[0]
        for a in free_i:
            for b in free_j:
                if _turn_round(at, i, j, a, b):
                    return a
    return next(c for c in range(2 * most) if c not in at[i] and c not in at[j])


def _turn_round(at: list[dict[int, int]], i: int, j: int, a: int, b: int) -> bool:
    """Swaps the colours along j's chain of a and b, so that a becomes free at j; not where the chain leads to i."""
    chain = _chain(at, j, a, b)
    if chain[-1] == i:
        return False
    links = [(chain[k], chain[k + 1], (a, b)[k % 2]) for k in range(len(chain) - 1)]
    for u, v, colour in links:
        del at[u][colour], at[v][colour]
    for u, v, colour in links:
        at[u][a + b - colour], at[v][a + b - colour] = v, u
    return True


def _chain(at: list[dict[int, int]], start: int, a: int, b: int) -> list[int]:
    """The path from `start` whose edges have the colours a, b, a, ..."""
    path, colour = [start], a
    while colour in at[path[-1]]:
        path.append(at[path[-1]][colour])
        colour = a + b - colour
    return path


def round_robin(n: int) -> list[Pairs]:
    """The complete graph as n - 1 matchings for even n, n for odd n (the circle method)."""
    size = n + n % 2
    turns = []
    for turn in range(size - 1):
        places = [size - 1, *((turn + k) % (size - 1) for k in range(size - 1))]
        pairs = [_pair(places[k], places[size - 1 - k]) for k in range(size // 2)]
        turns.append(sorted(pair for pair in pairs if pair[1] < n))
    return turns if n > 1 else []


# --- finite-time sequences


def hypercube(n: int, round: int) -> Pairs:
    """The pairs of a round that differ in one bit, the bits in turn; needs n to be a power of 2."""
    if n < 2:
        return []
    bit = 1 << round % (n.bit_length() - 1)
    return [(i, i | bit) for i in range(n) if not i & bit]


def exponential(n: int, round: int) -> Pairs:
    """The one-peer exponential graph as matchings: pairs 2^k apart along the ring, k in turn, for any n.

    On each cycle of that hop the nodes pair up in order, starting one further every other period; the last of an odd
    cycle idles. A directed edge, as in arXiv 2110.13363, would count on one side alone.
    """
    if n < 2:
        return []
    period = (n - 1).bit_length()
    hop, shift = 1 << round % period, round // period % 2
    pairs: Pairs = []
    for start in range(math.gcd(hop, n)):
        cycle = [(start + k * hop) % n for k in range(n // math.gcd(hop, n))]
        turned = cycle[shift:] + cycle[:shift] if len(cycle) > 2 else cycle
        pairs += [_pair(i, j) for i, j in zip(turned[::2], turned[1::2], strict=False)]
    return sorted(pairs)


def base_leg(n: int, round: int) -> Leg:
    """Round `round` of the Base-2 graph (arXiv 2305.11420): one peer each, any n, and a period averages exactly."""
    sequence = _base_sequence(n)
    return sequence[round % len(sequence)]


def base_period(n: int) -> int:
    """The rounds after which `base_leg` has averaged exactly and begins again."""
    return len(_base_sequence(n))


_Weights = dict[tuple[int, int], float]  # (i, j), i < j, to its entry of the mixing matrix


@lru_cache(maxsize=64)
def _base_sequence(n: int) -> tuple[Leg, ...]:
    """The shorter of the simple sequence and, for n = p q with p a power of 2 and q odd, the one in p parts of q."""
    q = n
    while q and q % 2 == 0:
        q //= 2
    p = n // q if q else 1
    across = _halvings([[part * q + i for part in range(p)] for i in range(q)])
    simple = _simple_base(list(range(n)))
    rounds = across
    if q > 1:
        rounds = _side_by_side([_simple_base([part * q + i for i in range(q)]) for part in range(p)]) + across
        rounds = min(simple, rounds, key=len) if len(simple) != len(rounds) else rounds
    return tuple(
        tuple(Edge(i, j, 2 * moved) for (i, j), moved in sorted(weights.items())) for weights in rounds or [{}]
    )


def _simple_base(nodes: list[int]) -> list[_Weights]:
    """The Simple Base-2 graph: blocks of the powers of 2 in n agree, pass their averages on, and agree again.

    First each block V_l averages. Then, for l in turn, every node after V_l meets one of V_l, which moves
    |V_l| / |V_l and after| of the difference: V_l's nodes that nobody met keep theirs, and V_l averages once more while
    V_{l+1} goes on.
    """
    blocks = _blocks(nodes)
    rounds = _side_by_side([_halvings([block]) for block in blocks])
    tails: list[list[_Weights]] = []
    for index, block in enumerate(blocks[:-1]):
        after = [i for later in blocks[index + 1 :] for i in later]
        moved = len(block) / (len(block) + len(after))
        meet = {_pair(i, block[slot]): moved for slot, i in enumerate(after)}
        tails.append([{}] * index + [meet, *_halvings([block])])
    return rounds + _side_by_side(tails)


def _blocks(nodes: list[int]) -> list[list[int]]:
    """The nodes cut by the binary digits of their number, the largest power first."""
    blocks, start = [], 0
    for power in range(len(nodes).bit_length() - 1, -1, -1):
        if len(nodes) >> power & 1:
            blocks.append(nodes[start : start + (1 << power)])
            start += 1 << power
    return blocks


def _halvings(groups: list[list[int]]) -> list[_Weights]:
    """Rounds of pairs after which each group (all of one size, a power of 2) has its own average."""
    rounds: list[_Weights] = []
    stride = 1
    while stride < len(groups[0]):
        places = [place for place in range(len(groups[0])) if not place & stride]
        rounds.append({_pair(group[place], group[place + stride]): 0.5 for group in groups for place in places})
        stride *= 2
    return rounds


def _side_by_side(sequences: list[list[_Weights]]) -> list[_Weights]:
    """Sequences on nodes apart from each other in a round, run together; a shorter one idles at its end."""
    length = max((len(sequence) for sequence in sequences), default=0)
    return [
        {pair: moved for sequence in sequences if t < len(sequence) for pair, moved in sequence[t].items()}
        for t in range(length)
    ]


# --- groups


def hypercube_groups(n: int, size: int, round: int) -> list[tuple[int, ...]]:
    """Groups along log2(size) dimensions of a hypercube, which move on every round; n is a power of 2 >= size."""
    dimensions, m = n.bit_length() - 1, size.bit_length() - 1
    bits = sorted(1 << (round * m + k) % dimensions for k in range(m))
    corners = [sum(bit for k, bit in enumerate(bits) if place >> k & 1) for place in range(size)]
    return [tuple(base | corner for corner in corners) for base in range(n) if not base & sum(bits)]


def random_groups(n: int, size: int, seed: int, round: int) -> list[tuple[int, ...]]:
    """Random groups of 0..n-1; what is left over forms smaller powers of 2, one may be alone.

    The nodes in order of the SHA-256 digest of "peerloom-groups-v1:{seed}:{round}:{i}" are cut into groups of `size`.
    """
    order = sorted(range(n), key=lambda i: _digest(f"peerloom-groups-v1:{seed}:{round}:{i}"))
    groups: list[tuple[int, ...]] = []
    start = 0
    while start < n:
        while size > n - start:
            size //= 2
        groups.append(tuple(sorted(order[start : start + size])))
        start += size
    return sorted(groups)


def group_legs(groups: list[tuple[int, ...]]) -> list[Leg]:
    """The pairs of the 2 log2(size) legs that give each group its mean: halving size/2, size/4, ..., 1 apart, and back.

    A smaller group has fewer legs: it joins in the middle ones.
    """
    largest = max((len(group) for group in groups), default=1)
    legs = []
    distance = largest // 2
    while distance:
        pairs = [
            _pair(group[place], group[place + distance])
            for group in groups
            if distance < len(group)
            for place in range(len(group))
            if not place & distance
        ]
        legs.append(tuple(Edge(i, j, 1.0) for i, j in sorted(pairs)))
        distance //= 2
    return legs + legs[::-1]


def halvings(size: int, place: int, pieces: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """What the member at `place` of a group gives away and keeps in each halving, as ranges of `pieces` pieces."""
    ranges = []
    start, stop, distance = 0, pieces, size // 2
    while distance:
        middle = (start + stop) // 2
        low, high = (start, middle), (middle, stop)
        give, keep = (low, high) if place & distance else (high, low)
        ranges.append((give, keep))
        start, stop = keep
        distance //= 2
    return ranges


def _pair(i: int, j: int) -> tuple[int, int]:
    return (i, j) if i < j else (j, i)


def _digest(text: str) -> bytes:
    return sha256(text.encode("ascii")).digest()


def _draw_regular(n: int, d: int, key: str) -> set[tuple[int, int]] | None:
    """Pairs free stubs at random, again and again, keeping the pairs that are allowed; None when it gets stuck."""
    pairs: set[tuple[int, int]] = set()
    stubs = [i for i in range(n) for _ in range(d)]
    sweep = 0
    while stubs:
        by_digest = sorted(range(len(stubs)), key=lambda k: _digest(f"{key}:{sweep}:{k}"))
        order = [stubs[k] for k in by_digest]
        left: list[int] = []
        for i, j in zip(order[::2], order[1::2], strict=True):
            if i == j or _pair(i, j) in pairs:
                left += [i, j]
            else:
                pairs.add(_pair(i, j))
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
