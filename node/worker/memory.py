"""The memory that daemon and worker share: one anonymous block, cut into page-aligned regions.

| region | content | written by |
|---|---|---|
| params | fp32: the live parameters on the CPU (a copy of y for a GPU); holds y at the exchange point | worker |
| theta | fp32: the round's start point; a donor's state before `adopt` | worker; daemon for `adopt` |
| previous | fp32: y_{t-1} (momentum "pre") or x_{t-1} ("post") | worker |
| inbox | the partner's encoded y | daemon |
| outbox | this node's encoded y; for fp32 without overlap it is the params region itself | worker |
| proposal | a stage's encoded y, for another host of it; inbox and outbox are its activations' | worker |
| partner | that host's | daemon |

The block has no name anywhere (a memfd, or a file unlinked at once), so nothing is left after kill -9 of both ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import Literal

from peerloom.protocol.types import Span

Region = Literal["params", "theta", "previous", "inbox", "outbox", "proposal", "partner"]
PAGE = 4096


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the regions lie, for `numel` parameters and encoded proposals of `payload_bytes`."""

    numel: int
    payload_bytes: int
    own_outbox: bool  # False: the params region is the outbox
    piece_bytes: tuple[int, ...] = ()  # of payload_bytes; (): one piece
    replica_bytes: int = 0  # of a stage's encoded weights

    def span(self, region: Region) -> tuple[int, int]:
        """(first byte, length) of a region."""
        flat, page = self.numel * 4, _whole(self.numel * 4)
        if region == "outbox" and not self.own_outbox:
            region = "params"
        match region:
            case "params":
                return 0, flat
            case "theta":
                return page, flat
            case "previous":
                return 2 * page, flat
            case "inbox":
                return 3 * page, self.payload_bytes
            case "outbox":
                return 3 * page + _whole(self.payload_bytes), self.payload_bytes
            case "proposal":
                return 3 * page + 2 * _whole(self.payload_bytes), self.replica_bytes
            case "partner":
                return 3 * page + 2 * _whole(self.payload_bytes) + _whole(self.replica_bytes), self.replica_bytes

    def pieces(self, span: Span) -> slice:
        """Where the encoding of some pieces lies in inbox and outbox."""
        sizes = self.piece_bytes or (self.payload_bytes,)
        return slice(sum(sizes[: span[0]]), sum(sizes[: span[1]]))

    @property
    def total_bytes(self) -> int:
        """The size of the whole block."""
        start, length = self.span("partner" if self.replica_bytes else "outbox" if self.own_outbox else "inbox")
        return start + length


def _whole(size: int) -> int:
    """In whole pages."""
    return -(-size // PAGE) * PAGE


def anonymous_file() -> int:
    """An empty file without a name, as a descriptor that children do not inherit unless told."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("peerloom-worker")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedBlock:
    """One end's mapping of the block; the worker sizes it (`create`), the daemon maps it after that."""

    def __init__(self, fd: int, layout: BlockLayout, *, create: bool = False) -> None:
        if create:
            os.ftruncate(fd, layout.total_bytes)
        self.layout = layout
        self._map = mmap.mmap(fd, layout.total_bytes)

    def view(self, region: Region) -> memoryview:
        """The bytes of a region, writable; it keeps the mapping alive."""
        start, length = self.layout.span(region)
        return memoryview(self._map)[start : start + length]

    def close(self) -> None:
        """Unmaps the block; when a view of it is still held somewhere, the mapping ends with the last view."""
        try:
            self._map.close()
        except BufferError:
            return
