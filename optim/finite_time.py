"""Sequences of sparse graphs whose mixing matrices multiply to the exact average, whatever the start.

Each is a list of `Graph`s on 0..n-1, one a round, to be run with alpha = 1 and repeated: the mixing matrix of a round
is I - Lambda, so that an edge of weight lambda moves lambda / 2 of the difference. They are pure functions of integers
and use no random numbers: every machine builds the same.
"""

from __future__ import annotations

from functools import cache

from peerloom.optim.topology import Edge, Graph

Weights = dict[tuple[int, int], float]  # (i, j), i < j, to its entry of the mixing matrix


def hypercube_matching(n: int, round: int) -> list[tuple[int, int]]:
    """The pairs of a round that differ in one bit, the bits in turn; log2(n) rounds average exactly.

    Raises ValueError unless n is a power of 2.
    """
    dimensions = _log2(n)
    if dimensions == 0:
        return []
    bit = 1 << round % dimensions
    return [(i, i | bit) for i in range(n) if not i & bit]


def one_peer_exponential(n: int, round: int) -> list[tuple[int, int]]:
    """The directed edges (sender, receiver) of a round: each node sends to the one 2^(round mod ceil(log2 n)) ahead.

    Each node keeps half of its own and takes half of its sender's: `directed_average`. This averages exactly over a
    period where n is a power of 2 and else only in the limit (arXiv 2110.13363). An edge here counts on one side alone,
    so a live exchange, which counts on both or on neither, uses `exponential_matching`.
    """
    _check_n(n)
    if n == 1:
        return []
    hop = 1 << round % (n - 1).bit_length()
    return [(i, (i + hop) % n) for i in range(n)]


def exponential_matching(n: int, round: int) -> list[tuple[int, int]]:
    """An undirected form of the one-peer exponential graph: pairs 2^k apart along the ring, k in turn, for any n.

    On each cycle of that hop the nodes pair up in order, starting one further every other period; the last of an odd
    cycle idles. Where n is a power of 2 a period is the hypercube's in its first and every other turn.
    """
    _check_n(n)
    if n == 1:
        return []
    period = (n - 1).bit_length()
    hop, shift = 1 << round % period, round // period % 2
    pairs: list[tuple[int, int]] = []
    seen: set[int] = set()
    for start in range(n):
        cycle: list[int] = []
        node = start
        while node not in seen:
            seen.add(node)
            cycle.append(node)
            node = (node + hop) % n
        turned = cycle[shift:] + cycle[:shift] if len(cycle) > 2 else cycle
        pairs += [(min(i, j), max(i, j)) for i, j in zip(turned[0::2], turned[1::2], strict=False)]
    return sorted(pairs)


def base_graph(n: int, k: int, round: int) -> Graph:
    """Round `round` of the Base-(k+1) graph on n nodes: at most k peers each, and a period averages exactly.

    arXiv 2305.11420, for any n >= 1; `base_period` is its length, 2 floor(log_{k+1} n) + 2 at most. Raises ValueError
    for k < 1.
    """
    sequence = _base_sequence(n, k)
    return sequence[round % len(sequence)]


def base_period(n: int, k: int) -> int:
    """The number of rounds after which `base_graph` has averaged exactly and begins again, at least 1."""
    return len(_base_sequence(n, k))


def period(kind: str, n: int, k: int = 1) -> int:
    """How many rounds until "hypercube", "exponential" or "base" begins again."""
    if kind == "hypercube":
        return max(1, _log2(n))
    if kind == "exponential":
        return max(1, 2 * (n - 1).bit_length())
    if kind == "base":
        return base_period(n, k)
    raise ValueError(f'unknown sequence {kind!r}; it must be "hypercube", "exponential" or "base"')


def sequence_graph(kind: str, n: int, round: int, k: int = 1) -> Graph:
    """The graph of one round of "hypercube", "exponential" or "base"; the first two have edges of weight 1."""
    if kind == "hypercube":
        return Graph.from_pairs(n, hypercube_matching(n, round))
    if kind == "exponential":
        return Graph.from_pairs(n, exponential_matching(n, round))
    if kind == "base":
        return base_graph(n, k, round)
    raise ValueError(f'unknown sequence {kind!r}; it must be "hypercube", "exponential" or "base"')


@cache
def _base_sequence(n: int, k: int) -> tuple[Graph, ...]:
    """The shorter of the simple sequence and, for n = p q with p having only prime factors up to k + 1, the split one.

    The split one runs the simple sequence in p parts of q nodes, then averages across the parts.
    """
    _check_n(n)
    if k < 1:
        raise ValueError(f"a Base-(k+1) graph needs k of at least 1, got {k}")
    p, q = _smooth_part(n, k + 1)
    across = _hyper_hypercube([[part * q + i for part in range(p)] for i in range(q)], k)
    simple = _simple_base(list(range(n)), k)
    if q == 1:
        rounds = across
    else:
        parts = [_simple_base([part * q + i for i in range(q)], k) for part in range(p)]
        rounds = _side_by_side(parts) + across
        if len(simple) < len(rounds):
            rounds = simple
    return tuple(_graph(n, weights) for weights in rounds or [{}])


