"""The board: memory that the ranks of a shard group share where all are processes of one host, on its CPU.

On it lie the full buffers of all units, once for all ranks, and of each rank two slots for gradients. An owner's pieces
rest in the full buffer itself, so nothing is gathered: the modules' parameters are made to point there. (Where the
forward pass has another dtype than what rests, the owner writes its pieces to the full buffer, converted, when a
forward pass begins.) A unit's gradients are copied to a slot of the rank that computed them, but for those that it owns
itself; the owners add them up from there, in rank order, as they would what had been sent.

Ranks wait for each other by words of one byte (`Words`), which also order what they do to memory. There are four kinds,
each said by every rank to every other:

- B, when a forward pass of the model begins: no rank reads a parameter before all have come to this pass;
- F, when it ends: no rank leaves a forward pass before all have computed it;
- G, when a rank has put a unit's gradients in a slot: no rank adds them up before all have;
- E, when a backward pass ends: no rank leaves it before all have left nothing to read.

Why nobody overwrites what another still reads:

Parameters. Others' pieces are read only inside passes: between B and F, and from a backward pass's begin to its E
(recomputation of activations is inside it). Their owner writes them only outside: in `optimizer.step()`, by a
checkpoint, by a mix with other peers, or converted before it says B. It is outside only once every rank has left the
pass before (F or E), and no rank is in the next before it says B itself. So it is for a pass without gradients, for one
with them that no backward pass follows, for several microbatches under `no_sync`, whose backward passes end with E too,
for frozen parameters, which are in no G, and for tied ones, which are one parameter of one unit. With or without
`reshard_after_forward` the full buffers stay where they are. Clipping and the step touch what a rank owns and its
`.grad`, which is never on the board.

Gradients. Units are reduced in one order on all ranks (`Reductions`): before a rank copies the gradients of unit k of
this order to a slot, it has added up those of k - 1, for which it had a G from each other rank. Each said it after it
had added up its k - 2. So the slot that had this rank's gradients of k - 2 is free, and two slots, taken in turn, are
enough. Between backward passes E does the same: all have added up everything. Gradients that `no_sync` keeps are not on
the board.

A pass that fails, on all ranks at the same point, is followed by the B of the next: where a rank waits for a G by then,
it does so before B, and adds up nothing.

The memory is a memfd: it has no name, no limit but the machine's memory, and ends with the last rank, however that
does. A slot's pages are given back when a backward pass has ended, so between steps there is one copy of the model.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peerloom.optim.matrix_fsdp.dtypes import Dtypes
from peerloom.optim.matrix_fsdp.host import PAGE, Common
from peerloom.optim.matrix_fsdp.layout import UnitLayout, contiguous

SLOTS = 2
FORWARD_BEGINS, FORWARD_ENDS, BACKWARD_ENDS = 0, 1, 2  # words: B, F, E
_FIRST_WORD, _WORDS = 16, 240  # of units: G
_ALIGNED = 64  # bytes: a line of the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardLayout:
    """Where all lies, in bytes: `fulls` by unit, `slots` by rank and slot, `slot_of` by unit (0 where none is needed).

    `resting` is what of the fulls belongs to each rank.
    """

    fulls: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]
    slot_bytes: tuple[tuple[int, ...], ...]
    slot_of: tuple[int, ...]
    resting: tuple[int, ...]
    nbytes: int


def lay_out_board(
    layouts: Sequence[tuple[UnitLayout, UnitLayout]], dtypes: Sequence[Dtypes], world_size: int
) -> BoardLayout:
    """Of units, each with the layout of its parameters and that of its gradients."""
    units = [(*pair, each) for pair, each in zip(layouts, dtypes, strict=True)]
    fulls, at = [], PAGE  # the first page has the word by which ranks know the file
    resting = [0] * world_size
    for layout, _, dtype in units:
        fulls.append(at)
        at = _whole(at + layout.numel * dtype.forward.itemsize, _ALIGNED)
        for rank, owned in enumerate(layout.owned_numel):
            resting[rank] += owned * dtype.forward.itemsize
    slot_of, turn = [0] * len(units), 0
    sizes = [[0] * SLOTS for _ in range(world_size)]
    for index, (_, gradients, dtype) in reversed([*enumerate(units)]):
        if gradients.numel:
            slot_of[index], turn = turn, (turn + 1) % SLOTS
        for rank, own in enumerate(gradients.owned_numel):
            sent = (gradients.numel - own) * dtype.reduce.itemsize
            sizes[rank][slot_of[index]] = max(sizes[rank][slot_of[index]], _whole(sent, PAGE))
    slots = []
    at = _whole(at, PAGE)
    for of_rank in sizes:
        slots.append(tuple(at + sum(of_rank[:slot]) for slot in range(SLOTS)))
        at += sum(of_rank)
    return BoardLayout(
        fulls=tuple(fulls), slots=tuple(slots), slot_bytes=tuple(map(tuple, sizes)), slot_of=tuple(slot_of),
        resting=tuple(resting), nbytes=at,
    )  # fmt: skip


class Board:
    """This rank's view of the board, and the words by which the ranks take turns on it."""

    def __init__(self, there: Common, layout: BoardLayout, rank: int) -> None:
        assert there.words is not None  # ours: only without a reason
        self.layout, self.words, self._rank = layout, there.words, rank
        self._map = there.map(layout.nbytes)
        self._storage = torch.frombuffer(self._map, dtype=torch.uint8).untyped_storage()

    @property
    def address(self) -> int:
        """Where it begins in this process's memory."""
        return self._storage.data_ptr()

    def view(self, first_byte: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A part of it, with a version counter of its own."""
        tensor = torch.empty(0, dtype=dtype)
        return tensor.set_(self._storage, first_byte // dtype.itemsize, tuple(shape), contiguous(shape))

    def give_back_slots(self) -> None:
        """Frees the memory of this rank's slots until they are written again; nobody may still read them."""
        for first, size in zip(self.layout.slots[self._rank], self.layout.slot_bytes[self._rank], strict=True):
            if size:
                self._map.madvise(mmap.MADV_REMOVE, first, size)


def word_of(index: int) -> int:
    """That the gradients of a unit are there; far from it another unit's may be the same."""
    return _FIRST_WORD + index % _WORDS


def _whole(size: int, of: int) -> int:
    return -(-size // of) * of
