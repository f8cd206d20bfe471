"""Export: a folder that transformers opens offline, with the very same logits."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peerloom.node.export import export
from peerloom.protocol.errors import CheckpointError, RunMismatch, StorageError
from peerloom.protocol.runspec import RunSpec
from tests.unit.node.tiny import never, task, tiny_spec, write_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Path, Any]:
    """A run of one round: its spec, its folder and the model as the worker holds it."""
    home = tmp_path_factory.mktemp("home")
    spec = tiny_spec(write_text(home / "text"))
    worker = task(spec, home)
    worker.train(0, never)
    worker.finish(mix=False)
    worker.save()
    return spec, home / "peer-a", worker._model


def test_opens_offline_with_equal_logits(trained: tuple[RunSpec, Path, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec, run_dir, model = trained
    exported = export(run_dir, spec, tmp_path / "deep" / "out")
    assert (exported.round, exported.step, exported.notes) == (1, 3, ())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    opened = AutoModelForCausalLM.from_pretrained(exported.folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(exported.folder, local_files_only=True)
    text = "def f(x):\n\treturn 'é€'  # two  spaces"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    with torch.no_grad():
        model.eval()
        mine, theirs = (one(input_ids=torch.tensor([ids])).logits for one in (model, opened.eval()))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_follow_the_umask(trained: tuple[RunSpec, Path, Any], tmp_path: Path, umask: int, mode: int) -> None:
    spec, run_dir, _ = trained
    before = os.umask(umask)
    try:
        export(run_dir, spec, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {mode}


def test_a_damaged_checkpoint_stays_where_it_is(trained: tuple[RunSpec, Path, Any], tmp_path: Path) -> None:
    spec, run_dir, _ = trained
    copied = tmp_path / "run"
    shutil.copytree(run_dir, copied)
    (copied / "checkpoints" / "round-00000001" / "meta.json").unlink()
    with pytest.raises(CheckpointError, match="was passed over"):
        export(copied, spec, tmp_path / "out")
    assert [path.name for path in (copied / "checkpoints").iterdir()] == ["round-00000001"]


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no intact checkpoint in .*checkpoints"):
        export(tmp_path / "run", RunSpec(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone_unless_forced(
    trained: tuple[RunSpec, Path, Any], tmp_path: Path
) -> None:
    spec, run_dir, _ = trained
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="out is not empty; choose another, or pass --force"):
        export(run_dir, spec, out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    export(run_dir, spec, out, force=True)
    assert {"thesis.txt", "config.json", "model.safetensors"} <= {path.name for path in out.iterdir()}


def test_a_file_is_no_folder(trained: tuple[RunSpec, Path, Any], tmp_path: Path) -> None:
    spec, run_dir, _ = trained
    (tmp_path / "out").write_text("mine")
    with pytest.raises(StorageError, match="is a file"):
        export(run_dir, spec, tmp_path / "out", force=True)


def test_another_run(trained: tuple[RunSpec, Path, Any], tmp_path: Path) -> None:
    spec, run_dir, _ = trained
    with pytest.raises(RunMismatch, match="another run"):
        export(run_dir, replace(spec, seed=99), tmp_path / "out")