def _simple_base(nodes: list[int], k: int) -> list[Weights]:
    """The Simple Base-(k+1) graph: blocks agree, pass their averages on, and agree again.

    Written in base k + 1, the size is sum_l a_l (k+1)^{p_l}, which cuts the nodes into blocks V_l, and V_l into a_l
    parts. First each V_l averages. Then, for l in turn, every node after V_l meets one node of each part of V_l, moving
    |part| / |V_l and after| of the difference: each part of V_l now has the mean of all that is left, and so has the
    rest as a whole. So V_l's parts average once more while V_{l+1} goes on.
    """
    blocks = _blocks(nodes, k + 1)
    first = [_hyper_hypercube([[i for part in parts for i in part]], k) for parts in blocks]
    rounds = _side_by_side(first)
    if len(blocks) == 1:
        return rounds
    tails: list[list[Weights]] = []
    for index, parts in enumerate(blocks[:-1]):
        after = [i for later in blocks[index + 1 :] for part in later for i in part]
        moved = len(parts[0]) / (len(parts) * len(parts[0]) + len(after))
        exchange = {_pair(i, part[slot]): moved for part in parts for slot, i in enumerate(after)}
        tails.append([{}] * index + [exchange, *_hyper_hypercube(parts, k)])
    return rounds + _side_by_side(tails)


def _blocks(nodes: list[int], base: int) -> list[list[list[int]]]:
    """The nodes cut by the digits of their number in `base`, largest power first: a list of equal parts a digit."""
    blocks: list[list[list[int]]] = []
    size, start = 1, 0
    while size * base <= len(nodes):
        size *= base
    while size >= 1:
        count = (len(nodes) - start) // size
        if count:
            blocks.append([nodes[start + a * size : start + (a + 1) * size] for a in range(count)])
            start += count * size
        size //= base
    return blocks


def _hyper_hypercube(groups: list[list[int]], k: int) -> list[Weights]:
    """Rounds after which each group (all of one size, with prime factors up to k + 1) has its own average.

    A round of factor f makes cliques of f out of nodes that are a stride apart, each edge with 1 / f.
    """
    factors = _factors(len(groups[0]), k + 1)
    rounds: list[Weights] = []
    stride = 1
    for factor in factors:
        weights: Weights = {}
        for group in groups:
            for place, i in enumerate(group):
                digit = place // stride % factor
                for other in range(digit + 1, factor):
                    weights[_pair(i, group[place + (other - digit) * stride])] = 1 / factor
        rounds.append(weights)
        stride *= factor
    return rounds


def _factors(size: int, limit: int) -> list[int]:
    """The fewest factors up to `limit` whose product is `size`, found greedily per remainder by exhaustive descent."""
    best: list[int] | None = [] if size == 1 else None
    for factor in range(min(limit, size), 1, -1):
        if size % factor == 0:
            rest = _factors(size // factor, limit) if _smooth_part(size // factor, limit)[1] == 1 else None
            if rest is not None and (best is None or len(rest) + 1 < len(best)):
                best = [factor, *rest]
    if best is None:
        raise ValueError(f"{size} has a prime factor over {limit}")
    return best


def _smooth_part(n: int, limit: int) -> tuple[int, int]:
    """n = p q, p of prime factors up to `limit`, q of larger ones."""
    p, q = 1, n
    for factor in range(2, limit + 1):
        while q % factor == 0:
            p, q = p * factor, q // factor
    return p, q


def _side_by_side(sequences: list[list[Weights]]) -> list[Weights]:
    """Sequences on nodes apart from each other in a round, run together; a shorter one idles at its end."""
    length = max((len(sequence) for sequence in sequences), default=0)
    return [
        {pair: weight for sequence in sequences if t < len(sequence) for pair, weight in sequence[t].items()}
        for t in range(length)
    ]


def _graph(n: int, weights: Weights) -> Graph:
    return Graph(n, tuple(Edge(i, j, 2 * weight) for (i, j), weight in weights.items()))


def _pair(i: int, j: int) -> tuple[int, int]:
    return (i, j) if i < j else (j, i)


def _check_n(n: int) -> None:
    if n < 1:
        raise ValueError(f"a graph needs at least one node, got n={n}")


def _log2(n: int) -> int:
    if n < 1 or n & (n - 1):
        raise ValueError(f"a hypercube needs a power of 2 of nodes, got {n}; the Base-(k+1) graph takes any number")
    return n.bit_length() - 1
