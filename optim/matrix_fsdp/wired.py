"""A unit whose values and gradients are sent: each rank has memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peerloom.optim.matrix_fsdp.carrier import PartsOf, add_in_order, chunks, flat, joined
from peerloom.optim.matrix_fsdp.dtypes import Dtypes
from peerloom.optim.matrix_fsdp.layout import Parcel, UnitLayout, contiguous
from peerloom.optim.matrix_fsdp.links import Links, Pending, gather_tag, reduce_tag
from peerloom.optim.matrix_fsdp.planner import Piece, Shape


class Wired:
    """At rest the owned pieces are one flat tensor; the full buffer's storage is emptied when it is not needed.

    With one rank and one dtype the memory at rest is the full buffer.
    """

    def __init__(
        self, index: int, name: str, layouts: tuple[UnitLayout, UnitLayout], dtypes: Dtypes, device: torch.device,
        links: Links,
    ) -> None:  # fmt: skip
        self._name, self._links, self._dtypes, self._device = name, links, dtypes, device
        self._layout, self._gradients = layouts
        self._gather_tag, self._reduce_tag = gather_tag(index), reduce_tag(index)
        self._own = flat(self._layout.owned_numel[links.rank], dtypes.rest, device)
        self._alone = links.world_size == 1 and dtypes.forward == dtypes.rest
        full = self._own if self._alone else flat(self._layout.numel, dtypes.forward, device)
        self._storage = full.untyped_storage()
        self._storage_bytes = self._storage.nbytes()
        # apart from the parameters' tensors: filling it must not count as a change of what autograd saved
        self._wire = self.whole(0, (self._layout.numel,))
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._sent: list[tuple[Parcel, Tensor]] = []
        self._inbox: list[Tensor] = []

    def at_rest(self, piece: Piece, start: int) -> Tensor:
        return self._own[start : start + piece.numel].view(piece.shape)

    def whole(self, start: int, shape: Shape) -> Tensor:
        tensor = torch.empty(0, dtype=self._dtypes.forward, device=self._device)
        return tensor.set_(self._storage, start, shape, contiguous(shape))

    def publish(self) -> None:
        """Nobody looks at it: it is sent."""

    def begin_fill(self) -> None:
        if self._alone:
            return
        self._storage.resize_(self._storage_bytes)
        for extent in self._layout.of(self._links.rank):
            mine = self._own[extent.owned_start : extent.owned_start + extent.numel]
            self._wire[extent.full_start : extent.full_start + extent.numel].copy_(mine)
        what = f"gathering {self._name}"
        self._gathering = self._links.fan_out(self._layout.extents, self._wire, self._gather_tag, what)

    def fill(self) -> None:
        if self._gathering is not None:
            self._gathering.wait_for_incoming()

    def empty(self) -> None:
        if self._gathering is not None:  # others may be behind, or this one was prefetched and not used
            self._gathering.wait()
            self._gathering = None
        if not self._alone:
            self._storage.resize_(0)

    def send(self, parcels: Sequence[Parcel], parts_of: PartsOf) -> None:
        parts = [joined(parts_of(parcel)) for parcel in parcels]
        self._sent = [*zip(parcels, parts, strict=True)]
        mine = self._gradients.owned_numel[self._links.rank]
        self._inbox = [flat(mine, self._dtypes.reduce, self._device) for _ in range(self._links.world_size - 1)]
        self._reducing = self._links.fan_in(
            parcels, parts, self._inbox, self._reduce_tag, f"reducing {self._name}"
        )

    def add_up(self, by: int) -> Tensor:
        self._wait()
        rank, world_size = self._links.rank, self._links.world_size
        mine = [(parcel, part) for parcel, part in self._sent if parcel.owner == rank]
        if world_size == 1:
            total = torch.cat([part for _, part in mine]).to(self._dtypes.sum)
        else:
            rows = {(rank + distance) % world_size: row for distance, row in enumerate(self._inbox, 1)}
            total = rows[1 if rank == 0 else 0]  # the sum takes its place
            if total.dtype != self._dtypes.sum:
                total = flat(total.numel(), self._dtypes.sum, self._device)
            for parcel, part in mine:
                for begin, end in chunks(parcel.numel, self._device):
                    place = slice(parcel.owned_start + begin, parcel.owned_start + end)
                    addends = {source: row[place] for source, row in rows.items()} | {rank: part[begin:end]}
                    add_in_order([addends[source] for source in sorted(addends)], total[place], by)
        self._forget()
        return total

    def drop(self) -> None:
        self._wait()  # the transfer under way must not meet the next one
        self._forget()

    def _wait(self) -> None:
        if self._reducing is not None:
            self._reducing.wait()

    def _forget(self) -> None:
        self._sent, self._inbox, self._reducing = [], [], None
