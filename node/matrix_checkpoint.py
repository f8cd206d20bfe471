"""Checkpoints of a sharded model: safetensors by name, each file written by the rank that owns what is in it.

    <folder>/config.json                             where the model has one: AutoModelForCausalLM loads the folder
             model-00001-of-00004.safetensors        one a rank that owns something
             model.safetensors.index.json            the usual index of several files
             moments-00001-of-00004.safetensors      optimizer tensors, "parameter/what"
             state.json                              format, what the caller added, the optimizer's settings by group,
                                                     size and BLAKE3 of each file

A folder holds whole tensors, so any world size takes it up. It appears under its name whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peerloom.node.durable import fsync_dir, fsync_file, remove, storage_errors
from peerloom.optim.matrix_fsdp import OwnerOptimizer, ShardingError, sharding_of
from peerloom.optim.matrix_fsdp.checkpoint import Share, owned_share, take_up
from peerloom.protocol.errors import CheckpointError, StorageError

FORMAT = 1

_INDEX, _STATE = "model.safetensors.index.json", "state.json"


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
                _start(temporary, model)
        with _together(model):
            if _is_writer(model):
                _write_share(temporary, share, *_place(model))
        with _together(model):
            if _is_first(model):
                groups = optimizer.settings() if optimizer is not None else []
                _finish(temporary, folder, {"extra": dict(extra), "groups": groups})
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
        with _Files(folder, "model") as parameters, _Files(folder, "moments") as moments:
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


class _Files:
    """The tensors of all files of one kind; a Reader."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._paths = sorted(folder.glob(f"{kind}-*-of-*.safetensors"))
        self._stack = ExitStack()
        self._found: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._found |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keys(self) -> list[str]:
        return list(self._found)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._found[key].get_slice(key).get_shape())

    def read(self, key: str, first: int = 0, rows: int | None = None) -> Tensor:
        if rows is None:
            whole: Tensor = self._found[key].get_tensor(key)
            return whole
        part: Tensor = self._found[key].get_slice(key)[first : first + rows]
        return part


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


def _start(temporary: Path, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    with storage_errors(f"the checkpoint {temporary}"):
        remove(temporary)
        temporary.mkdir(parents=True)
        if config is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(temporary)


def _write_share(temporary: Path, share: Share, rank: int, world_size: int) -> None:
    part = f"{rank + 1:05d}-of-{world_size:05d}"
    listed: dict[str, Any] = {}
    with storage_errors(f"the checkpoint {temporary}", SafetensorError):
        for kind, tensors in (("model", share.parameters), ("moments", share.moments)):
            if not tensors:
                continue
            path = temporary / f"{kind}-{part}.safetensors"
            whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            safetensors.torch.save_file(whole, path, metadata={"format": "pt"})
            fsync_file(path)
            size = sum(tensor.nbytes for tensor in whole.values())
            listed[path.name] = {"keys": list(whole), "tensor_bytes": size, **_fingerprint(path)}
        (temporary / f"part-{part}.json").write_text(json.dumps(listed))


def _finish(temporary: Path, folder: Path, state: Mapping[str, object]) -> None:
    """The index and the list of files, then the name."""
    with storage_errors(f"the checkpoint {folder}"):
        listed: dict[str, Any] = {}
        for path in sorted(temporary.glob("part-*.json")):
            listed |= json.loads(path.read_bytes())
            path.unlink()
        models = {name: found for name, found in listed.items() if name.startswith("model-")}
        index = {
            "metadata": {"total_size": sum(found["tensor_bytes"] for found in models.values())},
            "weight_map": {key: name for name, found in models.items() for key in found["keys"]},
        }
        files = {name: {"bytes": found["bytes"], "blake3": found["blake3"]} for name, found in listed.items()}
        written = {_INDEX: index, _STATE: {"format": FORMAT, **state, "files": files}}
        for name, content in written.items():
            (temporary / name).write_text(json.dumps(content, indent=1))
            fsync_file(temporary / name)
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
            found = _fingerprint(folder / name)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name}: {error.strerror}") from error
        if found != files[name]:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} does not match its digest")


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "blake3": blake3().update_mmap(path).hexdigest()}
