"""Checkpoints that several ranks write side by side: one state whoever reads it, whole or absent whatever is killed."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peerloom.node import checkpoint as module
from peerloom.node.checkpoint import Checkpoint, clear_leftovers, load, newest_intact, save, save_parts
from peerloom.node.checkpoint_meta import Meta
from peerloom.node.checkpoint_parts import MOMENTS, Parts, finish, write_part
from peerloom.protocol.errors import StorageError

SHAPES = {"embed": (6, 4), "b.up": (4, 3), "a.norm": (4,)}  # in an order that no sorting gives
META = Meta(
    round=1, step=3, tokens=96, batch_cursor=4, spec_hash="s", layout_digest="l", adam_steps=3, versions={"torch": "2"}
)


class Killed(BaseException):
    """The process is no more: nothing else of it runs."""


def made(round: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(round)
    theta, previous, params = (torch.randn(24 + 12 + 4, generator=generator) for _ in range(3))
    moments: dict[str, Tensor] = {f"exp_avg/{name}": torch.randn(shape) for name, shape in SHAPES.items()}
    moments |= {"step/embed": torch.tensor(3.0), "left/b.up": torch.eye(4)}
    return Checkpoint(meta=replace(META, round=round), theta=theta, previous=previous, optimizer=moments, params=params)


def by_name(flat: Tensor) -> dict[str, Tensor]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    parts = zip(SHAPES.items(), torch.split(flat, sizes), strict=True)
    return {name: part.view(shape) for (name, shape), part in parts}


def writing(state: Checkpoint, ranks: int, stop_after: int = 99) -> Callable[[Path], Mapping[str, Any]]:
    """What a group of ranks does, one after the other: rank r has every `ranks`-th parameter."""
    assert state.params is not None
    kinds = {"model": by_name(state.theta), "previous": by_name(state.previous), "params": by_name(state.params)}

    def write(folder: Path) -> Mapping[str, Any]:
        written: dict[str, dict[str, Any]] = {}
        for rank in range(ranks):
            if rank == stop_after:
                raise Killed
            mine = list(SHAPES)[rank::ranks]
            moments = {
                f"{name}/{what}": value
                for what, name, value in ((*key.split("/"), value) for key, value in state.optimizer.items())
                if name in mine
            }
            held = {kind: {name: whole[name] for name in mine} for kind, whole in kinds.items()}
            written |= write_part(folder, rank, ranks, {**held, MOMENTS: moments})
        return finish(folder, written)

    return write


def save_by(folder: Path, state: Checkpoint, ranks: int, **how: Any) -> Path:
    return save_parts(folder, state.meta, list(SHAPES), writing(state, ranks, **how))


def assert_same(found: Checkpoint | None, state: Checkpoint) -> None:
    assert found is not None and found.params is not None and state.params is not None
    assert found.meta == state.meta
    pairs = [(found.theta, state.theta), (found.previous, state.previous), (found.params, state.params)]
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert found.optimizer.keys() == state.optimizer.keys()
    assert all(torch.equal(found.optimizer[key], value) for key, value in state.optimizer.items())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_what_ranks_write_is_what_one_process_writes(tmp_path: Path, ranks: int) -> None:
    """With more ranks than parameters some write nothing."""
    state = made(7)
    saved = save_by(tmp_path / "many", state, ranks)
    assert_same(load(saved), state)
    assert_same(load(save(tmp_path / "one", state)), state)
    assert len(list(saved.glob("model-*"))) == min(ranks, 3)
    without, _ = newest_intact(tmp_path / "many", moments=False)
    assert without is not None and without.folder == saved and without.optimizer == {}
    for folder in (saved, tmp_path / "one" / saved.name):
        with Parts(folder, MOMENTS) as moments:
            assert set(moments.keys()) == {"/".join(reversed(key.split("/"))) for key in state.optimizer}
            assert torch.equal(moments.read("embed/exp_avg", 2, 3), state.optimizer["exp_avg/embed"][2:5])
            assert moments.shape("embed/step") == ()


def test_damage_to_any_file_is_seen(tmp_path: Path) -> None:
    save_by(tmp_path, made(1), 2)
    good = save_by(tmp_path, made(2), 2)
    kept = tmp_path / "kept"
    shutil.copytree(good, kept)
    files = sorted(path.name for path in kept.iterdir())
    assert len(files) == 2 * 4 + len(("index", "meta", "manifest"))
    for name in files:
        for damage in ("gone", "torn"):
            shutil.rmtree(good, ignore_errors=True)
            shutil.copytree(kept, good)
            if damage == "gone":
                (good / name).unlink()
            else:
                content = (good / name).read_bytes()
                (good / name).write_bytes(content[: len(content) // 2])
            found, notes = newest_intact(tmp_path, read_only=True)
            assert found is not None and found.meta.round == 1, (name, damage)
            assert len(notes) == 1 and "\n" not in notes[0]


def test_a_manifest_that_names_a_foreign_file_is_no_checkpoint(tmp_path: Path) -> None:
    """It may be a peer's, whose word opens no file."""
    saved = save_by(tmp_path, made(1), 2)
    manifest = json.loads((saved / "manifest.json").read_bytes())
    manifest["files"]["../../secret"] = manifest["files"]["meta.json"]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    found, notes = newest_intact(tmp_path, read_only=True)
    assert found is None and "no file of a checkpoint is called '../../secret'" in notes[0]


KILLS = ["no part", "one part", "all parts", "the seal", "moved aside", "in place"]


@pytest.mark.parametrize("after", KILLS)
def test_a_kill_amid_a_save_leaves_the_one_before_or_the_whole_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """The round is saved anew, so that the old folder has to make room for it too."""
    old, new = made(4), replace(made(5), meta=replace(META, round=4, step=9))
    save_by(tmp_path, made(3), 2)
    save_by(tmp_path, old, 2)
    stop_after = {"no part": 0, "one part": 1}.get(after, 99)

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # who is dead tidies nothing up
        if after in ("all parts", "the seal"):
            patch.setattr(module, {"all parts": "seal", "the seal": "_swap_in"}[after], killed)
        if after == "moved aside":
            patch.setattr(module.os, "rename", killed)
        if after == "in place":
            patch.setattr(module, "fsync_dir", killed)
        with pytest.raises(Killed):
            save_by(tmp_path, new, 3, stop_after=stop_after)
    assert any(path.name.startswith((".new-", ".old-")) for path in tmp_path.iterdir()), "killed in time"
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000003", "round-00000004"]
    found, notes = newest_intact(tmp_path)
    assert_same(found, new if after == "in place" else old)
    assert notes == []


def test_a_full_disk_is_made_room_on_and_all_write_again(tmp_path: Path) -> None:
    for round in (1, 2):
        save_by(tmp_path, made(round), 2)
    state, tries = made(3), 0

    def write(folder: Path) -> Mapping[str, Any]:
        nonlocal tries
        tries += 1
        assert not any(folder.iterdir())
        written = writing(state, 2)(folder)
        if tries == 1:
            raise StorageError("cannot write the checkpoint: the disk is full") from OSError(errno.ENOSPC, "full")
        return written

    save_parts(tmp_path, state.meta, list(SHAPES), write)
    assert tries == 2 and sorted(path.name for path in tmp_path.iterdir()) == ["round-00000002", "round-00000003"]
    assert_same(newest_intact(tmp_path)[0], state)
