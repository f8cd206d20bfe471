"""MatrixFSDP (arXiv 2607.05895): whole matrices, each at rest on one rank, gathered around a unit's computation.

A step: a unit is gathered from its owners before its forward pass, and again before its backward pass if it was freed;
gradients go to the owners, as a mean, while the next unit computes; the optimizer then has nothing to send. Ranks that
share memory (`board`) gather nothing: they wait for each other where a pass begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from peerloom.optim.matrix_fsdp.board import BACKWARD_ENDS, FORWARD_BEGINS, FORWARD_ENDS, Board
from peerloom.optim.matrix_fsdp.links import Links, Traffic
from peerloom.optim.matrix_fsdp.planner import OwnerPlan, Piece
from peerloom.optim.matrix_fsdp.reductions import Reductions
from peerloom.optim.matrix_fsdp.trees import cast, on_gradient, tensors_in
from peerloom.optim.matrix_fsdp.unit import Unit

REDUCTIONS_KEPT = 3  # under way at a time where units stay open, whose memory a replica's would not be short of
_ATTRIBUTE = "_matrix_fsdp"
_NO_BACKWARD = -1  # the id of the graph task outside of any backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """One parameter, or the rows of it, that this rank owns: what the optimizer sees."""

    name: str
    piece: Piece
    whole_shape: tuple[int, ...]
    parameter: nn.Parameter

    @property
    def is_whole(self) -> bool:
        return self.piece.shape == self.whole_shape


class ShardedModel:
    """A model whose parameters rest on their owners; call the model itself, as before.

    `board` is the memory that its ranks share, None where they send.
    """

    def __init__(
        self, model: nn.Module, plan: OwnerPlan, units: list[Unit], links: Links, board: Board | None, *,
        reshard_after_forward: bool, mp: MixedPrecisionPolicy, outer: frozenset[str],
    ) -> None:  # fmt: skip
        self.model, self.plan, self.units, self.links, self.board = model, plan, units, links, board
        self.outer = outer  # embeddings and head: AdamW's
        self._reshard = reshard_after_forward and board is None  # what is shared takes no memory more while it is open
        self._mp = mp
        self._in_backward = False
        self._sync = True
        at_once = 1 if self._reshard or board is not None else REDUCTIONS_KEPT
        self._reductions = Reductions(units, at_once, announced=board is not None)
        self._awaited: dict[int, set[str]] = {}  # of each unit: gradients of this backward pass still to come
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(self._before_forward(index), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self._after_forward(index))
            unit.on_gradient(self._when_taken(index))
        setattr(model, _ATTRIBUTE, self)

    @property
    def rank(self) -> int:
        return self.links.rank

    @property
    def world_size(self) -> int:
        return self.links.world_size

    @property
    def device(self) -> torch.device:
        return self.units[0].device

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far."""
        return self.links.traffic

    def owned(self) -> list[Owned]:
        """What this rank owns, in model order of the units; empty where there are more ranks than roles."""
        return [
            Owned(name=name, piece=piece, whole_shape=unit.plan.shapes[name], parameter=unit.sharded[name])
            for unit in self.units
            for name, piece in unit.pieces.items()
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add to the local gradients; the next one outside sends the sum to the owners."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # ---- forward

    def _before_forward(self, index: int) -> Callable[..., Any]:
        unit = self.units[index]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index == 0 and torch._C._current_graph_task_id() == _NO_BACKWARD:
                self._reset()
                self._meet(FORWARD_BEGINS, "the beginning of a forward pass")
            self._open(index, -1 if self._in_backward else 1)  # in a backward pass this is a recomputation
            if unit.has_frozen and not self._in_backward and torch.is_grad_enabled():
                self._watch_inputs(unit, [*tensors_in(args), *tensors_in(kwargs)])
            if self._mp.param_dtype is None or not self._mp.cast_forward_inputs:
                return None
            return cast(args, self._mp.param_dtype), cast(kwargs, self._mp.param_dtype)

        return hook

    def _after_forward(self, index: int) -> Callable[..., Any]:
        unit = self.units[index]

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if self._in_backward:
                return None
            with_graph = torch.is_grad_enabled()
            if index == 0 and self._mp.output_dtype is not None:
                output = cast(output, self._mp.output_dtype)
            for tensor in tensors_in(output) if with_graph else ():
                if tensor.requires_grad:
                    on_gradient(tensor, lambda gradient: self._before_backward(index))
            # the head and the last block are the first that the backward pass needs
            if not with_graph or (self._reshard and 0 < index < len(self.units) - 1):
                unit.close()
            if index == 0:
                self._meet(FORWARD_ENDS, "the end of a forward pass")
            return output

        return hook

    def _meet(self, word: int, what: str) -> None:
        """Waits for all ranks that share memory to come here, with what they own ready. Raises RankLost."""
        if self.board is None:
            return
        if word == FORWARD_BEGINS:
            for unit in self.units:
                unit.publish()
        self.board.words.meet(word, what)

    def _open(self, index: int, towards: int) -> None:
        """Opens a unit; before that starts to gather the one that comes after it, or all where all are to stay open."""
        unit = self.units[index]
        unit.start_open()
        following = index + towards
        if towards < 0 and index == 0:
            following = len(self.units) - 1
        if index == 0 and towards > 0 and not self._reshard and torch.is_grad_enabled():
            for each in self.units:
                each.start_open()
        elif 0 <= following < len(self.units) and following != index and not (towards < 0 and following == 0):
            self.units[following].start_open()
        unit.open()

    def _reset(self) -> None:
        """Closes what an unfinished pass left open: its values may be old by now, its gradients are not whole."""
        for unit in self.units:
            unit.close()
            if self._in_backward:
                unit.drop_gradients()
        self._in_backward = False

    # ---- backward

    def _before_backward(self, index: int) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._awaited = {at: set(unit.trainable) for at, unit in enumerate(self.units)}
            self._reductions.forget()
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._open(index, -1)

    def _when_taken(self, index: int) -> Callable[[str], None]:
        unit = self.units[index]

        def taken(name: str) -> None:
            awaited = self._awaited.get(index, set())
            awaited.discard(name)
            if awaited:
                return
            if self._sync:
                self._reductions.complete(unit)
            if not unit.has_frozen:  # a frozen parameter may still be needed for the gradient of the input
                unit.close()

        return taken

    def _watch_inputs(self, unit: Unit, tensors: list[Tensor]) -> None:
        """Closes a unit with frozen parameters once the gradients of all its inputs are there."""
        waiting = [tensor for tensor in tensors if tensor.requires_grad]
        left = len(waiting)

        def hook(gradient: Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0 and unit is not self.units[0]:
                unit.close()

        for tensor in waiting:
            on_gradient(tensor, hook)

    def _after_backward(self) -> None:
        self._in_backward = False
        if self._sync:
            self._reductions.end()
        for unit in self.units:
            unit.close()
        self._meet(BACKWARD_ENDS, "the end of a backward pass")
        if self.board is not None:
            self.board.give_back_slots()


def sharding_of(model: nn.Module) -> ShardedModel | None:
    """What `matrix_fully_shard` made of this model; None for a plain one."""
    found: ShardedModel | None = getattr(model, _ATTRIBUTE, None)
    return found


def holdings(model: nn.Module) -> list[Owned]:
    """What is here of a model: what this rank owns of a sharded one, all of a plain one."""
    sharded = sharding_of(model)
    if sharded is not None:
        return sharded.owned()
    return [
        Owned(name=name, piece=Piece(name=name, shape=tuple(each.shape)), whole_shape=tuple(each.shape), parameter=each)
        for name, each in model.named_parameters()
    ]


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every parameter of a model, sharded or plain, by its first name: the same on all ranks."""
    sharded = sharding_of(model)
    if sharded is not None:
        return {name: shape for unit in sharded.units for name, shape in unit.plan.shapes.items()}
    return {owned.name: owned.whole_shape for owned in holdings(model)}
