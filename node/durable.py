"""Files that survive a kill and a power cut: written beside, fsynced, renamed; a disk's refusal as a StorageError."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from peerloom.protocol.errors import StorageError

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file would pass the size limit (ulimit -f); raise it",
    errno.EROFS: "the disk is mounted read-only; choose another folder",
    errno.EACCES: "permission denied; make it writable for this user or choose another folder",
    errno.EPERM: "permission denied; make it writable for this user or choose another folder",
    errno.ENOTDIR: "a part of the path is a file; choose another folder",
    errno.EISDIR: "a folder is in its place; move it away",
    errno.EEXIST: "something else has its name; move it away",
    errno.EIO: "the disk reports an I/O error; check it or choose another folder",
}


def _errno_of(error: Exception) -> int | None:
    """The errno of an OSError, or of a Rust library's error that only names it in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"(?:\bcode:|\bos error) (\d+)", str(error))
    return int(found.group(1)) if found else None


@contextmanager
def storage_errors(what: str, *also: type[Exception]) -> Iterator[None]:
    """Turns an OSError, or an error of the classes `also`, into a StorageError: "cannot write <what>: <remedy>"."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, *also)):
            raise
        code = _errno_of(error)
        remedy = _REMEDIES.get(code) if code is not None else None
        raise StorageError(f"cannot write {what}: {remedy or error}") from error


def is_full(error: StorageError) -> bool:
    """Whether the disk or the quota is full: what making room may mend."""
    return isinstance(error.__cause__, Exception) and _errno_of(error.__cause__) in (errno.ENOSPC, errno.EDQUOT)


def write_at(fd: int, data: bytes, offset: int) -> None:
    """All of it: one call moves 2 GiB at most, and less where a disk is nearly full."""
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


def read_at(fd: int, size: int, offset: int) -> bytes:
    """All of it, or as much as there is."""
    found = bytearray()
    while len(found) < size and (more := os.pread(fd, size - len(found), offset + len(found))):
        found += more
    return bytes(found)


def fsync_dir(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Makes the content of a file durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Removes a file, a link, or a folder with all that is in it; nothing there is fine. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a whole file so that any reader, also after a crash, sees the old content or the new; raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


class SlotFile:
    """A small value on disk that can be changed even when the disk is full: two slots, written in turn, in place.

    A slot is "sequence value checksum"; the newest one that checks wins. A torn write leaves the value before it, and
    a slot that does not check, from which the reader knows that a newer value may have been there.
    """

    SLOT_BYTES = 4096  # a block each: a torn write of one never touches the other

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sequence = 0
        self._lost = False  # neither slot checked: both are to be written again

    def read(self) -> tuple[int | None, bool]:
        """The value, None when neither slot checks, and whether it is surely the last one written.

        Raises FileNotFoundError or another OSError.
        """
        content = self._path.read_bytes()
        halves = content[: self.SLOT_BYTES], content[self.SLOT_BYTES : 2 * self.SLOT_BYTES]
        slots = [_decode_slot(half) for half in halves]
        found = [slot for slot in slots if slot is not None]
        if not found:
            self._lost = True
            return None, False
        self._sequence, value = max(found)
        # only the very first write leaves the other slot as it was made
        first = self._sequence == 1 and halves[0] == bytes(self.SLOT_BYTES)
        return value, len(found) == 2 or first

    def write(self, value: int) -> None:
        """Makes a value durable; raises OSError, after which the value before still stands."""
        if not self._path.exists():
            replace_file(self._path, bytes(2 * self.SLOT_BYTES))
            self._lost = False
        self._write_slot(value)
        if self._lost:
            self._write_slot(value)
            self._lost = False

    def _write_slot(self, value: int) -> None:
        sequence = self._sequence + 1
        fd = os.open(self._path, os.O_WRONLY)
        try:
            write_at(fd, _encode_slot(sequence, value), sequence % 2 * self.SLOT_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)
        self._sequence = sequence


def _encode_slot(sequence: int, value: int) -> bytes:
    body = f"{sequence} {value}"
    return f"{body} {blake3(body.encode()).hexdigest()}\n".encode().ljust(256, b"\0")


def _decode_slot(content: bytes) -> tuple[int, int] | None:
    try:
        sequence, value, _ = content.split(b"\n")[0].split(b" ")
        numbers = int(sequence), int(value)
    except ValueError:
        return None
    return numbers if content.startswith(_encode_slot(*numbers)) else None
