"""A cap in bytes a second over many calls: each message is told when it may pass."""

from __future__ import annotations

from peerloom.protocol.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES, LEAST_RATE

SLICE_S = 0.15  # what one message of a payload may take of the cap's time; a small call waits for two a stream
SLACK_S = 0.05  # time that a late timer may make up for
WINDOW_S = 5.0  # over which a cap is to hold
LEAST_SHARE = 0.5  # of the cap, that is never held back
LEAST_CAP = 2 * LEAST_RATE  # bytes a second: an exchange and a fetch at once are still not broken off as too slow
_ALIGNMENT = 4  # bytes of a number


class Bucket:
    """Lets `rate` bytes a second pass, in the order of the asking; `now` is of one clock that never jumps.

    In any w seconds at most rate * (w + SLACK_S) bytes and one message pass: with messages of `slice_bytes(rate)`, less
    than 5 % over the cap in any 5 s.
    """

    def __init__(self, rate: int) -> None:
        if rate <= 0:
            raise ValueError(f"a cap is a positive number of bytes a second, not {rate}")
        self.rate = rate
        self._passing = float(rate)  # what is not held back
        self._free_at = float("-inf")

    def wait_s(self, size: int, now: float) -> float:
        """Takes `size` bytes of the cap; returns in how many seconds they may pass."""
        free_at = max(self._free_at, now - SLACK_S)
        self._free_at = free_at + size / self._passing
        return max(0.0, free_at - now)

    def charge(self, size: float, now: float) -> float:
        """Takes what does not wait for its turn; returns in how many seconds its time is over, WINDOW_S at most.

        What would keep others waiting longer is let go: it is out of every window by then.
        """
        free_at = max(self._free_at, now - SLACK_S)
        self._free_at = max(free_at, min(free_at + size / self._passing, now + WINDOW_S))
        return max(0.0, self._free_at - now)

    def hold_back(self, rate: float) -> None:
        """From now on leaves so many bytes a second of the cap unused, half of it at most."""
        self._passing = self.rate - min(rate, LEAST_SHARE * self.rate)


def slice_bytes(rate: int) -> int:
    """The largest message of a payload under a cap (0: none): whole fp32 numbers, CHUNK_BYTES at most."""
    if not rate:
        return CHUNK_BYTES
    return max(LEAST_CHUNK_BYTES, min(CHUNK_BYTES, int(rate * SLICE_S) // _ALIGNMENT * _ALIGNMENT))


def agreed_bytes(own: int, wished: int) -> int:
    """The size of messages to a peer that wishes for `wished` at most (0: any), `own` being ours."""
    return own if not wished else min(own, max(wished // _ALIGNMENT * _ALIGNMENT, LEAST_CHUNK_BYTES))
