"""How many streams are served at once: over all, and for each peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from peerloom.protocol import limits
from peerloom.protocol.errors import LimitExceeded, LinkError
from peerloom.protocol.types import PeerId


class StreamSlots:
    """Counts the streams being served."""

    def __init__(self) -> None:
        self._of: Counter[PeerId] = Counter()

    @contextmanager
    def hold(self, peer: PeerId) -> Iterator[None]:
        """Takes a slot; raises LimitExceeded when the peer has all of its own, LinkError when the node is full."""
        if self._of[peer] >= limits.MAX_STREAMS_PER_PEER:
            raise LimitExceeded(f"more than {limits.MAX_STREAMS_PER_PEER} streams at once from {peer}")
        if self._of.total() >= limits.MAX_STREAMS:
            raise LinkError(f"busy: {limits.MAX_STREAMS} streams are being served")
        self._of[peer] += 1
        try:
            yield
        finally:
            self._of[peer] -= 1
            if not self._of[peer]:
                del self._of[peer]
