"""A second gloo group of the same ranks, so that between two of them each direction has a connection of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_twins: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def twin_of(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """The one of these ranks in this default group; where there is none yet, all of them must call it.

    While a thread writes to a connection of gloo, gloo's own may not read from it, and spins until it may: with one
    connection for both directions that took 5 % of all time of a step on four ranks.
    """
    world = dist.group.WORLD
    assert world is not None  # ours: a mesh was made
    known, key = _twins.setdefault(world, {}), tuple(ranks)
    if key not in known:
        store = dist.PrefixStore(f"twin/{','.join(map(str, key))}", _get_default_store())  # type: ignore[attr-defined]
        known[key] = _gloo_group(store, key.index(dist.get_rank()), len(key), timeout)
    return known[key]


def _gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """As torch.distributed makes one, so that what is sent over it is seen where all operations are."""
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout)
    )
    return group
