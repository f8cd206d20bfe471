"""Where the seconds of a start go: marks on a monotonic clock."""

from __future__ import annotations

from peerloom.node.seams import Clock


class Phases:
    """Each mark ends a phase that began at the mark before it; a name is marked once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = self.began = clock.monotonic()
        self.seconds: list[tuple[str, float]] = []

    def has(self, name: str) -> bool:
        """Whether the phase has ended."""
        return any(name == known for known, _ in self.seconds)

    def mark(self, name: str) -> None:
        """Ends the phase `name` now, unless it has ended before."""
        if self.has(name):
            return
        now = self._clock.monotonic()
        self.seconds.append((name, now - self._last))
        self._last = now

    def table(self) -> str:
        """One line: each phase with its seconds, and their sum."""
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.seconds]
        return f"start took {self._last - self.began:.1f} s: " + ", ".join(parts)
