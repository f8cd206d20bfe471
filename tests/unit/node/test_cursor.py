"""The batch cursor: no index is handed out twice, whatever happens to its file."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from peerloom.node.cursor import JUMP, BatchCursor
from peerloom.protocol.errors import StorageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "batch.cursor"


def test_fresh_start(path: Path) -> None:
    cursor = BatchCursor(path, None)
    assert (cursor.next, cursor.note) == (0, "")
    assert [cursor.reserve(5), cursor.reserve(5)] == [0, 5]


def test_killed_mid_round_skips_the_reserved(path: Path) -> None:
    cursor = BatchCursor(path, None)
    cursor.reserve(20)
    cursor.reserve(20)  # killed in this round; the checkpoint is of the one before
    assert BatchCursor(path, 20).next == 40
    assert BatchCursor(path, None).next == 40


def test_unused_end_is_given_back(path: Path) -> None:
    cursor = BatchCursor(path, None)
    cursor.reserve(20)
    cursor.give_back(7)
    assert cursor.next == 7
    cursor.give_back(9)
    assert cursor.next == 7
    assert BatchCursor(path, 7).next == 20  # on disk it stays taken: skipping is harmless, repeating is not
    assert cursor.reserve(20) == 7
    assert BatchCursor(path, 7).next == 27


def test_a_newer_checkpoint_wins(path: Path) -> None:
    BatchCursor(path, None).reserve(5)
    assert BatchCursor(path, 90).next == 90


@pytest.mark.parametrize("content", [b"", b"1 20 ", bytes(8192), b"1 30 00\n", b"\xff\xfe", b"- - -\n"])
def test_torn_file_jumps_ahead_and_says_so(path: Path, content: bytes) -> None:
    BatchCursor(path, None).reserve(5)
    path.write_bytes(content)
    cursor = BatchCursor(path, 60)
    assert cursor.next == 60 + JUMP
    assert str(path) in cursor.note and "damaged" in cursor.note
    assert BatchCursor(path, None).next == JUMP


def test_a_torn_write_repeats_nothing(path: Path) -> None:
    cursor = BatchCursor(path, None)
    cursor.reserve(20)
    before = path.read_bytes()
    cursor.reserve(20)
    changed = next(i for i, pair in enumerate(zip(before, path.read_bytes(), strict=True)) if pair[0] != pair[1])
    torn = bytearray(path.read_bytes())
    torn[changed + 3 : changed + 20] = bytes(17)
    path.write_bytes(bytes(torn))
    opened = BatchCursor(path, None)
    assert opened.next == 20 + JUMP  # the lost slot said 40, and a round may have used them
    assert "damaged" in opened.note
    opened.reserve(5)
    again = BatchCursor(path, None)
    assert (again.next, again.note) == (25 + JUMP, ""), "one write mends it"


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_that_was_wiped_is_not_taken_for_a_fresh_one(path: Path, slot: int) -> None:
    cursor = BatchCursor(path, None)
    for _ in range(5):
        cursor.reserve(10)
    content = bytearray(path.read_bytes())
    content[slot * 4096 : (slot + 1) * 4096] = bytes(4096)
    path.write_bytes(content)
    assert BatchCursor(path, None).next >= 50 and "damaged" in BatchCursor(path, None).note


def test_one_reservation_mends_a_file_of_which_nothing_is_left(path: Path) -> None:
    BatchCursor(path, None).reserve(5)
    path.write_bytes(b"\xff" * 8192)
    BatchCursor(path, None).reserve(5)
    again = BatchCursor(path, None)
    assert (again.next, again.note) == (JUMP + 5, "")


def test_missing_file_beside_a_journal_is_no_first_start(path: Path) -> None:
    path.parent.mkdir()
    (path.parent / "metrics.jsonl").write_text("{}\n")
    cursor = BatchCursor(path, None)
    assert cursor.next == JUMP and "missing" in cursor.note


def test_a_folder_in_its_place_is_a_storage_error(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(StorageError, match=r"batch\.cursor: a folder is in its place; move it away"):
        BatchCursor(path, 60)


def test_an_unreadable_file_is_a_storage_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StorageError, match=r"batch\.cursor: permission denied"):
        BatchCursor(path, 60)


def test_missing_file_beside_a_checkpoint_jumps_ahead_and_says_so(path: Path) -> None:
    cursor = BatchCursor(path, 60)
    assert cursor.next == 60 + JUMP
    assert "missing" in cursor.note


def test_a_disk_that_refuses_reserves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = BatchCursor(path, None)
    cursor.reserve(5)

    def refuse(fd: int, content: bytes, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(StorageError, match=r"batch\.cursor: the disk reports an I/O error"):
        cursor.reserve(5)
    assert cursor.next == 5
    monkeypatch.undo()
    assert BatchCursor(path, None).next == 5
    assert [file.name for file in path.parent.iterdir()] == ["batch.cursor"]


def test_a_full_disk_does_not_stop_it(path: Path) -> None:
    cursor = BatchCursor(path, None)
    cursor.reserve(5)
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))  # nothing may grow
    try:
        assert [cursor.reserve(5), cursor.reserve(5)] == [5, 10]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert BatchCursor(path, None).next == 15
