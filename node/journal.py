"""metrics.jsonl: one line an event of this node's run, appended and flushed.

Past MAX_BYTES it becomes metrics.jsonl.1, what was that .2, and so on; the oldest of KEPT goes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

JOURNAL = "metrics.jsonl"  # its name in a run folder
MAX_BYTES = 32 << 20  # some 100,000 rounds
KEPT = 4  # older files
Value = str | int | float | bool | None


class Journal:
    """Appends JSON lines, each whole or absent; a disk that refuses is said once and never ends the node."""

    def __init__(
        self,
        path: Path | None,
        wall: Callable[[], float],
        also: Callable[[str, dict[str, Value]], None] = lambda kind, values: None,
    ) -> None:
        self._path = path
        self._wall = wall
        self._also = also
        self._refused = False

    def write(self, kind: str, **values: Value) -> None:
        """Adds one line with the time and `kind`, and tells `also`."""
        self._also(kind, values)
        if self._path is None:
            return
        line = json.dumps({"t": round(self._wall(), 3), "event": kind, **values})
        try:
            _append(self._path, line.encode())
            if self._path.stat().st_size > MAX_BYTES:
                rotate(self._path)
            self._refused = False
        except OSError as error:
            if not self._refused:
                log.warning("cannot append to %s (%s): rounds go on, unrecorded there", self._path, error.strerror)
            self._refused = True


def rotate(path: Path) -> None:
    """Moves a journal and its older files on by one."""
    for number in range(KEPT, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        newer = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
        if newer.exists():
            newer.replace(older)


def _append(path: Path, line: bytes) -> None:
    """Adds a line, after a line end where a kill has torn the last one; takes back what a full disk cut short."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        rest = memoryview((b"\n" if torn else b"") + line + b"\n")
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)
