"""The newest checkpoint as a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` opens offline.

It is one node's model. Of GASLoC's nodes each has its own, apart by the consensus distance that `peer status` shows;
the usual measure is the loss of their average, which no node of a live swarm holds.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from peerloom.node import checkpoint
from peerloom.node.durable import storage_errors
from peerloom.node.export_stages import newest_stages, write_stages
from peerloom.protocol.errors import CheckpointError, RunMismatch, StorageError
from peerloom.protocol.runspec import RunSpec


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: of which round and step, with a sentence for each damaged checkpoint passed over."""

    folder: Path
    round: int
    step: int
    notes: tuple[str, ...]


def export(run_dir: Path, spec: RunSpec, out_dir: Path, *, force: bool = False) -> Exported:
    """Writes model, configuration and tokenizer to `out_dir`; with `force` over the files that are there.

    Raises CheckpointError without an intact checkpoint, RunMismatch when it is of another run, StorageError when
    `out_dir` is a file, or not empty without `force`, or the disk refuses.
    """
    if spec.method == "pipeline":
        return export_stages([run_dir], spec, out_dir, force=force)
    if spec.method == "seedflow":
        return _export_sums(run_dir, spec, out_dir, force)
    found, notes = checkpoint.newest_intact(run_dir / "checkpoints", read_only=True, moments=False)
    if found is None:
        why = "; ".join(notes) or "a node writes one as it trains and when it stops"
        raise CheckpointError(f"no intact checkpoint in {run_dir / 'checkpoints'}: {why}")
    if found.meta.spec_hash != spec.spec_hash():
        raise RunMismatch(f"the checkpoints in {run_dir} belong to another run; export with that run's spec")
    _check_target(out_dir, force)
    _put(out_dir, lambda folder: _write(found, spec, folder))
    return Exported(out_dir, found.meta.round, found.meta.step, tuple(notes))


def _export_sums(run_dir: Path, spec: RunSpec, out_dir: Path, force: bool) -> Exported:
    """As export(): the base model, as the spec names it, and the sums that the node wrote last."""
    from peerloom.node.worker.base import base_of, with_tokenizer
    from peerloom.node.worker.seedflow_state import read, restored

    about, sums = read(run_dir)
    if about.get("spec_hash") != spec.spec_hash():
        raise RunMismatch(f"the sums in {run_dir} belong to another run; export with that run's spec")
    _check_target(out_dir, force)
    model = restored(base_of(spec, run_dir), spec, about, sums)
    named = with_tokenizer(spec, run_dir)
    _put(out_dir, lambda folder: _save_model(model, named, folder))
    step = about["step"]
    assert isinstance(step, int)  # ours: checked by read()
    return Exported(out_dir, step // spec.seedflow.flush_steps, step, ())


def export_stages(run_dirs: list[Path], spec: RunSpec, out_dir: Path, *, force: bool = False) -> Exported:
    """As export(), of a pipeline's run: the newest checkpoint of each stage from any of the folders.

    Raises CheckpointError that names the stages of which there is none.
    """
    stages, notes = newest_stages(run_dirs, spec)
    _check_target(out_dir, force)
    _put(out_dir, lambda folder: write_stages(stages, spec, folder))
    update = min(stage.meta.step for stage in stages)
    return Exported(out_dir, update, update, tuple(notes))


def _put(out_dir: Path, write: Callable[[Path], None]) -> None:
    """Fills `out_dir` with what `write` makes, all of it or nothing."""
    with storage_errors(f"the export {out_dir}", SafetensorError):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        try:
            write(temporary)
            _follow_umask(temporary)
            out_dir.mkdir(exist_ok=True)
            for file in temporary.iterdir():
                os.replace(file, out_dir / file.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # empty by now, unless something above failed


def _check_target(out_dir: Path, force: bool) -> None:
    if out_dir.exists() and not out_dir.is_dir():
        raise StorageError(f"{out_dir} is a file; choose another folder to export to")
    if out_dir.is_dir() and any(out_dir.iterdir()) and not force:
        raise StorageError(f"the folder {out_dir} is not empty; choose another, or pass --force to write over it")


def _follow_umask(folder: Path) -> None:
    """Gives every file the mode that any new file gets here: safetensors makes its own private."""
    plain = folder / ".mode"
    plain.touch()
    mode = stat.S_IMODE(plain.stat().st_mode)
    plain.unlink()
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)


def _write(found: checkpoint.Checkpoint, spec: RunSpec, folder: Path) -> None:
    from peerloom.node.worker.model import build_model, layout_digest
    from peerloom.optim.flat import FlatParameters

    model: Any = build_model(spec)
    flat = FlatParameters(model.named_parameters())
    if layout_digest(flat.layout()) != found.meta.layout_digest:
        made_with = found.meta.versions.get("transformers", "another version")
        raise RunMismatch(f"this transformers builds the model otherwise than the one that trained it ({made_with})")
    flat.copy_in(found.theta)
    _save_model(model, spec, folder)


def _save_model(model: Any, spec: RunSpec, folder: Path) -> None:
    """Model, configuration and tokenizer."""
    from transformers.utils.logging import disable_progress_bar

    from peerloom.node.worker.tokenizer import HuggingFaceTokenizer, save_byte_tokenizer

    disable_progress_bar()
    model.config.use_cache = True  # off while training
    model.save_pretrained(folder)
    if spec.data.tokenizer == "bytes":
        save_byte_tokenizer(folder)
    else:
        HuggingFaceTokenizer(spec.data.tokenizer).inner.save_pretrained(folder)
