"""Reads and writes that the kernel does a part of."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peerloom.node.durable import SlotFile, read_at, write_at


def test_what_the_kernel_moves_in_parts_is_moved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:3], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read(fd, min(size, 3), at))
    with (tmp_path / "file").open("w+b") as file:
        write_at(file.fileno(), b"0123456789", 2)
        assert read_at(file.fileno(), 10, 2) == b"0123456789"
        assert read_at(file.fileno(), 100, 5) == b"3456789"  # as much as there is


@contextmanager
def most_bytes(size: int) -> Iterator[None]:
    """No file is written past this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_takes_a_part_alone_is_a_refusal(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, most_bytes(5), pytest.raises(OSError) as refused:
        write_at(file.fileno(), b"0123456789", 0)
    assert refused.value.errno == errno.EFBIG


def test_half_a_slot_is_a_refusal_and_leaves_the_value_before(tmp_path: Path) -> None:
    slots = SlotFile(tmp_path / "slots")
    slots.write(5)  # in the second slot; the first is the next one's
    with most_bytes(20), pytest.raises(OSError):
        slots.write(6)
    assert SlotFile(tmp_path / "slots").read() == (5, False)
