"""metrics.jsonl: every line whole, whatever the disk and a kill do in between."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest

from peerloom.node import journal as module
from peerloom.node.journal import KEPT, Journal


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


def test_it_is_rotated_and_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 200)
    written = journal(tmp_path / "metrics.jsonl")
    for number in range(100):
        written.write("round", round=number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files[-KEPT:]] == [f"metrics.jsonl.{number}" for number in range(1, KEPT + 1)]
    assert len(files) in (KEPT, KEPT + 1) and all(file.stat().st_size < 300 for file in files)
    kept = [json.loads(line)["round"] for file in files for line in file.read_text().splitlines()]
    assert sorted(kept) == list(range(100 - len(kept), 100)), "the newest, without a gap"


def test_tensorboard_takes_the_rounds(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    from peerloom.node.tensorboard import TensorBoard

    curves = TensorBoard(tmp_path / "curves")
    written = Journal(None, lambda: 1.0, curves.take)
    written.write("first_step")
    written.write("round", step=20, held_out_loss=2.5, train_loss=None, tokens=100, partner="x")
    curves.close()
    (file,) = (tmp_path / "curves").iterdir()
    data, scalars, at = file.read_bytes(), {}, 0
    while at < len(data):  # a record: length, its checksum, an event, its checksum
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        scalars |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += length + 16
    assert scalars == {("loss/held_out", 20): 2.5, ("progress/tokens", 20): 100.0}
