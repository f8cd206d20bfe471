"""A unit whose values and gradients lie where all ranks look at them: see `board`, which says why that is safe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peerloom.optim.matrix_fsdp.board import Board, word_of
from peerloom.optim.matrix_fsdp.carrier import PartsOf, add_in_rank_order, flat, joined
from peerloom.optim.matrix_fsdp.dtypes import Dtypes
from peerloom.optim.matrix_fsdp.layout import Parcel, UnitLayout
from peerloom.optim.matrix_fsdp.links import Links
from peerloom.optim.matrix_fsdp.planner import Piece, Shape

_CPU = torch.device("cpu")


class Boarded:
    """The full buffer is on the board, and the owned pieces rest in it, or with another dtype beside it."""

    def __init__(
        self, index: int, name: str, layouts: tuple[UnitLayout, UnitLayout], dtypes: Dtypes, board: Board, links: Links
    ) -> None:
        self._name, self._links, self._dtypes, self._board = name, links, dtypes, board
        self._layout, self._gradients = layouts
        self._words, self._word = board.words, word_of(index)
        self._first = board.layout.fulls[index]
        self._apart = dtypes.rest != dtypes.forward
        self._full = self.whole(0, (self._layout.numel,))
        self._own = flat(self._layout.owned_numel[links.rank] if self._apart else 0, dtypes.rest, _CPU)
        slot = board.layout.slot_of[index]
        ranks = range(links.world_size)
        others = [rank for rank in ranks if rank != links.rank]
        self._outgoing = {to: self._part_of_slot(slot, links.rank, to) for to in others}
        self._incoming = {source: self._part_of_slot(slot, source, links.rank) for source in others}
        self._mine: list[tuple[Parcel, Tensor]] = []
        self._said = False

    def at_rest(self, piece: Piece, start: int) -> Tensor:
        if self._apart:
            return self._own[start : start + piece.numel].view(piece.shape)
        return self.whole(self._layout.place_of(piece), piece.shape)

    def whole(self, start: int, shape: Shape) -> Tensor:
        dtype = self._dtypes.forward
        return self._board.view(self._first + start * dtype.itemsize, shape, dtype)

    def publish(self) -> None:
        if self._apart:
            for extent in self._layout.of(self._links.rank):
                mine = self._own[extent.owned_start : extent.owned_start + extent.numel]
                self._full[extent.full_start : extent.full_start + extent.numel].copy_(mine)

    def begin_fill(self) -> None:
        """It is there."""

    def fill(self) -> None:
        """It is there."""

    def empty(self) -> None:
        """It stays."""

    def send(self, parcels: Sequence[Parcel], parts_of: PartsOf) -> None:
        for parcel in parcels:
            parts = parts_of(parcel)
            if parcel.owner == self._links.rank:
                self._mine.append((parcel, joined(parts)))
                continue
            at = parcel.owned_start
            for part in parts:
                self._outgoing[parcel.owner][at : at + part.numel()].copy_(part)
                at += part.numel()
        self._words.say(self._word, f"reducing {self._name}")
        self._said = True

    def add_up(self, by: int) -> Tensor:
        self._wait()
        total = flat(self._gradients.owned_numel[self._links.rank], self._dtypes.sum, _CPU)
        add_in_rank_order(self._mine, self._links.rank, self._incoming, total, by)
        self._mine = []
        return total

    def drop(self) -> None:
        self._wait()
        self._mine = []

    def _wait(self) -> None:
        if self._said:
            self._words.hear(self._word, f"reducing {self._name}")
            self._said = False

    def _part_of_slot(self, slot: int, source: int, to: int) -> Tensor:
        """What `source` has for `to`: in its slot there is one such part an owner, its own left out."""
        sizes = self._gradients.owned_numel
        before = sum(size for owner, size in enumerate(sizes) if owner < to and owner != source)
        dtype = self._dtypes.reduce
        first = self._board.layout.slots[source][slot] + before * dtype.itemsize
        return self._board.view(first, (sizes[to],), dtype)
