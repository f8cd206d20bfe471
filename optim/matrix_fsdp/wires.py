"""A gloo group with two connections between any two ranks, so that each direction has one of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Wires]] = WeakKeyDictionary()


class Wires:
    """Carries tensors of a group's ranks point to point, by its own thread.

    While a thread writes to a connection, gloo's own may not read from it, and spins until it may: with one connection
    for both directions that took some 4 % of the time of a step on four ranks.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], timeout: timedelta) -> None:
        self._rank = group.rank()
        store = dist.PrefixStore(f"wires/{','.join(map(str, ranks))}", _get_default_store())  # type: ignore[attr-defined]
        cpu, gloo = torch.device("cpu"), cast(Any, dist.ProcessGroupGloo)
        options = gloo._Options()
        theirs: Any = group._get_backend(cpu).options
        device = theirs._devices[0]
        options._devices, options._timeout = [device, device], timeout  # a connection for each
        # as torch.distributed makes one, so that what is sent over it is seen where all its operations are
        self.group = cast(Any, dist.ProcessGroup)(store, self._rank, len(ranks))
        kind = cast(Any, dist.ProcessGroup).BackendType.GLOO
        self.group._register_backend(cpu, kind, gloo(store, self._rank, len(ranks), options))

    def begin(self, kind: str, part: torch.Tensor, peer: int, tag: int) -> Any:
        """A "send" or "recv"."""
        upward = (kind == "send") == (peer > self._rank)
        return getattr(self.group, kind)([part], peer, 2 * tag + upward)  # gloo chooses the connection by the tag


def wires_of(group: dist.ProcessGroup, timeout: timedelta) -> Wires:
    """Those of this group's ranks in this default group; where there are none yet, all of them must call it."""
    world = dist.group.WORLD
    assert world is not None  # ours: a mesh was made
    known, key = _made.setdefault(world, {}), tuple(dist.get_process_group_ranks(group))
    if key not in known:
        known[key] = Wires(group, key, timeout)
    return known[key]
