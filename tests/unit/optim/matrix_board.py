"""What ranks of MatrixFSDP do with memory that they share: who waits for whom, what it takes, when it is not had."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from peerloom.optim.matrix_fsdp import ShardedModel, matrix_fully_shard
from peerloom.optim.matrix_fsdp import host as host_module
from tests.unit.optim.matrix_cases import Case, loss_of, make_model, make_optimizer, mesh_of, train
from tests.unit.optim.matrix_counts import counted_calls

PATIENCE = timedelta(seconds=0.3)  # of a rank that holds others up, for one that does not let itself be


def held_up(rank: int, ranks: int, where: str) -> bool | None:
    """Rank 1 stops somewhere in a pass; whether rank 0 has passed a point by then at which it could do harm."""
    mesh = mesh_of(ranks)
    if rank >= ranks:
        return None
    model = make_model(Case())
    sharded = matrix_fully_shard(model, mesh)
    train(sharded, make_optimizer(model, Case()), range(1), rank, ranks, Case())
    key, store, harmful = f"passed {where}", _get_default_store(), list[bool]()  # type: ignore[attr-defined]

    def wait(*_: object) -> None:
        try:
            store.wait([key], PATIENCE)
            harmful.append(True)
        except RuntimeError:  # the time is over
            harmful.append(False)

    def watch(module: object, args: object, output: Tensor) -> None:
        output.register_hook(wait)  # type: ignore[no-untyped-call]

    first, last = (model.get_submodule(f"model.layers.{at}.mlp") for at in (0, 1))
    if rank == 1 and where == "before":
        wait()
    if rank == 1 and where in ("evaluation", "forward"):
        last.register_forward_hook(wait)
    if rank == 1 and where == "backward":
        first.register_forward_hook(watch)
    if rank == 0 and where == "before":
        first.register_forward_hook(lambda *_: store.set(key, ""))
    with torch.no_grad() if where == "evaluation" else nullcontext(), sharded.no_sync():
        loss = loss_of(model, 1, slice(rank, rank + 1), ranks)
        if where == "backward":
            loss.backward()  # type: ignore[no-untyped-call]
    if rank == 0:
        store.set(key, "")
    dist.barrier(mesh.get_group())
    return any(harmful)


def on_board(rank: int, ranks: int, case: Case) -> dict[str, Any] | None:
    """Of ranks after a step: this one's part of the board, by pages that all have mapped, and what was sent."""
    mesh = mesh_of(ranks)
    if rank >= ranks:
        return None
    model = make_model(case)
    sharded = matrix_fully_shard(model, mesh, **case.sharding)
    optimizer = make_optimizer(model, case)
    train(sharded, optimizer, range(1), rank, ranks, case)
    with counted_calls() as calls:
        train(sharded, optimizer, range(1, 2), rank, ranks, case)
    dist.barrier(mesh.get_group())
    pages = _proportional_bytes(sharded)
    dist.barrier(mesh.get_group())
    board = sharded.board
    assert board is not None
    pieces = sum(owned.piece.numel for owned in sharded.owned())
    return {"pages": pages, "calls": calls, "layout": board.layout, "pieces": pieces}


def _proportional_bytes(sharded: ShardedModel) -> int:
    """Of the mapping of the board; each page is shared out over those who have it."""
    assert sharded.board is not None
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{sharded.board.address:x}-"):
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    raise AssertionError("the board is not mapped")


def without(rank: int, ranks: int, deaf: int) -> tuple[bool, list[str]] | None:
    """Shards where a rank may not open what the others have; whether they share, and what was logged."""
    mesh = mesh_of(ranks)
    if rank >= ranks:
        return None
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    opened = host_module._open
    logging.getLogger("peerloom.optim").addHandler(handler)
    try:
        if rank == deaf:
            host_module._open = _refuse
        before = _descriptors()
        sharded = matrix_fully_shard(make_model(Case()), mesh)
        assert not any("memfd:peerloom" in name for name in _descriptors() - before)
    finally:
        host_module._open = opened
        logging.getLogger("peerloom.optim").removeHandler(handler)
    return sharded.board is not None, said


def _descriptors() -> set[str]:
    return {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def _refuse(*_: object) -> int:
    raise OSError(errno.EACCES, os.strerror(errno.EACCES), "/proc/1/fd/5")
