"""When a training process that still lives no longer trains: no step for many times its usual one."""

from __future__ import annotations

STALL_FACTOR = 20.0  # usual steps that may pass without one
LEAST_STALL_S = 60.0  # and by default never less than this; steps are told about once a second only
BETWEEN_ROUNDS_S = 240.0  # outside the local steps, where it may evaluate or write a checkpoint in silence: at most
FIRST_STEP_S = 300.0  # until a step is known: libraries compile, and a large model's first step is slow
SMOOTHING = 0.3  # weight of the newest measurement of the usual step


class StepPace:
    """Learns how long a step usually takes and says when one is overdue; every `now` is of a clock that never jumps.

    `least_s` is the least patience with a process that has taken a step.
    """

    def __init__(self, least_s: float = LEAST_STALL_S) -> None:
        self._least_s = least_s
        self.usual_s: float | None = None
        self._steps = 0
        self._alive_at = 0.0
        self._counting_since: float | None = None
        self._usual_round_s: float | None = None
        self._round_at: float | None = None

    def alive(self, now: float) -> None:
        """Something else than a step shows that things go on: another state, another round, bytes that move."""
        self._alive_at = max(now, self._alive_at)
        self._counting_since = None

    def measured(self, step_s: float) -> None:
        """A step took so long, on average over some."""
        if self.usual_s is None:
            self.usual_s = step_s
        else:
            self.usual_s += SMOOTHING * (step_s - self.usual_s)

    def round_ended(self, now: float) -> None:
        """A round is over: how long they are tells how long their ends may be silent."""
        if self._round_at is not None:
            newest, usual = now - self._round_at, self._usual_round_s
            self._usual_round_s = newest if usual is None else usual + SMOOTHING * (newest - usual)
        self._round_at = now

    def stepped(self, steps: int, now: float) -> None:
        """The process tells that it has taken `steps` steps in this life; fewer than before: it is a new one."""
        taken, since = steps - self._steps, self._counting_since
        if taken > 0 and since is not None and now > since:
            self.measured((now - since) / taken)
        self._steps = steps
        self._alive_at = self._counting_since = now

    def patience_s(self, training: bool) -> float:
        """How long nothing may happen, during the local steps or between them."""
        if self.usual_s is None:
            return FIRST_STEP_S
        least = self._least_s
        if not training:
            round_s = BETWEEN_ROUNDS_S if self._usual_round_s is None else self._usual_round_s
            least = min(max(BETWEEN_ROUNDS_S, least), max(least, STALL_FACTOR * round_s))
        return max(least, STALL_FACTOR * self.usual_s)

    def overdue(self, now: float, training: bool = True) -> str:
        """Why the process counts as stalled, as a sentence; "" while it does not."""
        waited = now - self._alive_at
        if waited <= self.patience_s(training):
            return ""
        usual = "none before" if self.usual_s is None else f"usually one takes {self.usual_s:.2g} s"
        return f"no step for {waited:.0f} s ({usual}): the training process is frozen, starved or swapped out"
