"""metrics.jsonl: every line whole, whatever the disk and a kill do in between."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest

from peerloom.node.journal import Journal


def journal(path: Path | None) -> Journal:
    return Journal(path, lambda: 12.3456)


def test_a_line_an_event(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal(path).write("first_step")
    journal(path).write("round", round=3, loss=None)
    assert (
        path.read_text()
        == '{"t": 12.346, "event": "first_step"}\n{"t": 12.346, "event": "round", "round": 3, "loss": null}\n'
    )
    journal(None).write("nowhere")


def test_a_full_disk_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    written = journal(path)
    written.write("a")
    write, room = os.write, [7]

    def full(fd: int, content: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(fd, content[: room[0]])
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        written.write("lost")
        room[0] = 3
        written.write("lost")
    monkeypatch.undo()
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text
    written.write("b")
    assert [json.loads(line)["event"] for line in path.read_text().split("\n")[:-1]] == ["a", "b"]


def test_a_line_torn_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "a"}\n{"event": "to')
    journal(path).write("b")
    journal(path).write("c")
    lines = path.read_text().split("\n")
    assert lines[1] == '{"event": "to'
    assert [json.loads(line)["event"] for line in (lines[0], *lines[2:4])] == ["a", "b", "c"] and lines[4:] == [""]


def test_a_folder_in_its_place_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    journal(tmp_path / "metrics.jsonl").write("a")
    assert "rounds go on" in caplog.text
