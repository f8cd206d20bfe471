"""The weights that an exact state stands for: base + lr * sum over periods of U A V^T, in one order, rounded once.

A small tensor is base + lr * its integer sum, the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from peerloom.optim.subcge_random import NORMAL_BITS
from peerloom.optim.subcge_small import SmallTensors
from peerloom.optim.subcge_state import ExactState
from peerloom.optim.subcge_subspace import Subspace, folded_shape
from peerloom.optim.subcge_targets import Target

_AT_ONCE = 4  # periods whose factors are held
_CACHE_LINE = 64  # bytes; where torch's memory on the CPU begins


class Weights:
    """Keeps parameters at base - unit sum_s U_s A_s V_s^T, summed in float32 in the order of s, then rounded.

    Periods that are over are folded into `anchor`, the prefix of that sum, so that a refresh costs one product a
    tensor; what comes late for a folded period is added on top until `rebuild` sums all from the base again. But for
    such a remainder (`late`) the weights are the same bits for the same set of messages, on one kind of machine.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        state: ExactState,
        layout: SmallTensors,
        rank: int,
        unit: float,
        base: Mapping[str, Tensor] | None,
        anchor: Mapping[str, Tensor] | None,
        cached: int,
    ) -> None:
        self._matrices = [target for target in targets if not target.small]
        self._small = [target for target in targets if target.small]
        self._layout = layout
        self._state = state
        self._rank = rank
        self._weight = -unit
        self._base = _copies(targets) if base is None else base
        self._anchor = anchor
        self._folded = 0  # periods below are in the anchor
        self._anchored = False  # whether any is: else the base serves
        self._period = 0
        self._cached = cached
        self._kept: dict[int, dict[str, Subspace]] = {0: {}}  # by period and tensor
        self.late: dict[int, Tensor] = {}
        _check_store("base", self._base, targets)
        if anchor is not None:
            _check_store("anchor", anchor, self._matrices, torch.float32)

    def subspace(self, target: Target, period: int) -> Subspace:
        """The target's subspace; the current period's are kept, and those of others as far as `cached` goes."""
        kept = self._kept.get(period, {})
        if target.name not in kept:
            parameter = target.parameter
            made = Subspace(parameter.shape, self._rank, target.key, period, parameter.device)
            if period not in self._kept:
                return made
            kept[target.name] = made
        return kept[target.name]

    def move(self, period: int) -> None:
        """Makes `period` the current one: folds those before it, and refreshes."""
        self._fold(period)
        self._period = period
        self.refresh()

    def added(self, sums: Mapping[int, Tensor]) -> None:
        """Notes what was absorbed."""
        for period, extra in sums.items():
            if period < self._folded:
                self.late[period] = self.late[period] + extra if period in self.late else extra

    def refresh(self) -> None:
        """Writes the weights."""
        state = self._state
        pending = sorted(self.late.items())
        pending += [(period, state.sums[period]) for period in sorted(state.sums) if period >= self._folded]
        self._keep([period for period, _ in pending])
        for index, target in enumerate(self._matrices):
            self._write(target, self._source(), target.parameter, [(s, sums[index]) for s, sums in pending])
        self._write_small()

    def rebuild(self) -> None:
        """Sums everything from the base again where something came late, and writes the weights."""
        self._fold(self._folded)
        self.refresh()

    def reset(self) -> None:
        """After the state was replaced: forgets what was folded and sums everything from the base."""
        self._folded, self._anchored, self.late = 0, False, {}
        self.move(self._period)

    def _keep(self, used: Sequence[int]) -> None:
        """Drops all factors but the current period's and those of the newest periods in use."""
        others = [period for period in used if period != self._period][-self._cached + 1 :] if self._cached > 1 else []
        self._kept = {period: self._kept.get(period, {}) for period in (self._period, *others)}

    def _source(self) -> Mapping[str, Tensor]:
        return self._anchor if self._anchored and self._anchor is not None else self._base

    def _fold(self, end: int) -> None:
        """Brings the periods below `end` into the anchor: appends them, or begins from the base if some came late."""
        if self.late:
            self._anchored = False  # what is folded may be less than before: a period may be gone
        source, start = (self._base, 0) if self.late else (self._source(), self._folded)
        folding = [period for period in sorted(self._state.sums) if start <= period < end]
        if folding:
            if self._anchor is None:
                self._anchor = {target.name: torch.empty(target.parameter.shape) for target in self._matrices}
            for index, target in enumerate(self._matrices):
                parts = [(period, self._state.sums[period][index]) for period in folding]
                self._write(target, source, self._anchor[target.name], parts)
            self._anchored = True
        self._folded, self.late = end, {}

    def _write(
        self, target: Target, source: Mapping[str, Tensor], destination: Tensor, parts: Sequence[tuple[int, Tensor]]
    ) -> None:
        """destination = source + weight * sum of parts, in order, in float32, a piece at a time.

        A piece is summed where it will lie if memory made for it alone would be alike, else in such memory: a product
        may round differently elsewhere. The factors of a few periods are held at a time, where many are summed; what
        is summed between them lies in a float32 destination, else in memory of the tensor's size.
        """
        shape = folded_shape(target.parameter.shape)
        original, written = source[target.name].view(shape), destination.detach().view(shape)
        between = written
        if len(parts) > _AT_ONCE and written.dtype != torch.float32:  # 16 bits would round in between
            between = torch.empty(shape, dtype=torch.float32, device=target.parameter.device)
        while len(parts) > _AT_ONCE:
            self._write_some(target, original, between, parts[:_AT_ONCE])
            original, parts = between, parts[_AT_ONCE:]
        self._write_some(target, original, written, parts)

    def _write_some(
        self, target: Target, original: Tensor, written: Tensor, parts: Sequence[tuple[int, Tensor]]
    ) -> None:
        device = target.parameter.device
        with torch.no_grad():
            found = [(self.subspace(target, period), sums) for period, sums in parts]
            summed = [(subspace, subspace.combined(sums, self._weight)) for subspace, sums in found]
            for rows in target.pieces():
                end = written[rows]
                begin = (end if original is written else original[rows]).to(device, torch.float32)
                total = end if _as_if_made(end) and end.device == device else torch.empty_like(begin)
                for subspace, combined in summed:
                    begin = subspace.add(begin, rows.start, combined, total)
                if begin is not end:
                    end.copy_(begin)

    def _write_small(self) -> None:
        """base + weight * sums: the sum is one of all periods, so that nothing is folded and nothing comes late."""
        moved = (self._state.small.double() * (self._weight * 2.0**-NORMAL_BITS)).float()
        with torch.no_grad():
            for target, part in zip(self._small, self._layout.split(moved), strict=True):
                original = self._base[target.name].view(-1).to(torch.float32)
                target.parameter.view(-1).copy_(original + part.to(original.device))


def _as_if_made(piece: Tensor) -> bool:
    """Whether it lies as a new float32 tensor of its shape would: in rows without gaps, from a cache line on."""
    return piece.dtype == torch.float32 and piece.is_contiguous() and piece.data_ptr() % _CACHE_LINE == 0


def _copies(targets: Sequence[Target]) -> dict[str, Tensor]:
    return {target.name: target.parameter.detach().to("cpu", copy=True) for target in targets}


def _check_store(
    what: str, store: Mapping[str, Tensor], targets: Sequence[Target], dtype: torch.dtype | None = None
) -> None:
    for target in targets:
        if target.name not in store:
            raise ValueError(f"the {what} has no tensor {target.name}")
        found = store[target.name]
        if found.shape != target.parameter.shape or not found.is_contiguous():
            raise ValueError(f"the {what}'s {target.name} must be contiguous, of shape {tuple(target.parameter.shape)}")
        if dtype is not None and found.dtype != dtype:
            raise ValueError(f"the {what}'s {target.name} must be {dtype}, not {found.dtype}")
