"""Checkpoints of a sharded model, written and read by all its ranks together.

The folder is one of parts (`checkpoint_parts`), with beside them

    state.json      format, what the caller added, the optimizer's settings by group, size and BLAKE3 of each part

It holds whole tensors, so any world size takes it up. It appears under its name whole or not at all. For programs that
shard a model themselves, over replicas too; a node's ranks write the same parts by way of `checkpoint.save_parts`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from peerloom.node import checkpoint_parts as parts
from peerloom.node.checkpoint_manifest import fingerprint
from peerloom.node.checkpoint_parts import Parts
from peerloom.node.durable import fsync_dir, fsync_file, remove, storage_errors
from peerloom.optim.matrix_fsdp import OwnerOptimizer, ShardingError, sharding_of
from peerloom.optim.matrix_fsdp.checkpoint import Share, owned_share, take_up
from peerloom.protocol.errors import CheckpointError, StorageError

FORMAT = 1

_STATE = "state.json"


def save(folder: Path, model: nn.Module, optimizer: OwnerOptimizer | None, extra: Mapping[str, object]) -> None:
    """Writes `folder`, replacing one of that name; all ranks must call it, on one file system.

    `extra` is JSON: step, scheduler, random state; rank 0's is kept. The learning rates and other
    settings of the optimizer's groups are saved with it. Raises StorageError on every rank when one cannot
    write, with nothing left of the attempt and a folder of that name as it was. Raises RankLost.
    """
    temporary = folder.with_name(f".new-{folder.name}")
    share = owned_share(model, optimizer)
    try:
        with _together(model):
            if _is_first(model):
                _start(temporary)
        with _together(model):
            if _is_writer(model):
                _write_share(temporary, *_place(model), share)
        with _together(model):
            if _is_first(model):
                groups = optimizer.settings() if optimizer is not None else []
                _finish(temporary, folder, {"extra": dict(extra), "groups": groups}, getattr(model, "config", None))
    except StorageError:
        if _is_first(model):
            shutil.rmtree(temporary, ignore_errors=True)  # what it cannot remove, the error that goes on explains
        raise


def load(folder: Path, model: nn.Module, optimizer: OwnerOptimizer | None = None) -> dict[str, Any]:
    """Fills `model`, sharded over any number of ranks or plain, and `optimizer`; returns what was saved as `extra`.

    Each rank reads only what it owns, and checks a share of the digests. Raises CheckpointError on every rank when a
    file is missing, damaged or of another model; the model is as before then. Raises RankLost.
    """
    problem = ""
    state: dict[str, Any] = {}
    try:
        state = _state_of(folder)
        _verify(folder, state["files"], *_place(model))
    except CheckpointError as error:
        problem = str(error)
    _tell(model, problem)
    try:
        with Parts(folder, parts.MODEL) as parameters, Parts(folder, parts.MOMENTS) as moments:
            take_up(model, optimizer, parameters, moments, moments.keys())
        if optimizer is not None:
            optimizer.take_settings(state["groups"])
    except KeyError as error:
        problem = f"the checkpoint {folder} has no {error.args[0]}: it is of another model"
    except (ValueError, OSError, SafetensorError) as error:
        problem = f"the checkpoint {folder} does not fit: {error}"
    _tell(model, problem)
    extra: dict[str, Any] = state["extra"]
    return extra


def _place(model: nn.Module) -> tuple[int, int]:
    """Rank and world size; (0, 1) for a plain model."""
    sharded = sharding_of(model)
    return (sharded.rank, sharded.world_size) if sharded is not None else (0, 1)


def _is_writer(model: nn.Module) -> bool:
    """One replica writes: the others hold the same."""
    sharded = sharding_of(model)
    return sharded is None or sharded.replica_rank == 0


def _is_first(model: nn.Module) -> bool:
    return _is_writer(model) and _place(model)[0] == 0


@contextmanager
def _together(model: nn.Module) -> Iterator[None]:
    """A part of a save: no rank goes on before all have done theirs, and what stops one stops all."""
    problem = ""
    try:
        yield
    except StorageError as error:
        problem = str(error)
    sharded = sharding_of(model)
    try:
        if sharded is not None:
            sharded.tell(problem)
        elif problem:
            raise ShardingError(problem)
    except ShardingError as error:
        raise StorageError(str(error)) from error


def _tell(model: nn.Module, problem: str) -> None:
    sharded = sharding_of(model)
    try:
        if sharded is not None:
            sharded.tell(problem)
    except ShardingError as error:
        raise CheckpointError(str(error)) from error
    if problem:
        raise CheckpointError(problem)


def _start(temporary: Path) -> None:
    with storage_errors(f"the checkpoint {temporary}"):
        remove(temporary)
        temporary.mkdir(parents=True)


def _write_share(temporary: Path, rank: int, world_size: int, share: Share) -> None:
    kinds = {parts.MODEL: share.parameters, parts.MOMENTS: share.moments}
    written = parts.write_part(temporary, rank, world_size, kinds)
    with storage_errors(f"the checkpoint {temporary}"):
        (temporary / f"part-{rank + 1:05d}.json").write_text(json.dumps(written))


def _finish(temporary: Path, folder: Path, state: Mapping[str, object], config: object) -> None:
    """The index and the list of files, then the name."""
    with storage_errors(f"the checkpoint {folder}"):
        written: dict[str, Any] = {}
        for path in sorted(temporary.glob("part-*.json")):
            written |= json.loads(path.read_bytes())
            path.unlink()
        files = parts.finish(temporary, written, config)
        (temporary / _STATE).write_text(json.dumps({"format": FORMAT, **state, "files": files}, indent=1))
        fsync_file(temporary / _STATE)
        fsync_dir(temporary)
        _swap_in(temporary, folder)


def _swap_in(temporary: Path, folder: Path) -> None:
    outgoing = folder.with_name(f".old-{folder.name}")
    if folder.exists():
        remove(outgoing)
        folder.rename(outgoing)
    temporary.rename(folder)
    fsync_dir(folder.parent)
    remove(outgoing)


def _state_of(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_bytes())
        if state["format"] != FORMAT:
            raise CheckpointError(f"the checkpoint {folder} has format {state['format']}, this version reads {FORMAT}")
        return {"extra": dict(state["extra"]), "groups": list(state["groups"]), "files": dict(state["files"])}
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint of a sharded model: it has no {_STATE}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {_STATE}: {error}") from error


def _verify(folder: Path, files: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Every world_size-th file: together the ranks see each once."""
    for name in sorted(files)[rank::world_size]:
        try:
            found = fingerprint(folder / name, threads=1)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name}: {error.strerror}") from error
        if found != files[name]:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} does not match its digest")
