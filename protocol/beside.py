"""What a node moves beside its messages and cannot hold back: seen once it has moved, and taken from the same cap.

The DHT's traffic is of that kind. Two things keep its sum with the messages to the cap in any 5 s that they fill:
- What was seen is taken from what may pass next, so that no 5 s that begin with a burst hold too much.
- Nor do those that end with one, since room was made before. For what the node itself is about to ask for, it is
  (`saved`). Others' bursts cannot be foreseen: the largest of late is held free in every 5 s, as far as it is larger
  than what moves at all times.
So a burst costs its own size once more; the cap is kept, and not always used up.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from peerloom.protocol.bucket import WINDOW_S, Bucket

LAG_S = 0.5  # from a byte to the first message that waits for it: a look, and a slice each of two streams
MEMORY_S = 60.0  # for which the largest burst is remembered, at least
SETTLED_S = 5.0  # after which nothing that was counted elsewhere is on its way any more


class _Seen(NamedTuple):
    at: float
    size: int
    unforeseen: float


class Beside:
    """One direction; `bucket` None: no cap, it is only counted. `now` is of the bucket's clock."""

    def __init__(self, bucket: Bucket | None) -> None:
        self._bucket = bucket
        self._saved, self._saved_until = 0.0, float("-inf")
        self._seen: deque[_Seen] = deque()  # of the last WINDOW_S
        self._largest = self._largest_before = 0.0
        self._began = float("-inf")

    def saved(self, size: int, now: float) -> float:
        """Takes `size` bytes of the cap for what this node is about to cause; returns in how many seconds it may."""
        if self._bucket is None:
            return 0.0
        seconds = self._bucket.charge(size, now)
        if now > self._saved_until:
            self._saved = 0.0
        self._saved += size
        self._saved_until = now + seconds + WINDOW_S
        return seconds

    def seen(self, size: int, now: float) -> None:
        """Takes note of `size` bytes that have moved since the last call, which may be none."""
        if self._bucket is None:
            return
        foreseen = min(self._saved, float(size)) if now <= self._saved_until else 0.0
        self._saved -= foreseen
        self._seen.append(_Seen(now, size, size - foreseen))
        while self._seen[0].at <= now - WINDOW_S:
            self._seen.popleft()
        self._bucket.charge(size, now)
        self._bucket.hold_back(self._burst(now) / WINDOW_S)

    def _burst(self, now: float) -> float:
        """The largest of late that nobody foresaw."""
        if now - self._began > MEMORY_S:
            self._began, self._largest_before, self._largest = now, self._largest, 0.0
        usual = sum(seen.unforeseen for seen in self._seen) * LAG_S / WINDOW_S
        late = sum(seen.unforeseen for seen in self._seen if seen.at > now - LAG_S)
        self._largest = max(self._largest, late - usual)
        return max(self._largest, self._largest_before)

    @property
    def is_too_much(self) -> bool:
        """Whether it alone was above the cap over the last WINDOW_S: no wait of any message helps then."""
        return self._bucket is not None and sum(seen.size for seen in self._seen) > self._bucket.rate * WINDOW_S


class Rest:
    """Of a total, what is beyond a part that is counted elsewhere; both are cumulative, and read as they come.

    What is on its way is in one and not yet in the other. It is taken for the rest's once at most, and not again until
    the part has caught up; what the part alone counted, and never moved, is forgotten when the part has come to rest.
    """

    def __init__(self) -> None:
        self._counted = 0
        self._part, self._since = 0, float("-inf")

    def more(self, total: int, part: int, now: float) -> int:
        """What the rest has grown by since the last call."""
        if part != self._part:
            self._part, self._since = part, now
        rest = total - part
        grown = max(0, rest - self._counted)
        settled = now - self._since > SETTLED_S
        self._counted = rest if settled else max(rest, self._counted)
        return grown
