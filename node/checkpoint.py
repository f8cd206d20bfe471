"""Checkpoints on disk: a folder a round, whole or absent, every byte under a BLAKE3 digest.

`round-00000042/` holds theta and previous (`theta.safetensors`), the inner optimizer's state (`optimizer.safetensors`),
`meta.json` and `manifest.json`, which names each file with its size and digest. It is written as a temporary sibling,
fsynced, renamed, and the parent fsynced; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from blake3 import blake3
from safetensors import SafetensorError

from peerloom.node.durable import fsync_dir, fsync_file, is_full, storage_errors
from peerloom.protocol.errors import StorageError

KEEP = 3
FORMAT = 1
_NAME = re.compile(r"round-(\d{8,})")
_TEMPORARY, _OUTGOING = ".new-", ".old-"
_FILES = ("theta.safetensors", "optimizer.safetensors", "meta.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a checkpoint says of itself. `round` is the next to train; `spec_hash` and `layout_digest` are hex."""

    round: int
    step: int
    tokens: int
    batch_cursor: int
    spec_hash: str
    layout_digest: str
    adam_steps: int  # inner steps since the moments were last fresh
    adopted_at: int | None = None  # step at which a donor's state was taken, while the rate warms up again
    held_out_loss: float | None = None
    distances: list[float] = field(default_factory=list)  # to partners, behind the clip's median
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """State at the end of a round: flat fp32 `theta` and `previous`, inner optimizer tensors by name."""

    meta: Meta
    theta: torch.Tensor
    previous: torch.Tensor
    optimizer: dict[str, torch.Tensor]


class _Damaged(Exception):
    """One checkpoint does not verify; the message says why."""


def save(folder: Path, checkpoint: Checkpoint, *, keep: int = KEEP) -> Path:
    """Writes a checkpoint under `folder` and drops all but the newest `keep`.

    A full disk is made room on by dropping the oldest of them, the newest one never. Raises StorageError when the disk
    refuses all the same; the older ones are then untouched and nothing half-written is left.
    """
    while True:
        try:
            return _save(folder, checkpoint, keep)
        except StorageError as error:
            older = _rounds(folder)[1:]
            if not is_full(error) or not older:
                raise
            _drop(older[-1])


def _save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    name = f"round-{checkpoint.meta.round:08d}"
    target, temporary = folder / name, folder / f"{_TEMPORARY}{name}"
    with storage_errors(f"the checkpoint {target}", SafetensorError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _write_files(temporary, checkpoint)
            _swap_in(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already unless writing failed, whose error goes on
        for old in _rounds(folder)[keep:]:
            _drop(old)
    return target


def newest_intact(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, if any, and a sentence for each damaged one passed over."""
    damaged: list[str] = []
    for path in _rounds(folder):
        try:
            return load(path), damaged
        except _Damaged as error:
            damaged.append(f"the checkpoint {path} is damaged ({error}) and was passed over")
    return None, damaged


def load(path: Path) -> Checkpoint:
    """Reads one checkpoint folder, every digest verified."""
    _verify(path)
    try:
        meta = Meta(**json.loads((path / "meta.json").read_bytes()))
        if meta.format != FORMAT:
            raise _Damaged(f"format {meta.format}, this version reads {FORMAT}")
        state = safetensors.torch.load_file(path / "theta.safetensors")
        optimizer = safetensors.torch.load_file(path / "optimizer.safetensors")
        return Checkpoint(meta=meta, theta=state["theta"], previous=state["previous"], optimizer=optimizer)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _Damaged(str(error)) from error


def clear_leftovers(folder: Path) -> None:
    """Ends what a kill interrupted: half-written folders go; one that was moved aside returns if nothing replaced it.

    Raises StorageError.
    """
    if not folder.is_dir():
        return
    with storage_errors(f"the checkpoints in {folder}"):
        for path in folder.iterdir():
            if path.name.startswith(_TEMPORARY):
                shutil.rmtree(path)
            elif path.name.startswith(_OUTGOING):
                home = folder / path.name.removeprefix(_OUTGOING)
                if home.exists() or not (path / "manifest.json").exists():
                    shutil.rmtree(path)
                else:
                    path.rename(home)


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    state = {"theta": checkpoint.theta, "previous": checkpoint.previous}
    safetensors.torch.save_file(state, folder / "theta.safetensors")
    safetensors.torch.save_file(checkpoint.optimizer, folder / "optimizer.safetensors")
    (folder / "meta.json").write_text(json.dumps(asdict(checkpoint.meta), indent=1))
    files = {name: {"bytes": (folder / name).stat().st_size, "blake3": _digest(folder / name)} for name in _FILES}
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    for name in (*_FILES, "manifest.json"):
        fsync_file(folder / name)
    fsync_dir(folder)


def _swap_in(temporary: Path, target: Path) -> None:
    """Puts the new folder in place; one of the same round is moved aside first: rename replaces no full folder."""
    outgoing = target.with_name(f"{_OUTGOING}{target.name}")
    if target.exists():
        shutil.rmtree(outgoing, ignore_errors=True)
        target.rename(outgoing)
    os.rename(temporary, target)
    fsync_dir(target.parent)
    shutil.rmtree(outgoing, ignore_errors=True)


def _drop(path: Path) -> None:
    """Removes a checkpoint; renamed first, so that a kill leaves no half of it under its name."""
    outgoing = path.with_name(f"{_TEMPORARY}{path.name}")
    path.rename(outgoing)
    shutil.rmtree(outgoing)


def _rounds(folder: Path) -> list[Path]:
    """The checkpoint folders, newest round first."""
    if not folder.is_dir():
        return []
    found = [(int(match.group(1)), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _verify(path: Path) -> None:
    try:
        files = json.loads((path / "manifest.json").read_bytes())["files"]
        expected = {name: (files[name]["bytes"], files[name]["blake3"]) for name in _FILES}
        for name, (size, digest) in expected.items():
            if (found := (path / name).stat().st_size) != size:
                raise _Damaged(f"{name} has {found} bytes instead of {size}")
            if _digest(path / name) != digest:
                raise _Damaged(f"{name} does not match its digest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error
