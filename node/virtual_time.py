"""An asyncio loop whose clock jumps to the next timer when nothing is ready: hours of a swarm run in milliseconds.

Everything in it must be in memory: a socket or a thread would need real time. `run_in_executor`, and with it
`asyncio.to_thread`, runs the function at once in the loop's own thread, so a run stays deterministic.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RESOLUTION_S = 1e-6  # timers closer than this fire together
LATEST_START = 1e9  # where a float still resolves a tenth of RESOLUTION_S
WALL_BASE = 1_700_000_000.0  # Unix time at virtual time 0


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: the tasks named in the message would wait for ever."""


class _JumpingSelector(selectors.BaseSelector):
    """Polls the real descriptors (the loop's own wake-up pipe), then moves time forward instead of waiting."""

    def __init__(self, start: float) -> None:
        self._inner = selectors.DefaultSelector()
        self.now = start

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._inner.select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock
        if timeout > 0:
            # rounding must not leave `now` where it was: the loop would then spin on the same timer
            self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A selector loop on virtual time that starts at `start` seconds, 0 to 1e9; raises Deadlock out of run_*()."""

    def __init__(self, start: float = 0.0) -> None:
        self._jumping = _JumpingSelector(start)
        super().__init__(self._jumping)
        if not 0 <= start <= LATEST_START:
            self.close()  # a half-made loop would complain when it is collected
            raise ValueError(f"virtual time starts between 0 and {LATEST_START:g} s, not at {start:g}")
        # asyncio runs a timer once it is less than this ahead; a nanosecond, its default, is lost in rounding at 1e7 s
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now

    def run_forever(self) -> None:
        """Runs until stop(); names the waiting tasks when they deadlock."""
        try:
            super().run_forever()
        except Deadlock:
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self))) or "none"
            raise Deadlock(
                f"at virtual time {self.time():g} s nothing is ready and no timer is set; tasks waiting: {waiting}"
            ) from None

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Calls `func` now, in this thread; the future returned is done."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualClock:
    """`seams.Clock` on a VirtualTimeLoop: wall time is `base` + virtual time + a skew that a test may set or jump."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, *, base: float = WALL_BASE, skew: float = 0.0
    ) -> None:
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._base = base
        self.skew = skew

    def monotonic(self) -> float:
        """The loop's virtual time in seconds."""
        return self._loop.time()

    def wall(self) -> float:
        """Unix time in seconds, this clock's error included."""
        return self._base + self._loop.time() + self.skew

    def jump(self, seconds: float) -> None:
        """Sets the wall clock forward (or back) as a user or NTP would; monotonic() does not see it."""
        self.skew += seconds


def run_virtual(coro_factory: Callable[[], Coroutine[Any, Any, T]], start: float = 0.0) -> T:
    """Runs the coroutine to its end on a fresh VirtualTimeLoop, cancels what is left, closes the loop.

    Raises Deadlock, and whatever the coroutine raises.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start)) as runner:
        return runner.run(coro_factory())
