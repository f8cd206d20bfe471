"""Which ranks are lost, once something failed between them: those that do not answer a roll call."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from peerloom.optim.matrix_fsdp.deadline import Deadline

_TAG, _NEVER_SENT = 1, (8, 9)  # an even and an odd tag: see `Wires`
_AT_ONCE = timedelta(milliseconds=1)
_lifelines: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Lifeline]] = WeakKeyDictionary()


class Lifeline:
    """A gloo group beside those that carry tensors, used once: when one of them has failed.

    From the start each rank waits for a word from each other. A failed transfer says little about who is gone: its peer
    may only have given up before us, and in a collective nobody knows whom it waits for. So the first to notice closes
    the groups that carry tensors, at which the others notice, too, and all tell all that they are there.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        # dist.new_group for some ranks alone takes its name from the groups that each has made, not the same everywhere
        name = f"lifeline/{','.join(map(str, ranks))}"
        store = dist.PrefixStore(name, _get_default_store())  # type: ignore[attr-defined]
        me = ranks.index(dist.get_rank())
        self._ranks = ranks
        self._group = cast(Any, dist.ProcessGroupGloo(store, me, len(ranks), timeout))
        self._others = [at for at in range(len(ranks)) if at != me]
        self._heard = torch.zeros(len(ranks))
        self._words = [self._group.recv([self._heard[at : at + 1]], at, _TAG) for at in self._others]

    def call(self, within: timedelta) -> tuple[int, ...]:
        """The ranks that say nothing `within` a time, of the default group; they have as long to notice a failure."""
        deadline = Deadline(within)
        here, sent = torch.ones(1), []
        for at in self._others:
            try:
                sent.append(self._group.send([here], at, _TAG))
            except RuntimeError:  # it is gone
                continue
        for word in self._words:
            try:
                word.wait(deadline.left)
            except RuntimeError:
                continue  # a time-out closes the group: later words that have not come are missed at once
        return tuple(self._ranks[at] for at in self._others if not self._heard[at])


def lifeline_of(ranks: Sequence[int], timeout: timedelta) -> Lifeline:
    """The one of these ranks in this default group; where there is none yet, all of them must call it."""
    world = dist.group.WORLD
    assert world is not None  # ours: a mesh was made
    known, key = _lifelines.setdefault(world, {}), tuple(sorted(ranks))
    if key not in known:
        known[key] = Lifeline(key, timeout)
    return known[key]


def sever(group: dist.ProcessGroup) -> None:
    """Closes the connections of a gloo group, so that whoever waits in it fails at once."""
    nothing = torch.empty(1)
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        for tag in _NEVER_SENT:
            try:
                word: Any = group.recv([nothing], peer, tag)
                word.wait(_AT_ONCE)  # what runs into a time-out closes all connections of its kind
            except RuntimeError:
                continue
