"""One unit of a sharded model: what its modules hold, open and at rest, and its gradients as autograd gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from peerloom.optim.matrix_fsdp.carrier import Carrier, flat
from peerloom.optim.matrix_fsdp.dtypes import Dtypes
from peerloom.optim.matrix_fsdp.layout import Parcel, UnitLayout
from peerloom.optim.matrix_fsdp.links import ReplicaLinks
from peerloom.optim.matrix_fsdp.modules import UnitModules
from peerloom.optim.matrix_fsdp.planner import Piece, UnitPlan, numel


class Unit:
    """At rest a rank keeps the pieces it owns, and the modules hold those, or empty tensors.

    Open, the modules hold whole parameters: views of one full buffer, whose storage (`Wired`) is emptied when the unit
    closes and filled again, at another address, when it opens, or which (`Boarded`) is always there. What autograd
    saved in between are views of the same storage, so they become valid again, and no buffer is ever lent to another
    unit while a graph points at it.
    """

    def __init__(
        self, modules: UnitModules, plan: UnitPlan, layouts: tuple[UnitLayout, UnitLayout], dtypes: Dtypes,
        rank: int, device: torch.device, carrier: Carrier, replicas: ReplicaLinks | None,
    ) -> None:  # fmt: skip
        self.name, self.module, self.plan, self.device = plan.name, modules.module, plan, device
        self._rank, self._carrier, self._replicas, self._dtypes = rank, carrier, replicas, dtypes
        self._places = {found.name: found.places for found in modules.found}
        self.trainable = trained(modules)
        self.layout, self.grad_layout = layouts
        self.pieces: dict[str, Piece] = {}
        self._take_own(modules)
        self.whole = {
            name: nn.Parameter(carrier.whole(start, plan.shapes[name]), requires_grad=name in self.trainable)
            for name, start in self.layout.starts.items()
        }
        modules.found.clear()  # the whole parameters go as soon as their modules have let go of them
        self._filled, self._installed = False, False
        self._parcels = self.grad_layout.parcels()
        self._gradients: dict[str, Tensor] = {}  # whole ones, as autograd has handed them over
        self._trained_here = [piece for piece, _ in self.grad_layout.owned[rank] if piece.numel]
        self._reducing = False
        self._install(self.sharded)
        carrier.empty()

    @property
    def has_frozen(self) -> bool:
        return len(self.trainable) < len(self._places)

    @property
    def is_full(self) -> bool:
        """Whether it is open, or about to be."""
        return self._filled

    # ---- parameters

    def publish(self) -> None:
        """Before a forward pass; see `Carrier`."""
        self._carrier.publish()

    def start_open(self) -> None:
        """Begins to gather the whole parameters; nothing when that was done."""
        if not self._filled:
            self._filled = True
            self._carrier.begin_fill()

    def open(self) -> None:
        """Puts the whole parameters in their modules. Raises RankLost."""
        self.start_open()
        self._carrier.fill()
        if not self._installed:
            self._installed = True
            self._install(self.whole)

    def close(self) -> None:
        """Puts the own pieces back in the modules and frees the full buffer; nothing when closed. Raises RankLost."""
        if not self._filled:
            return
        if self._installed:
            self._install(self.sharded)
        self._filled, self._installed = False, False
        self._carrier.empty()

    # ---- gradients

    def on_gradient(self, then: Callable[[str], None]) -> None:
        """Calls `then(name)` for each whole parameter whose gradient of this backward pass was taken."""
        for name in self.trainable:
            register: Callable[[Callable[[Tensor], None]], object] = self.whole[name].register_post_accumulate_grad_hook
            register(self._taker(name, then))

    def start_reduce(self) -> None:
        """Sends every gradient to its owner; what no backward pass has reached counts as zero."""
        for name in self.trainable - self._gradients.keys():
            self._gradients[name] = torch.zeros_like(self.whole[name], dtype=self._dtypes.reduce)
        self._reducing = True
        self._carrier.send(self._parcels, self._parts_of)
        self._gradients = {}

    def finish_reduce(self) -> None:
        """Adds up what arrived, in rank order, and leaves the mean as `.grad` of the own pieces. Raises RankLost.

        It is rounded to the dtype at rest once, at the end.
        """
        if self._replicas is None:
            total = self._carrier.add_up(by=self.plan.world_size)
        else:
            total = self._carrier.add_up(by=1)
            self._replicas.start_sum(total, f"reducing {self.name}").wait()
            total.div_(self.plan.world_size * self._replicas.world_size)
        self._reducing = False
        parts = total.to(self._dtypes.rest).split_with_sizes([piece.numel for piece in self._trained_here])
        for piece, part in zip(self._trained_here, parts, strict=True):
            _accumulate(self.sharded[piece.name], part.view(piece.shape))

    def drop_gradients(self) -> None:
        """Forgets gradients that no owner has yet: those of a backward pass that failed. Raises RankLost."""
        if self._reducing:
            self._carrier.drop()
        self._gradients, self._reducing = {}, False

    # ---- inside

    def _take_own(self, modules: UnitModules) -> None:
        parameters = {found.name: found.parameter for found in modules.found}
        self.sharded = {
            name: nn.Parameter(flat(0, self._dtypes.rest, self.device), requires_grad=name in self.trainable)
            for name in parameters
        }
        for piece, start in self.layout.owned[self._rank]:
            if not piece.numel:
                continue
            mine = self._carrier.at_rest(piece, start)
            mine.copy_(parameters[piece.name].detach()[piece.first_row : piece.first_row + piece.shape[0]])
            self.sharded[piece.name] = nn.Parameter(mine, requires_grad=piece.name in self.trainable)
            self.pieces[piece.name] = piece

    def _install(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, places in self._places.items():
            for module, attribute in places:
                module._parameters[attribute] = parameters[name]

    def _taker(self, name: str, then: Callable[[str], None]) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None  # ours: autograd has just accumulated it
            if gradient.dtype != self._dtypes.reduce:
                gradient = gradient.to(self._dtypes.reduce)
            if name in self._gradients:
                self._gradients[name].add_(gradient)
            else:
                self._gradients[name] = gradient
            parameter.grad = None
            then(name)

        return take

    def _parts_of(self, parcel: Parcel) -> list[Tensor]:
        """Its pieces' gradients, flat, without a copy."""
        parts = []
        for piece in parcel.pieces:
            gradient = self._gradients[piece.name].reshape(-1)
            if piece.numel == gradient.numel():
                del self._gradients[piece.name]  # no more than a parcel is there twice
            else:
                begin = piece.first_row * numel(piece.shape[1:])
                gradient = gradient[begin : begin + piece.numel]
            parts.append(gradient)
        return parts


def trained(modules: UnitModules) -> set[str]:
    """Names of the parameters of a unit that are trained."""
    return {found.name for found in modules.found if found.parameter.requires_grad}


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
