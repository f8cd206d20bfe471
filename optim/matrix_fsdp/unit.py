"""One unit of a sharded model: its memory at rest, its full buffer, its gradients on the way to their owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from peerloom.optim.matrix_fsdp.layout import Parcel, lay_out
from peerloom.optim.matrix_fsdp.links import Links, Pending, ReplicaLinks, flat
from peerloom.optim.matrix_fsdp.modules import UnitModules
from peerloom.optim.matrix_fsdp.planner import Piece, Shape, UnitPlan, numel

_TAGS_A_UNIT = 1 << 12  # more than a unit has extents
_FIRST_TAG = 16
_CPU_CHUNK = 1 << 15  # elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """What parameters are at rest, in the forward pass, and gradients on the way; `sum` is for adding those up."""

    rest: torch.dtype
    forward: torch.dtype
    reduce: torch.dtype

    @property
    def sum(self) -> torch.dtype:
        """At least fp32: sums in 16 bits would lose what small gradients have to say, the more the more ranks."""
        return torch.promote_types(torch.promote_types(self.rest, self.reduce), torch.float32)


def dtypes_of(unit: UnitModules, mp: MixedPrecisionPolicy) -> Dtypes:
    """Those of a unit before it is sharded."""
    rest = unit.found[0].parameter.dtype if unit.found else torch.float32
    forward = mp.param_dtype or rest
    return Dtypes(rest=rest, forward=forward, reduce=mp.reduce_dtype or forward)


class Unit:
    """At rest a rank keeps the pieces it owns, in one flat tensor; the modules hold those, or empty tensors.

    Open, the modules hold whole parameters: views of one full buffer whose storage is emptied when the unit closes and
    filled again, at another address, when it opens. What autograd saved in between are views of the same storage, so
    they become valid again, and no buffer is ever lent to another unit while a graph points at it.
    """

    def __init__(
        self, index: int, modules: UnitModules, plan: UnitPlan, dtypes: Dtypes, device: torch.device, links: Links,
        replicas: ReplicaLinks | None,
    ) -> None:  # fmt: skip
        self.name, self.module, self.plan = plan.name, modules.module, plan
        self._links, self._replicas, self._dtypes, self.device = links, replicas, dtypes, device
        self._places = {found.name: found.places for found in modules.found}
        self.trainable = {found.name for found in modules.found if found.parameter.requires_grad}
        self.layout = lay_out(plan, self._places)
        self.grad_layout = lay_out(plan, self.trainable)
        self._tag = _FIRST_TAG + index * 2 * _TAGS_A_UNIT
        self.pieces: dict[str, Piece] = {}
        self._take_own(modules)
        self._make_full()
        modules.found.clear()  # the whole parameters go as soon as their modules have let go of them
        self._gathering: Pending | None = None
        self._filled = False
        self._parcels = self.grad_layout.parcels()
        self._gradients: dict[str, Tensor] = {}  # whole ones, as autograd has handed them over
        self._parts: list[Tensor] = []  # of them, a parcel's each
        self._inbox: list[Tensor] = []
        self._reducing: Pending | None = None
        self.close()

    @property
    def has_frozen(self) -> bool:
        return len(self.trainable) < len(self._places)

    @property
    def is_full(self) -> bool:
        """Whether the full buffer has its memory."""
        return self._filled

    # ---- parameters

    def start_open(self) -> None:
        """Begins to gather the whole parameters; nothing when that was done."""
        if self._filled:
            return
        self._filled = True
        if self._alone:
            return
        self._storage.resize_(self._storage_bytes)
        for extent in self.layout.of(self._links.rank):
            mine = self._own[extent.owned_start : extent.owned_start + extent.numel]
            self._wire[extent.full_start : extent.full_start + extent.numel].copy_(mine)
        self._gathering = self._links.fan_out(self.layout.extents, self._wire, self._tag, f"gathering {self.name}")

    def open(self) -> None:
        """Puts the whole parameters in their modules. Raises RankLost."""
        self.start_open()
        if self._gathering is not None:
            self._gathering.wait_for_incoming()
        self._install(self.whole)

    def close(self) -> None:
        """Puts the own pieces back in the modules and frees the full buffer. Raises RankLost."""
        if self._gathering is not None:  # others may be behind, or this one was prefetched and not used
            self._gathering.wait()
            self._gathering = None
        self._install(self.sharded)
        self._filled = False
        if not self._alone:
            self._storage.resize_(0)

    # ---- gradients

    def on_gradient(self, then: Callable[[str], None]) -> None:
        """Calls `then(name)` for each whole parameter whose gradient of this backward pass was taken."""
        for name in self.trainable:
            register: Callable[[Callable[[Tensor], None]], object] = self.whole[name].register_post_accumulate_grad_hook
            register(self._taker(name, then))

    def start_reduce(self) -> None:
        """Sends every gradient to its owner; what no backward pass has reached counts as zero."""
        if self._reducing is not None or not self.trainable:
            return
        for name in self.trainable - self._gradients.keys():
            self._gradients[name] = torch.zeros_like(self.whole[name], dtype=self._dtypes.reduce)
        self._parts = [self._part(parcel) for parcel in self._parcels]
        self._gradients = {}
        mine = self.grad_layout.owned_numel[self._links.rank]
        self._inbox = [flat(mine, self._dtypes.reduce, self.device) for _ in range(self._links.world_size - 1)]
        self._reducing = self._links.fan_in(
            self._parcels, self._parts, self._inbox, self._tag + _TAGS_A_UNIT, f"reducing {self.name}"
        )

    def finish_reduce(self) -> None:
        """Adds up what arrived, in rank order, and leaves the mean as `.grad` of the own pieces. Raises RankLost.

        It is rounded to the dtype at rest once, at the end.
        """
        if self._reducing is None:
            return
        self._reducing.wait()
        if self._replicas is None:
            total = self._sum_in_rank_order(by=self._links.world_size)
        else:
            total = self._sum_in_rank_order(by=1)
            self._replicas.start_sum(total, f"reducing {self.name}").wait()
            total.div_(self._links.world_size * self._replicas.world_size)
        self._forget_gradients()
        total = total.to(self._dtypes.rest)
        for piece, start in self.grad_layout.owned[self._links.rank]:
            if piece.numel:
                _accumulate(self.sharded[piece.name], total[start : start + piece.numel].view(piece.shape))

    def drop_gradients(self) -> None:
        """Forgets gradients that no owner has yet: those of a backward pass that failed. Raises RankLost."""
        if self._reducing is not None:
            self._reducing.wait()  # the transfer under way must not meet the next one
        self._forget_gradients()

    @property
    def has_reduced(self) -> bool:
        return self._reducing is not None

    # ---- inside

    def _take_own(self, modules: UnitModules) -> None:
        rank = self._links.rank
        parameters = {found.name: found.parameter for found in modules.found}
        self._own = flat(self.layout.owned_numel[rank], self._dtypes.rest, self.device)
        self.sharded = {
            name: nn.Parameter(flat(0, self._dtypes.rest, self.device), requires_grad=name in self.trainable)
            for name in parameters
        }
        for piece, start in self.layout.owned[rank]:
            if not piece.numel:
                continue
            mine = self._own[start : start + piece.numel].view(piece.shape)
            mine.copy_(parameters[piece.name].detach()[piece.first_row : piece.first_row + piece.shape[0]])
            self.sharded[piece.name] = nn.Parameter(mine, requires_grad=piece.name in self.trainable)
            self.pieces[piece.name] = piece

    def _make_full(self) -> None:
        """With one rank and one dtype, the memory at rest is the full buffer."""
        forward = self._dtypes.forward
        self._alone = self._links.world_size == 1 and forward == self._dtypes.rest
        full = self._own if self._alone else flat(self.layout.numel, forward, self.device)
        self._storage = full.untyped_storage()
        self._storage_bytes = self._storage.nbytes()
        # apart from the parameters' tensors: filling it must not count as a change of what autograd saved
        self._wire = self._view_of_full(0, (self.layout.numel,))
        self.whole: dict[str, nn.Parameter] = {}
        for name, start in self.layout.starts.items():
            view = self._view_of_full(start, self.plan.shapes[name])
            self.whole[name] = nn.Parameter(view, requires_grad=name in self.trainable)

    def _view_of_full(self, start: int, shape: Shape) -> Tensor:
        """A tensor on the full buffer's storage with a version counter of its own."""
        tensor = torch.empty(0, dtype=self._dtypes.forward, device=self.device)
        strides = [numel(shape[at + 1 :]) for at in range(len(shape))]
        return tensor.set_(self._storage, start, shape, strides)

    def _install(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, places in self._places.items():
            for module, attribute in places:
                module._parameters[attribute] = parameters[name]

    def _taker(self, name: str, then: Callable[[str], None]) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None  # ours: autograd has just accumulated it
            gradient = gradient.to(self._dtypes.reduce)
            if name in self._gradients:
                self._gradients[name].add_(gradient)
            else:
                self._gradients[name] = gradient
            parameter.grad = None
            then(name)

        return take

    def _part(self, parcel: Parcel) -> Tensor:
        """Its content, flat: of a single piece without a copy."""
        parts = []
        for piece in parcel.pieces:
            gradient = self._gradients[piece.name]
            begin = piece.first_row * numel(piece.shape[1:])
            parts.append(gradient.reshape(-1)[begin : begin + piece.numel])
            if piece.numel == gradient.numel():
                del self._gradients[piece.name]  # no more than a parcel is there twice
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sum_in_rank_order(self, by: int) -> Tensor:
        """The sum, in `Dtypes.sum`, divided; in one order whatever rank adds, so that it is the same bit for bit."""
        rank, world_size = self._links.rank, self._links.world_size
        mine = [(each, part) for each, part in zip(self._parcels, self._parts, strict=True) if each.owner == rank]
        if world_size == 1:
            return torch.cat([part for _, part in mine]).to(self._dtypes.sum)
        # what came from the lowest other rank takes up the rest; on rank 0 the first two change places: a + b = b + a
        rows = {(rank + distance) % world_size: row for distance, row in enumerate(self._inbox, 1)}
        total = rows.pop(1 if rank == 0 else 0).to(self._dtypes.sum)
        for parcel, part in mine:
            for begin, end in _chunks(parcel.numel, self.device):
                place = slice(parcel.owned_start + begin, parcel.owned_start + end)
                addends = {source: row[place] for source, row in rows.items()} | {rank: part[begin:end]}
                into = total[place]
                for source in sorted(addends):
                    into.add_(addends[source])
                if by > 1:
                    into.div_(by)
        return total

    def _forget_gradients(self) -> None:
        self._gradients, self._reducing = {}, None
        self._parts, self._inbox = [], []


def _chunks(count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """(begin, end) of runs of elements: on the CPU as many as stay in its cache while all ranks' are added up."""
    size = _CPU_CHUNK if device.type == "cpu" else max(1, count)
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
