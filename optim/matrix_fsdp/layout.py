"""Where a unit's parameters lie: once in the memory at rest of each rank, once in the full buffer between the ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from peerloom.optim.matrix_fsdp.planner import Piece, UnitPlan, numel

ALONE_FROM = 1 << 17  # elements, half a MiB of fp32: below it one more message takes longer than a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of elements that one rank owns, contiguous in the full buffer and in the owner's memory."""

    owner: int
    full_start: int
    owned_start: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Pieces of one owner that lie one after the other in its memory, `numel` elements of them."""

    owner: int
    pieces: tuple[Piece, ...]
    owned_start: int
    numel: int

    def with_next(self, piece: Piece) -> Parcel:
        """One more, which lies after the last."""
        return replace(self, pieces=(*self.pieces, piece), numel=self.numel + piece.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """Elements, not bytes. `starts` is where each whole parameter begins in the full buffer."""

    numel: int
    starts: dict[str, int]
    extents: tuple[Extent, ...]
    owned: tuple[tuple[tuple[Piece, int], ...], ...]  # of each rank: what it holds, and where in its memory
    owned_numel: tuple[int, ...]

    def of(self, rank: int) -> list[Extent]:
        """The extents of one owner, in the order of its memory."""
        return [extent for extent in self.extents if extent.owner == rank]

    def place_of(self, piece: Piece) -> int:
        """Where a piece begins in the full buffer."""
        return self.starts[piece.name] + piece.first_row * numel(piece.shape[1:])

    def parcels(self) -> tuple[Parcel, ...]:
        """All pieces as they travel to their owners: a large one alone, from where it lies; small neighbours as one."""
        found: list[Parcel] = []
        for owner, held in enumerate(self.owned):
            small = False
            for piece, inside in ((piece, inside) for piece, inside in held if piece.numel):
                was_small, small = small, piece.numel < ALONE_FROM
                if was_small and small:
                    found[-1] = found[-1].with_next(piece)
                else:
                    found.append(Parcel(owner=owner, pieces=(piece,), owned_start=inside, numel=piece.numel))
        return tuple(found)


def lay_out(unit: UnitPlan, names: Collection[str]) -> UnitLayout:
    """Lays out the parameters in `names`: each whole one a contiguous part of its owner's one segment, then the spread.

    A spread parameter lies whole in the full buffer, its rows in rank order, and so gives an extent a rank.
    """
    starts: dict[str, int] = {}
    extents: list[Extent] = []
    owned: list[tuple[tuple[Piece, int], ...]] = []
    at, owned_numel = 0, []
    for rank in range(unit.world_size):
        begin, held, inside = at, [], 0
        for piece in (piece for piece in unit.pieces(rank) if piece.name in names):
            held.append((piece, inside))
            inside += piece.numel
            if piece.name not in unit.spread:
                starts[piece.name] = at
                at += piece.numel
        if at > begin:
            extents.append(Extent(owner=rank, full_start=begin, owned_start=0, numel=at - begin))
        owned.append(tuple(held))
        owned_numel.append(inside)
    for name in (name for name in unit.spread if name in names):
        starts[name] = at
        for rank, held_by in enumerate(owned):
            piece, inside = next(found for found in held_by if found[0].name == name)
            if piece.numel:
                extents.append(Extent(owner=rank, full_start=at, owned_start=inside, numel=piece.numel))
            at += piece.numel
    return UnitLayout(
        numel=at, starts=starts, extents=tuple(extents), owned=tuple(owned), owned_numel=tuple(owned_numel)
    )


def contiguous(shape: Sequence[int]) -> list[int]:
    """The strides of a tensor that lies without a gap."""
    return [numel(tuple(shape[at + 1 :])) for at in range(len(shape))]
