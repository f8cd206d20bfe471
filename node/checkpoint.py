"""Checkpoints on disk: a folder a round, whole or absent, every byte under a BLAKE3 digest.

`round-00000042/` holds theta and previous (`theta.safetensors`), the inner optimizer's state (`optimizer.safetensors`),
`meta.json` and `manifest.json`, which names each file with its size and digest. A node with several devices writes the
same in parts (`checkpoint_parts`: theta as `model`, previous, moments), whose manifest names the parameters in their
order; either is read wherever the other is. A folder is written as a temporary sibling, fsynced, renamed, and the
parent fsynced; nothing is ever unpickled.

A start takes the highest round that verifies, and that is the one last written, because two others leave the
`round-N` names: a damaged one when a start passes it over (`.damaged-round-N`), and one above the round just saved
(`.stale-round-N`: of a former life, left for a donor's earlier state). They are kept for rescue by hand, renaming puts
one back; each save prunes them to the last few, and a full disk takes them first.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from peerloom.node.checkpoint_manifest import (
    FILES,
    MANIFEST,
    META,
    TENSORS,
    Damaged,
    File,
    fingerprint,
    in_parts,
    seal,
    verify,
)
from peerloom.node.checkpoint_meta import Meta as Meta
from peerloom.node.checkpoint_meta import parse_meta
from peerloom.node.durable import fsync_dir, fsync_file, is_full, remove, storage_errors
from peerloom.protocol.errors import MalformedMessage, StorageError

if TYPE_CHECKING:
    import torch  # a daemon, which only moves files about, is spared it

KEEP = 3
KEEP_ASIDE = 2  # damaged and stale ones together
MAX_STEP = 10**12  # of what a peer hands over: above it a count is made up
_NAME = re.compile(r"round-(\d{8,})")
_TEMPORARY, _OUTGOING = ".new-", ".old-"
_DAMAGED, _STALE = ".damaged-", ".stale-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """State at the end of a round: flat fp32 `theta` and `previous`, inner optimizer tensors by name.

    `params` only where they are not theta: in a run with fragments. `folder` is where it was read from.
    """

    meta: Meta
    theta: torch.Tensor
    previous: torch.Tensor
    optimizer: dict[str, torch.Tensor]
    params: torch.Tensor | None = None
    folder: Path | None = None


def stage_folder(run_dir: Path, stage: int) -> Path:
    """Where a node keeps the checkpoints of a pipeline's stage, its own or another's."""
    return run_dir / f"stage-{stage:03d}" / "checkpoints"


def save(folder: Path, checkpoint: Checkpoint, *, keep: int = KEEP) -> Path:
    """Writes a checkpoint under `folder`, from then on the one a start takes, and keeps `keep` with it.

    A full disk is made room on: those set aside go first, then the oldest, the newest intact one never. Raises
    StorageError when the disk refuses all the same; nothing half-written is left.
    """
    return _save_by(lambda temporary: _write_files(temporary, checkpoint), folder, checkpoint.meta.round, keep)


def save_parts(
    folder: Path,
    meta: Meta,
    parameters: Sequence[str],
    write: Callable[[Path], Mapping[str, File]],
    *,
    keep: int = KEEP,
) -> Path:
    """As `save`, for a state of which `write` has the parts written, durably, to the empty folder that it is given.

    `write` returns size and digest of each file; it may be called again, with room made on the disk. `parameters` are
    in the order in which they lie in theta.
    """

    def fill(temporary: Path) -> None:
        remove(temporary)
        temporary.mkdir()
        seal(temporary, asdict(meta), write(temporary), {"parameters": list(parameters)})

    return _save_by(fill, folder, meta.round, keep)


def _save_by(fill: Callable[[Path], None], folder: Path, round: int, keep: int) -> Path:
    while True:
        try:
            return _save(fill, folder, round, keep)
        except StorageError as error:
            if not is_full(error):
                raise
            with storage_errors(f"the checkpoints in {folder}"):
                spare = _spare(folder)
                if spare:
                    _drop(spare[0])
            if not spare:
                raise


def _save(fill: Callable[[Path], None], folder: Path, round: int, keep: int) -> Path:
    name = f"round-{round:08d}"
    target, temporary = folder / name, folder / f"{_TEMPORARY}{name}"
    with storage_errors(f"the checkpoint {target}", SafetensorError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fill(temporary)
            _swap_in(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already unless writing failed, whose error goes on
        _retire_others(folder, target, keep)
    return target


def _retire_others(folder: Path, target: Path, keep: int) -> None:
    """Leaves `target` as the highest round, with `keep - 1` below it, and the last few of those set aside."""
    rounds = _rounds(folder)
    at = rounds.index(target)
    # upwards, the highest last: a kill in between leaves that one, and with it the state before this save
    for stale in reversed(rounds[:at]):
        _set_aside(stale, _STALE)
    for old in (*rounds[at + 1 :][max(keep, 1) - 1 :], *_aside(folder)[KEEP_ASIDE:]):
        _drop(old)
    fsync_dir(folder)


def _spare(folder: Path) -> list[Path]:
    """What a full disk may take, first to go first: all but the one that a start would take now."""
    rounds = _rounds(folder)
    taken = next((at for at, path in enumerate(rounds) if not _fault(path)), 0)
    return [*reversed(_aside(folder)), *rounds[:taken], *reversed(rounds[taken + 1 :])]


def newest_intact(
    folder: Path,
    *,
    read_only: bool = False,
    fits: Callable[[Checkpoint], None] = lambda checkpoint: None,
    moments: bool = True,
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies and `fits`, if any, and a sentence for each damaged one passed over.

    `fits` raises ValueError for one that cannot be taken up, as a copy that came from a peer may be.
    The damaged are set aside, unless `read_only`: for a reader beside a live node, to whom one that is just being
    replaced looks damaged. Without `moments` the optimizer's state is verified but left on disk.
    """
    damaged: list[str] = []
    for path in _rounds(folder):
        try:
            found = load(path, moments=moments)
            fits(found)
            return found, damaged
        except (Damaged, ValueError) as error:
            kept = "" if read_only else _try_set_aside(path)
            damaged.append(f"the checkpoint {path} is damaged ({error}) and was passed over{kept}")
    return None, damaged


