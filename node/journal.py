"""metrics.jsonl: one line an event of this node's run, appended and flushed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

Value = str | int | float | bool | None


class Journal:
    """Appends JSON lines; a disk that refuses is said once and never ends the node."""

    def __init__(self, path: Path | None, wall: Callable[[], float]) -> None:
        self._path = path
        self._wall = wall
        self._refused = False

    def write(self, kind: str, **values: Value) -> None:
        """Adds one line with the time and `kind`."""
        if self._path is None:
            return
        line = json.dumps({"t": round(self._wall(), 3), "event": kind, **values})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self._refused = False
        except OSError as error:
            if not self._refused:
                log.warning("cannot append to %s (%s): rounds go on, unrecorded there", self._path, error.strerror)
            self._refused = True
