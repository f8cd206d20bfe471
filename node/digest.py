"""A payload's digest, taken beside the event loop: at 3 GB/s it would hold up a quick link by a third."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from blake3 import blake3

ASIDE_BYTES = 128 << 10  # a smaller part is hashed sooner than another thread is woken
MOST_WAITING = 4  # parts handed over and not yet hashed; each is kept alive until then


class Digest:
    """BLAKE3 over the parts in their order; large ones are hashed by a thread, which `close` or `value` ends.

    A part must stay as it is until then. The outcome does not depend on the threads' timing, only the waits do, which
    are bounded by MOST_WAITING parts.
    """

    def __init__(self) -> None:
        self._hash = blake3()
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[object]] = deque()

    def update(self, part: bytes | memoryview) -> None:
        """Takes the next part."""
        if self._thread is None and len(part) < ASIDE_BYTES:
            self._hash.update(part)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "digest")
        self._waiting.append(self._thread.submit(self._hash.update, part))
        while self._waiting[0].done() or len(self._waiting) > MOST_WAITING:
            self._waiting.popleft().result()
            if not self._waiting:
                return

    def value(self) -> bytes:
        """The digest of all parts."""
        self.close()
        return self._hash.digest()

    def close(self) -> None:
        """Waits for the thread and ends it; safe to call twice."""
        while self._waiting:
            self._waiting.popleft().result()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
