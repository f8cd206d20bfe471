"""Reads and writes that the kernel does a part of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peerloom.node.durable import read_at, write_at


def test_what_the_kernel_moves_in_parts_is_moved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:3], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read(fd, min(size, 3), at))
    with (tmp_path / "file").open("w+b") as file:
        write_at(file.fileno(), b"0123456789", 2)
        assert read_at(file.fileno(), 10, 2) == b"0123456789"
        assert read_at(file.fileno(), 100, 5) == b"3456789"  # as much as there is
