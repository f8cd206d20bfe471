"""How far the peers' parameters lie apart, told from the sketches in their records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable


def relative_distance(sketches: Iterable[tuple[float, ...]]) -> float | None:
    """An estimate of sqrt(mean_i |theta_i - mean theta|^2) / sqrt(mean_i |theta_i|^2); None for fewer than two.

    A sketch keeps lengths and differences on average (`optim.projection`), all peers' alike, so most of its error
    cancels in the ratio. Of sketches of different lengths, which no one run makes, only the commonest length counts.
    """
    known = [sketch for sketch in sketches if sketch]
    if not known:
        return None
    length = Counter(map(len, known)).most_common(1)[0][0]
    rows = [sketch for sketch in known if len(sketch) == length]
    if len(rows) < 2:
        return None
    mean = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    apart = math.fsum((value - middle) ** 2 for row in rows for value, middle in zip(row, mean, strict=True))
    norm = math.fsum(value**2 for row in rows for value in row)
    return math.sqrt(apart / norm) if norm else 0.0
