"""Checkpoints: whole or absent, verified, the newest intact one wins, a full disk loses nothing."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peerloom.node import checkpoint as module
from peerloom.node.checkpoint import Checkpoint, clear_leftovers, newest_intact, save
from peerloom.node.checkpoint_meta import Meta
from peerloom.protocol.errors import StorageError


def made(round: int, size: int = 1000) -> Checkpoint:
    generator = torch.Generator().manual_seed(round)
    theta, previous, moment = (torch.randn(size, generator=generator) for _ in range(3))
    meta = Meta(
        round=round, step=round * 3, tokens=round * 96, batch_cursor=round * 3 + 1, spec_hash="s", layout_digest="l",
        adam_steps=3, adopted_at=1, held_out_loss=None, versions={"torch": "2"},
    )  # fmt: skip
    return Checkpoint(meta=meta, theta=theta, previous=previous, optimizer={"exp_avg/w": moment.view(10, -1)})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    written = made(42)
    assert save(folder, written) == folder / "round-00000042"
    read, notes = newest_intact(folder)
    assert read is not None and notes == []
    assert read.meta == written.meta
    assert torch.equal(read.theta, written.theta) and torch.equal(read.previous, written.previous)
    assert torch.equal(read.optimizer["exp_avg/w"], written.optimizer["exp_avg/w"])
    assert names(folder / "round-00000042") == [
        "manifest.json",
        "meta.json",
        "optimizer.safetensors",
        "theta.safetensors",
    ]


def test_the_last_three_are_kept_by_number(tmp_path: Path) -> None:
    for round in (8, 9, 10, 99_999_999, 100_000_000):
        save(tmp_path, made(round))
    assert names(tmp_path) == ["round-00000010", "round-100000000", "round-99999999"]
    read, _ = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 100_000_000


def test_none_in_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert newest_intact(tmp_path) == (None, [])
    assert newest_intact(tmp_path / "nothing") == (None, [])


def test_the_same_round_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, made(5))
    second = replace(made(5), theta=torch.ones(1000))
    save(tmp_path, second)
    read, _ = newest_intact(tmp_path)
    assert read is not None and torch.equal(read.theta, torch.ones(1000))
    assert names(tmp_path) == ["round-00000005"]


def _truncate(folder: Path) -> None:
    with (folder / "theta.safetensors").open("r+b") as file:
        file.truncate(100)


def _flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "optimizer.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "optimizer.safetensors").write_bytes(content)


def _lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _tear_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:40])


def _lose_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, _lose_the_manifest, _tear_the_manifest, _lose_meta])
def test_a_damaged_one_is_passed_over_with_a_sentence(tmp_path: Path, damage: object) -> None:
    save(tmp_path, made(1))
    save(tmp_path, made(2))
    assert callable(damage)
    damage(tmp_path / "round-00000002")
    read, notes = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 1
    assert len(notes) == 1 and "round-00000002 is damaged" in notes[0] and "\n" not in notes[0]


def test_saves_after_damage_survive_and_are_found(tmp_path: Path) -> None:
    for number in (10, 20, 30):
        save(tmp_path, made(number))
    for number in (20, 30):
        _flip_a_bit(tmp_path / f"round-{number:08d}")
    read, notes = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 10
    assert ["it is kept as .damaged-round-00000030" in note for note in notes] == [True, False]
    assert names(tmp_path) == [".damaged-round-00000020", ".damaged-round-00000030", "round-00000010"]
    for number in range(11, 16):
        save(tmp_path, made(number))
        read, notes = newest_intact(tmp_path)
        assert read is not None and read.meta.round == number and notes == []
    assert [name for name in names(tmp_path) if name[0] == "r"] == [f"round-{number:08d}" for number in (13, 14, 15)]


def test_damage_that_no_start_has_seen_does_not_outlive_a_lower_save(tmp_path: Path) -> None:
    for number in (10, 20, 30):
        save(tmp_path, made(number))
    for number in (10, 20, 30):
        _flip_a_bit(tmp_path / f"round-{number:08d}")
    assert save(tmp_path, made(5)).exists()  # a donor's state, taken while running
    read, notes = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 5 and notes == []


def test_a_lower_round_saved_later_wins_over_a_former_life(tmp_path: Path) -> None:
    for number in (48, 49, 50):
        save(tmp_path, made(number))
    save(tmp_path, made(40))
    read, _ = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 40
    assert names(tmp_path) == [".stale-round-00000049", ".stale-round-00000050", "round-00000040"]


def test_a_kill_while_a_former_life_is_set_aside_leaves_it_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (48, 49, 50):
        save(tmp_path, made(number))
    set_aside = module._set_aside
    moved: list[Path] = []

    def killed(path: Path, prefix: str) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(path)
        return set_aside(path, prefix)

    monkeypatch.setattr(module, "_set_aside", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, made(40))
    read, _ = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 50, "not one that is neither the last state nor the new one"


def test_only_the_last_few_are_kept_aside(tmp_path: Path) -> None:
    for number in range(1, 6):
        save(tmp_path, made(number), keep=9)
    for number in range(2, 6):
        _truncate(tmp_path / f"round-{number:08d}")
    assert len(newest_intact(tmp_path)[1]) == 4
    assert len(names(tmp_path)) == 5, "nothing goes before a good one is there"
    save(tmp_path, made(2))
    assert names(tmp_path) == [
        ".damaged-round-00000004", ".damaged-round-00000005", "round-00000001", "round-00000002",
    ]  # fmt: skip


def test_a_reader_moves_nothing(tmp_path: Path) -> None:
    save(tmp_path, made(1))
    _truncate(tmp_path / "round-00000001")
    read, notes = newest_intact(tmp_path, read_only=True)
    assert read is None and notes[0].endswith("was passed over")
    assert names(tmp_path) == ["round-00000001"]


def test_one_that_cannot_be_moved_aside_is_passed_over_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, made(1))
    save(tmp_path, made(2))
    _truncate(tmp_path / "round-00000002")

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    read, notes = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 1
    assert "could not be moved aside (Read-only file system)" in notes[0]


def test_files_in_the_place_of_folders_go(tmp_path: Path) -> None:
    save(tmp_path, made(1))
    (tmp_path / ".new-round-00000002").write_text("a file")
    (tmp_path / ".old-round-00000001").write_text("a file")
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["round-00000001"]
    (tmp_path / ".new-round-00000002").write_text("a file")
    (tmp_path / "round-00000002").write_text("a file")
    save(tmp_path, made(2))
    assert names(tmp_path) == ["round-00000001", "round-00000002"]


def test_leftovers_of_a_kill_are_cleared(tmp_path: Path) -> None:
    save(tmp_path, made(1))
    shutil.copytree(tmp_path / "round-00000001", tmp_path / ".new-round-00000002")
    shutil.copytree(tmp_path / "round-00000001", tmp_path / ".old-round-00000001")  # killed after the swap
    (tmp_path / "round-00000001").rename(tmp_path / "kept")
    (tmp_path / "kept").rename(tmp_path / "round-00000001")
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["round-00000001"]


def test_a_checkpoint_moved_aside_by_a_kill_returns(tmp_path: Path) -> None:
    save(tmp_path, made(7))
    (tmp_path / "round-00000007").rename(tmp_path / ".old-round-00000007")  # killed before its successor took the name
    clear_leftovers(tmp_path)
    read, _ = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 7


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow past 200 kB, as on a disk with no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.usefixtures("small_files")
def test_a_refused_write_leaves_the_old_ones_and_no_halves(tmp_path: Path) -> None:
    for round in (1, 2, 3):
        save(tmp_path, made(round))
    with pytest.raises(StorageError, match=r"round-00000004: .*size limit"):
        save(tmp_path, made(4, size=100_000))
    assert names(tmp_path) == ["round-00000001", "round-00000002", "round-00000003"]
    read, notes = newest_intact(tmp_path)
    assert read is not None and read.meta.round == 3 and notes == []


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "choose another folder"), (errno.EACCES, "make it writable")],
)
def test_the_disk_refusing_is_one_sentence_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    save(tmp_path, made(1))

    def refuse(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(module, "fsync_file", refuse)
    with pytest.raises(StorageError) as caught:
        save(tmp_path, made(2))
    assert remedy in str(caught.value) and "round-00000002" in str(caught.value) and "\n" not in str(caught.value)
    assert names(tmp_path) == ["round-00000001"]


def test_a_full_disk_is_made_room_on_by_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        save(tmp_path, made(number))
    room = [2]  # refusals left

    def full(folder: Path, state: Checkpoint) -> None:
        if room[0]:
            room[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, state)

    write = module._write_files
    monkeypatch.setattr(module, "_write_files", full)
    save(tmp_path, made(3))
    assert names(tmp_path) == ["round-00000002", "round-00000003"]
    room[0] = 9
    with pytest.raises(StorageError, match="the disk is full"):
        save(tmp_path, made(4))
    assert names(tmp_path) == ["round-00000003"], "the newest one is never given up"


def test_a_full_disk_takes_the_damaged_before_the_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3, 4):
        save(tmp_path, made(number), keep=9)
    _flip_a_bit(tmp_path / "round-00000004")
    newest_intact(tmp_path)  # sets it aside
    _flip_a_bit(tmp_path / "round-00000003")  # and this no start has seen
    order: list[str] = []
    drop = module._drop

    def noted(path: Path) -> None:
        order.append(path.name)
        drop(path)

    def full(folder: Path, state: Checkpoint) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_drop", noted)
    monkeypatch.setattr(module, "_write_files", full)
    with pytest.raises(StorageError, match="the disk is full"):
        save(tmp_path, made(5))
    assert order == [".damaged-round-00000004", "round-00000003", "round-00000001"]
    assert names(tmp_path) == ["round-00000002"]
