"""What the ranks of a group on one host have in common, once every one of them has proved that it can be had."""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from peerloom.optim.matrix_fsdp.links import Links
from peerloom.optim.matrix_fsdp.words import Words, close_all

PAGE = mmap.PAGESIZE
UNWANTED = "not wanted"

_NAME = "peerloom-board"
_REASON_BYTES = 256
_OFFER_BYTES, _PIPE_BYTES = 128, 40  # of a rank, and for each rank of its group


@dataclass(slots=True)
class Common:
    """A file of memory that all ranks of a group have open, and words between them; nothing of it has a name anywhere.

    `reason` says why there is none: the same on all ranks, "" where there is one. Used as a context, at whose end this
    rank's descriptor of the file is closed: what was mapped by then stays, as long as one rank lives.
    """

    fd: int = -1
    words: Words | None = None
    reason: str = ""

    def __enter__(self) -> Common:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def map(self, nbytes: int) -> mmap.mmap:
        """All of the file, grown to so many bytes, which must be the same on all ranks. Raises OSError."""
        os.ftruncate(self.fd, nbytes)
        return mmap.mmap(self.fd, nbytes)


def common(links: Links, wanted: bool, device: torch.device) -> Common:
    """What the ranks of a group have in common, if all of them want it and can open what the others offer.

    They open it by way of /proc, and look at what it is before. Every rank must call this. Raises RankLost.
    """
    if device.type != "cpu" or not links.on_gloo or links.world_size == 1:
        return Common(reason=UNWANTED)
    mine, problem = _Ends(), "" if wanted else UNWANTED
    try:
        if wanted:
            mine.make(links)
    except OSError as error:
        problem = str(error)
    offers = _told(links, "" if problem else mine.offer(), _OFFER_BYTES + _PIPE_BYTES * links.world_size)
    try:
        if all(offers):
            mine.open([json.loads(offer) for offer in offers], links.rank)
    except OSError as error:
        problem = str(error)
    problems = zip(links.ranks, _told(links, problem, _REASON_BYTES), strict=True)
    reason = next((told if told == UNWANTED else f"rank {rank}: {told}" for rank, told in problems if told), "")
    close_all(mine.offered.values())  # the others have them
    if reason:
        close_all([*mine.incoming.values(), *mine.outgoing.values(), *([mine.file] if mine.file >= 0 else [])])
        return Common(reason=reason)
    return Common(mine.file, Words(links, mine.incoming, mine.outgoing))


@dataclass(slots=True)
class _Ends:
    """Descriptors of one rank: the file, and its ends of pipes by the rank at the other; `offered` are for those."""

    file: int = -1
    nonce: str = ""
    incoming: dict[int, int] = field(default_factory=dict)
    outgoing: dict[int, int] = field(default_factory=dict)
    offered: dict[int, int] = field(default_factory=dict)

    def make(self, links: Links) -> None:
        """A pipe from each other rank; on the first the file, in whose first page is the nonce. Raises OSError."""
        if links.rank == 0:
            if not hasattr(os, "memfd_create"):
                raise OSError(errno.ENOSYS, "this system has no files of memory without a name (memfd_create)")
            self.file, self.nonce = os.memfd_create(_NAME), secrets.token_hex(16)
            os.ftruncate(self.file, 2 * PAGE)
            with mmap.mmap(self.file, 2 * PAGE) as there:
                there[: len(self.nonce)] = self.nonce.encode()
                there.madvise(mmap.MADV_REMOVE, PAGE, PAGE)  # which is needed later
        for rank in range(links.world_size):
            if rank != links.rank:
                self.incoming[rank], self.offered[rank] = os.pipe()

    def offer(self) -> str:
        """What the others need to open it."""
        pipes = {str(rank): [fd, os.fstat(fd).st_ino] for rank, fd in self.offered.items()}
        return json.dumps({"pid": os.getpid(), "file": self.file, "nonce": self.nonce, "pipes": pipes})

    def open(self, offers: list[dict[str, Any]], rank: int) -> None:
        """The first rank's file and this one's end of the others' pipes. Raises OSError."""
        if rank != 0:
            nonce = offers[0]["nonce"].encode()
            self.file = _open(offers[0]["pid"], offers[0]["file"], f"/memfd:{_NAME} (deleted)", os.O_RDWR)
            if os.pread(self.file, len(nonce), 0) != nonce:
                raise OSError(errno.ENXIO, "the first rank's memory is another: it runs on another host")
        for other, offer in enumerate(offers):
            if other != rank:
                fd, inode = offer["pipes"][str(rank)]
                self.outgoing[other] = _open(offer["pid"], fd, f"pipe:[{inode}]", os.O_WRONLY)


def _open(pid: int, fd: int, name: str, flags: int) -> int:
    """What a process has open, if it is what it should be: else it may be another host's process, and is left alone."""
    path = f"/proc/{pid}/fd/{fd}"
    if (found := os.readlink(path)) != name:
        raise OSError(errno.ENXIO, f"{found} is not what another rank has: it runs on another host or in a container")
    return os.open(path, flags | os.O_CLOEXEC)


def _told(links: Links, said: str, size: int) -> list[str]:
    """What every rank says, in rank order."""
    record = torch.frombuffer(bytearray(said.encode()[:size].ljust(size, b"\0")), dtype=torch.uint8)
    rows = links.exchange(record, "the search for common memory")
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
