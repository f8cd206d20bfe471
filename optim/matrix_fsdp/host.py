"""Memory that the ranks of a group on one host have in common, once every one of them has proved that it can be had."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from types import TracebackType

import torch

from peerloom.optim.matrix_fsdp.links import Links

PAGE = mmap.PAGESIZE
UNWANTED = "not wanted"

_NAME = "peerloom-board"
_RECORD_BYTES = 256


class CommonFile:
    """A file of memory that all ranks of a group have open; it has no name in any file system and ends with them.

    `reason` says why there is none: the same on all ranks, "" where there is one. Used as a context, at whose end this
    rank's descriptor is closed: what was mapped by then stays, as long as one rank lives.
    """

    def __init__(self, fd: int | None, reason: str) -> None:
        self._fd, self.reason = fd, reason

    @property
    def there(self) -> bool:
        return self._fd is not None

    def __enter__(self) -> CommonFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def map(self, nbytes: int) -> mmap.mmap:
        """All of it, grown to so many bytes, which must be the same on all ranks. Raises OSError."""
        assert self._fd is not None  # ours: only without a reason
        os.ftruncate(self._fd, nbytes)
        return mmap.mmap(self._fd, nbytes)


def common_file(links: Links, wanted: bool, device: torch.device) -> CommonFile:
    """The file of a group, if all of its ranks want one, and can open it and find in it what the first has written.

    Every rank must call it. Raises RankLost.
    """
    if device.type != "cpu" or not links.on_gloo or links.world_size == 1:
        return CommonFile(None, UNWANTED)
    fd, nonce, problem = None, "", "" if wanted else UNWANTED
    try:
        if wanted and links.rank == 0:
            fd, nonce = _make()
    except OSError as error:
        problem = str(error)
    offer = _told(links, f"{os.getpid()} {fd} {nonce}" if fd is not None else "")[0]
    try:
        if wanted and links.rank != 0 and offer:
            fd = _open(*offer.split())
    except OSError as error:
        problem = str(error)
    problems = zip(links.ranks, _told(links, problem), strict=True)
    reason = next((f"rank {rank}: {told}" for rank, told in problems if told), "")
    if reason and fd is not None:
        os.close(fd)
    return CommonFile(None if reason else fd, reason)


def _make() -> tuple[int, str]:
    """A file and the word in its first page; what is needed of it later is tried."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no files of memory without a name (memfd_create)")
    fd, nonce = os.memfd_create(_NAME), secrets.token_hex(16)
    try:
        os.ftruncate(fd, 2 * PAGE)
        with mmap.mmap(fd, 2 * PAGE) as there:
            there[: len(nonce)] = nonce.encode()
            there.madvise(mmap.MADV_REMOVE, PAGE, PAGE)
    except OSError:
        os.close(fd)
        raise
    return fd, nonce


def _open(pid: str, number: str, nonce: str) -> int:
    """The same file, through the process that has it open."""
    path = f"/proc/{pid}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # before it is opened: it may be another host's process
        raise OSError(errno.ENXIO, "is not the first rank's: it runs on another host, or in another container", path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(fd, len(nonce), 0) != nonce.encode():
        os.close(fd)
        raise OSError(errno.ENXIO, "is the memory of another group: the first rank runs on another host", path)
    return fd


def _told(links: Links, said: str) -> list[str]:
    """What every rank says, in rank order."""
    written = said.encode()[:_RECORD_BYTES].ljust(_RECORD_BYTES, b"\0")
    record = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    rows = links.exchange(record, "the search for common memory")
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