def load(path: Path, *, moments: bool = True) -> Checkpoint:
    """Reads one checkpoint folder, every digest verified."""
    manifest = verify(path)
    try:
        meta = parse_meta((path / META).read_bytes())
        state, optimizer = (_read_parts if in_parts(manifest) else _read_files)(path, manifest, moments)
        _check_types(state, optimizer)
        return Checkpoint(
            meta=meta,
            theta=state["theta"],
            previous=state["previous"],
            optimizer=optimizer,
            params=state.get("params"),
            folder=path,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise Damaged(str(error)) from error


def _check_types(state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
    import torch

    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for name, tensor in (*state.items(), *optimizer.items()):
        if tensor.dtype not in (kinds[:1] if name in state else kinds):
            raise Damaged(f"{name} is of {tensor.dtype}")


_State = tuple[dict[str, "torch.Tensor"], dict[str, "torch.Tensor"]]


def _read_files(path: Path, manifest: Mapping[str, Any], moments: bool) -> _State:
    from safetensors.torch import load_file

    return load_file(path / "theta.safetensors"), load_file(path / "optimizer.safetensors") if moments else {}


def _read_parts(path: Path, manifest: Mapping[str, Any], moments: bool) -> _State:
    from peerloom.node.checkpoint_parts import MODEL, MOMENTS, Parts, flat, turned

    kinds = {"theta": MODEL, "previous": "previous", "params": "params"}
    found = {name: flat(path, kind, manifest["parameters"]) for name, kind in kinds.items()}
    with Parts(path, MOMENTS) as parts:
        optimizer = {turned(key): parts.read(key) for key in parts.keys()} if moments else {}
    return {name: whole for name, whole in found.items() if whole is not None}, optimizer


def newest_files(folder: Path) -> tuple[int, list[Path]] | None:
    """The newest checkpoint's number and files, the manifest last; None without one. Who reads them verifies them."""
    for path in _rounds(folder):
        files = [path / name for name in (*FILES, MANIFEST)]
        if all(file.is_file() for file in files):
            return int(path.name.removeprefix("round-")), files
    return None


def take_in(folder: Path, incoming: Path, spec_hash: str, stage: int, *, keep: int = KEEP) -> Meta:
    """Puts a stage's checkpoint that came from a peer among our own of the stage, as the newest.

    Raises MalformedMessage for one that does not verify or is of something else, StorageError. `incoming` is gone then.
    """
    try:
        try:
            copy = load(incoming)
            meta = copy.meta
        except Damaged as error:
            raise MalformedMessage(f"the copy of stage {stage} is damaged: {error}") from error
        if meta.spec_hash != spec_hash or (meta.pipeline or {}).get("stage") != stage:
            raise MalformedMessage(f"what came is no copy of stage {stage} of this run")
        if not (0 <= meta.step < MAX_STEP and 0 <= meta.round < MAX_STEP):
            raise MalformedMessage(f"the copy of stage {stage} counts {meta.step} updates")
        if not all(bool(tensor.isfinite().all()) for tensor in (copy.theta, *copy.optimizer.values())):
            raise MalformedMessage(f"the copy of stage {stage} holds numbers that are none")
        with storage_errors(f"the copy of stage {stage} in {folder}"):
            for name in (*FILES, MANIFEST):
                fsync_file(incoming / name)
            target = folder / f"round-{meta.round:08d}"
            _swap_in(incoming, target)
            _retire_others(folder, target, keep)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return meta


def clear_leftovers(folder: Path) -> None:
    """Ends what a kill interrupted: half-written folders go; one that was moved aside returns if nothing replaced it.

    Raises StorageError.
    """
    if not folder.is_dir():
        return
    with storage_errors(f"the checkpoints in {folder}"):
        for path in folder.iterdir():
            if path.name.startswith(_TEMPORARY):
                remove(path)
            elif path.name.startswith(_OUTGOING):
                home = folder / path.name.removeprefix(_OUTGOING)
                if home.exists() or not (path / MANIFEST).exists():
                    remove(path)
                else:
                    path.rename(home)


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    from safetensors.torch import save_file

    remove(folder)
    folder.mkdir()
    state = {"theta": checkpoint.theta, "previous": checkpoint.previous}
    if checkpoint.params is not None:
        state["params"] = checkpoint.params
    save_file(state, folder / "theta.safetensors")
    save_file(checkpoint.optimizer, folder / "optimizer.safetensors")
    for name in TENSORS:
        fsync_file(folder / name)
    seal(folder, asdict(checkpoint.meta), {name: fingerprint(folder / name) for name in TENSORS}, {})


def _swap_in(temporary: Path, target: Path) -> None:
    """Puts the new folder in place; one of the same round is moved aside first: rename replaces no full folder."""
    outgoing = target.with_name(f"{_OUTGOING}{target.name}")
    if target.exists():
        remove(outgoing)
        target.rename(outgoing)
    os.rename(temporary, target)
    fsync_dir(target.parent)
    remove(outgoing)


def _drop(path: Path) -> None:
    """Removes a checkpoint; renamed first, so that a kill leaves no half of it under its name."""
    outgoing = path.with_name(f"{_TEMPORARY}{path.name}")
    remove(outgoing)
    path.rename(outgoing)
    remove(outgoing)


def _set_aside(path: Path, prefix: str) -> Path:
    """Takes a checkpoint out of the `round-N` names; an older one set aside under the same name goes."""
    aside = path.with_name(f"{prefix}{path.name}")
    remove(aside)
    return path.rename(aside)


def _try_set_aside(path: Path) -> str:
    """Sets a damaged checkpoint aside; returns the end of the sentence about it. The next save tries again."""
    try:
        return f"; it is kept as {_set_aside(path, _DAMAGED).name}"
    except OSError as error:
        return f"; it could not be moved aside ({error.strerror})"


def _aside(folder: Path) -> list[Path]:
    """The checkpoints set aside, last written first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.name.startswith((_DAMAGED, _STALE))]
    return sorted(found, key=lambda path: (path.lstat().st_mtime_ns, path.name), reverse=True)


def _rounds(folder: Path) -> list[Path]:
    """The checkpoint folders, newest round first."""
    if not folder.is_dir():
        return []
    found = [(int(match.group(1)), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _fault(path: Path) -> str:
    """Why a checkpoint does not verify, "" when it does."""
    try:
        verify(path)
    except Damaged as error:
        return str(error)
    return ""
