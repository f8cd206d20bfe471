"""The batch cursor: no index is handed out twice, whatever happens to its file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from peerloom.node import cursor as cursor_module
from peerloom.node.cursor import JUMP, BatchCursor
from peerloom.protocol.errors import StorageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "cursor.json"


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


@pytest.mark.parametrize("content", [b"", b'{"next": 2', b'{"next": 30, "check": "00"}', b"\xff\xfe", b"[]", b"null"])
def test_torn_file_jumps_ahead_and_says_so(path: Path, content: bytes) -> None:
    BatchCursor(path, None).reserve(5)
    path.write_bytes(content)
    cursor = BatchCursor(path, 60)
    assert cursor.next == 60 + JUMP
    assert str(path) in cursor.note and "damaged" in cursor.note
    assert BatchCursor(path, None).next == JUMP


def test_missing_file_beside_a_checkpoint_jumps_ahead_and_says_so(path: Path) -> None:
    cursor = BatchCursor(path, 60)
    assert cursor.next == 60 + JUMP
    assert "missing" in cursor.note


def test_full_disk_reserves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = BatchCursor(path, None)
    cursor.reserve(5)

    def full(where: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cursor_module, "replace_file", full)
    with pytest.raises(StorageError, match=r"cursor\.json: the disk is full; free some space"):
        cursor.reserve(5)
    assert cursor.next == 5
    monkeypatch.undo()
    assert BatchCursor(path, None).next == 5
    assert [file.name for file in path.parent.iterdir()] == ["cursor.json"]
