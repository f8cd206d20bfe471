"""A unit whose values and gradients lie where all ranks look at them: see `board`, which says why that is safe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peerloom.optim.matrix_fsdp.board import Board, word_of
from peerloom.optim.matrix_fsdp.carrier import PartsOf, add_in_order, chunks, flat, joined
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
        self._find_places(board.layout.slot_of[index])
        self._mine: list[Tensor] = []
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
        for parcel, places in zip(parcels, self._outgoing, strict=True):
            parts = parts_of(parcel)
            if parcel.owner == self._links.rank:
                part = joined(parts)
                self._mine += [part[begin:end] for begin, end in chunks(parcel.numel, _CPU)]
            for place, part in zip(places, parts, strict=False):
                place.copy_(part)
        self._words.say(self._word, f"reducing {self._name}")
        self._said = True

    def add_up(self, by: int) -> Tensor:
        self._wait()
        total = flat(self._gradients.owned_numel[self._links.rank], self._dtypes.sum, _CPU)
        places = total.split_with_sizes(self._sizes)
        for place, part, (lower, higher) in zip(places, self._mine, self._incoming, strict=True):
            add_in_order([*lower, part, *higher], place, by)
        self._mine = []
        return total

    def drop(self) -> None:
        self._wait()
        self._mine = []

    def _wait(self) -> None:
        if self._said:
            self._words.hear(self._word, f"reducing {self._name}")
            self._said = False

    def _find_places(self, slot: int) -> None:
        """Where to write, and what to read from ranks below this one and above; found once, as it takes its time."""
        mine, others = self._links.rank, [rank for rank in range(self._links.world_size) if rank != self._links.rank]
        sent = {to: self._part_of_slot(slot, mine, to) for to in others}
        rows = {source: self._part_of_slot(slot, source, mine) for source in others}
        self._outgoing: list[list[Tensor]] = []  # of each parcel, by piece; none of an own one
        self._incoming: list[tuple[list[Tensor], list[Tensor]]] = []  # of each run of own elements
        self._sizes: list[int] = []
        for parcel in self._gradients.parcels():
            span = slice(parcel.owned_start, parcel.owned_start + parcel.numel)
            if parcel.owner != mine:
                sizes = [piece.numel for piece in parcel.pieces]
                self._outgoing.append([*sent[parcel.owner][span].split_with_sizes(sizes)])
                continue
            self._outgoing.append([])
            for begin, end in chunks(parcel.numel, _CPU):
                place = slice(parcel.owned_start + begin, parcel.owned_start + end)
                lower, higher = ([rows[r][place] for r in others if (r < mine) == below] for below in (True, False))
                self._incoming.append((lower, higher))
                self._sizes.append(end - begin)

    def _part_of_slot(self, slot: int, source: int, to: int) -> Tensor:
        """What `source` has for `to`: in its slot there is one such part an owner, its own left out."""
        sizes = self._gradients.owned_numel
        before = sum(size for owner, size in enumerate(sizes) if owner < to and owner != source)
        dtype = self._dtypes.reduce
        first = self._board.layout.slots[source][slot] + before * dtype.itemsize
        return self._board.view(first, (sizes[to],), dtype)
