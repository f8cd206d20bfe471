"""What a node has absorbed, exactly: integer sums that do not depend on order, and a hash that proves them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from peerloom.optim.subcge_random import NORMAL_LIMIT, coordinates, message_seeds
from peerloom.optim.subcge_small import SmallTensors

FRACTION_BITS = 16  # of a scalar, unless said otherwise: a unit is 2^-16
SCALAR_LIMIT = 2**31 - 1  # a scalar fits 32 bits whatever the bound
_INT64_MAX = 2**63 - 1
_PLACES = 1 << 16  # worked out at a time: the temporaries stay in the cache


class Message(NamedTuple):
    """One step of one node. Plain tuples in this order are taken as well.

    `origin`: the sender's 64-bit key, as an int in the range of int64; `sequence`: 0, 1, 2 … of this origin; `step`:
    the local step, whose period (step // T) is the subspace the scalar belongs to; `scalar`: in fixed point.
    (origin, sequence) names the message: it fixes the direction, and who absorbs messages drops repeats by it.
    """

    origin: int
    sequence: int
    step: int
    scalar: int


class ExactState:
    """For each period with messages: their number, and int64 sums of (matrices, rank, rank); and `small`.

    SeedFlood's paper is silent on the precision of scalars and sums: fixed point is this project's choice.
    Integer addition commutes, so the state is a function of the set of messages. A small tensor's directions are of no
    subspace: `small`, int64 an element, is the sum over all periods. No sum can overflow: a scalar is at most `bound`,
    a small tensor's number at most NORMAL_LIMIT, and a run takes at most `capacity` messages, which is
    (2^63 - 1) // (bound * NORMAL_LIMIT).
    """

    def __init__(
        self, keys: Sequence[int], small: SmallTensors, rank: int, period: int, run_seed: int, bound: int
    ) -> None:
        if not 0 < bound <= SCALAR_LIMIT:
            raise ValueError(f"the scalars' bound must be from 1 to {SCALAR_LIMIT}, not {bound}")
        if period < 1:
            raise ValueError(f"a period must have at least 1 step, not {period}")
        self.bound = bound
        self.capacity = _INT64_MAX // (bound * NORMAL_LIMIT)
        self.counts: dict[int, int] = {}
        self.sums: dict[int, Tensor] = {}
        self.small = torch.zeros(small.numel, dtype=torch.int64)
        self._keys = torch.tensor(keys, dtype=torch.int64)
        self._small = small
        self._rank = rank
        self._period = period
        self._run_seed = run_seed
        self._digests: dict[int, bytes] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """(matrices, rank, rank): of one period's sums."""
        return len(self._keys), self._rank, self._rank

    def absorb(self, messages: Iterable[Sequence[int]]) -> dict[int, Tensor]:
        """Adds messages and returns what was added to the matrices' sums, by period.

        Raises ValueError for a field out of its range and OverflowError for a full run; then nothing was added.
        """
        rows = self._checked(messages)
        added: dict[int, Tensor] = {}
        if not len(rows):
            return added
        periods = rows[:, 2] // self._period
        if sum(self.counts.values()) + len(rows) > self.capacity:
            raise OverflowError(f"the run has taken its {self.capacity} messages")
        for period, number in Counter(periods.tolist()).items():
            added[period] = self._sum_of(rows[periods == period])
            self._add(period, number, added[period])
        self.small = self.small + self._small_sum_of(rows)
        return added

    def retract(self, messages: Iterable[Sequence[int]]) -> dict[int, Tensor]:
        """Takes out messages that were added before and returns what their matrices' sums were, by period.

        The state is then as if they had never come. Raises ValueError, with nothing changed, for fields out of their
        range and for more messages than a period has.
        """
        rows = self._checked(messages)
        periods = rows[:, 2] // self._period
        numbers = Counter(periods.tolist())
        for period, number in numbers.items():
            if number > self.counts.get(period, 0):
                raise ValueError(f"period {period} has {self.counts.get(period, 0)} messages, fewer than {number}")
        taken = {period: self._sum_of(rows[periods == period]) for period in numbers}
        for period, number in numbers.items():
            self._add(period, -number, -taken[period])
            if not self.counts[period]:
                del self.counts[period], self.sums[period]
        self.small = self.small - self._small_sum_of(rows)
        return taken

    def hash(self, without: Iterable[Sequence[int]] = ()) -> bytes:
        """32 bytes, SHA-256 over `small` and all periods in order: number, count and sums, little-endian.

        As if the messages `without`, which were added, had not been. Raises as `retract`.
        """
        if rows := list(without):
            return self._without(rows).hash()
        about = f"peerloom-subcge-3:{self._run_seed}:{self._period}:{self.shape}:{self._small.sizes}"
        total = hashlib.sha256(about.encode())
        total.update(_little_endian(self._keys))
        total.update(hashlib.sha256(_little_endian(self.small)).digest())
        for period in sorted(self.counts):
            if period not in self._digests:
                self._digests[period] = hashlib.sha256(_little_endian(self.sums[period])).digest()
            total.update(period.to_bytes(8, "little") + self.counts[period].to_bytes(8, "little"))
            total.update(self._digests[period])
        return total.digest()

    def export(self) -> dict[str, Tensor]:
        """What a late joiner needs, in int64: `periods`, `counts` (n,), `sums` (n, matrices, rank, rank), `small`."""
        order = sorted(self.counts)
        sums = [self.sums[period] for period in order]
        return {
            "periods": torch.tensor(order, dtype=torch.int64),
            "counts": torch.tensor([self.counts[period] for period in order], dtype=torch.int64),
            "sums": torch.stack(sums) if sums else torch.zeros(0, *self.shape, dtype=torch.int64),
            "small": self.small.clone(),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the state by an exported one; raises ValueError, with nothing changed, for one that cannot be."""
        found = {name: state.get(name) for name in ("periods", "counts", "sums", "small")}
        for name, tensor in found.items():
            if tensor is None or tensor.dtype != torch.int64:
                raise ValueError(f"the state's {name} must be an int64 tensor")
        periods, counts, sums, small = (tensor.cpu() for tensor in found.values() if tensor is not None)
        if periods.dim() != 1 or counts.shape != periods.shape or sums.shape != (len(periods), *self.shape):
            raise ValueError(f"the state's sums must be of shape {('periods', *self.shape)}, not {tuple(sums.shape)}")
        if small.shape != self.small.shape:
            raise ValueError(f"the state's small must be of shape {tuple(self.small.shape)}, not {tuple(small.shape)}")
        messages = sum(counts.tolist())
        if (periods < 0).any() or (periods.diff() <= 0).any() or (counts < 1).any() or messages > self.capacity:
            raise ValueError("the state's periods must ascend from 0, their counts be above 0 and within the capacity")
        limit, most = (counts * self.bound).view(-1, 1, 1, 1), messages * self.bound * NORMAL_LIMIT
        if (sums > limit).any() or (sums < -limit).any() or (small > most).any() or (small < -most).any():
            raise ValueError("the state's sums are larger than its counts of messages allow")
        order = periods.tolist()
        self.counts = dict(zip(order, counts.tolist(), strict=True))
        self.sums = {period: one.clone() for period, one in zip(order, sums, strict=True)}
        self.small = small.clone()
        self._digests = {}

    def _without(self, rows: list[Sequence[int]]) -> ExactState:
        """A copy that lacks these messages; sums of the other periods are shared."""
        other = copy(self)
        touched = {row[2] // self._period for row in rows}
        other.counts, other._digests = dict(self.counts), dict(self._digests)
        other.sums = {period: sums.clone() if period in touched else sums for period, sums in self.sums.items()}
        other.retract(rows)
        return other

    def _checked(self, messages: Iterable[Sequence[int]]) -> Tensor:
        """(n, 4) int64."""
        listed = list(messages)
        if not listed:
            return torch.empty(0, 4, dtype=torch.int64)
        try:
            rows = torch.tensor(listed)
        except (RuntimeError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"a message must be four integers of 64 bits: {error}") from error
        if rows.dtype != torch.int64 or rows.shape != (len(listed), 4):
            raise ValueError("a message must be four integers of 64 bits")
        if (rows[:, 1:3] < 0).any():
            raise ValueError("a message's sequence and step must not be negative")
        if (rows[:, 3] > self.bound).any() or (rows[:, 3] < -self.bound).any():
            raise ValueError(f"a message's scalar lies outside the bound of {self.bound}")
        return rows

    def _sum_of(self, rows: Tensor) -> Tensor:
        """A piece of the messages at a time: each has a place in every matrix."""
        cells = self._rank * self._rank
        offsets = torch.arange(len(self._keys)) * cells
        flat = torch.zeros(len(self._keys) * cells, dtype=torch.int64)
        most = max(1, _PLACES // max(1, len(self._keys)))
        for start in range(0, len(rows), most):
            piece = rows[start : start + most]
            seeds = message_seeds(self._run_seed, piece[:, 0], piece[:, 1])
            places = coordinates(seeds, self._keys, self._rank).add_(offsets)
            flat.index_add_(0, places.flatten(), piece[:, 3:].expand_as(places).flatten())
        return flat.view(self.shape)

    def _small_sum_of(self, rows: Tensor) -> Tensor:
        return self._small.sum_of(message_seeds(self._run_seed, rows[:, 0], rows[:, 1]), rows[:, 3])

    def _add(self, period: int, number: int, sums: Tensor) -> None:
        self.counts[period] = self.counts.get(period, 0) + number
        if period in self.sums:
            self.sums[period] += sums
        else:
            self.sums[period] = sums.clone()
        self._digests.pop(period, None)


def _little_endian(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().numpy().astype("<i8", copy=False).data)
