"""The batch cursor that survives kill -9: indices are reserved on disk before a round may train on them.

It is changed in place, so that a disk that has filled up does not stop the training.
"""

from __future__ import annotations

from pathlib import Path

from peerloom.node.durable import SlotFile, storage_errors
from peerloom.node.journal import JOURNAL
from peerloom.protocol.errors import StorageError

# batches skipped when the file is not to be trusted: more than a node can have used since its last checkpoint
JUMP = 1 << 20


class BatchCursor:
    """Hands out batch indices, each at most once over all lives of the node.

    `next` is the first index never handed out. `note` says what was wrong with the file at the start ("" if nothing).
    """

    def __init__(self, path: Path, checkpointed: int | None) -> None:
        """Opens the file; `checkpointed` is the newest checkpoint's cursor, None when there is no checkpoint.

        Raises StorageError when something that cannot be read is in its place.
        """
        self._path = path
        self._file = SlotFile(path)
        self.next, self.note = self._opening(checkpointed)

    def reserve(self, count: int) -> int:
        """Returns the first of `count` indices, on disk before they are used; raises StorageError."""
        first = self.next
        self._write(first + count)
        self.next = first + count
        return first

    def give_back(self, first_unused: int) -> None:
        """Returns the end of the last reservation, from `first_unused` on; a restart skips it all the same."""
        self.next = min(self.next, first_unused)

    def _write(self, value: int) -> None:
        with storage_errors(f"the batch cursor {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file.write(value)

    def _opening(self, checkpointed: int | None) -> tuple[int, str]:
        try:
            with storage_errors(f"the batch cursor {self._path}"):
                value, certain = self._file.read()
            fault = "damaged"
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if checkpointed is None and not self._trained_before():
                return 0, ""
            value, certain, fault = None, False, "missing"
        start = max(value or 0, checkpointed or 0)
        if certain:
            return start, ""
        start += JUMP  # the lost value may be any round's after this one
        return start, f"the batch cursor {self._path} is {fault}; going on at batch {start}, so that none is repeated"

    def _trained_before(self) -> bool:
        """Whether this run folder has a journal: its first line is written after the first batch was reserved."""
        return any(self._path.with_name(name).exists() for name in (JOURNAL, f"{JOURNAL}.1"))
