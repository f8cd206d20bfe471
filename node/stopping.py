"""SIGINT, SIGTERM and SIGHUP, from a node's first moment to its last: a stop takes ten seconds at most."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Protocol

log = logging.getLogger(__name__)

ANSWER_S = 6.5  # what the training process gets to end its step and save; then it is ended by force


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a command to end: Ctrl-C, a service manager, a terminal that is closed (unless `nohup` hides that)."""
    hidden = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if hidden else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stoppable(Protocol):
    """What the second half of a stop acts on: a Node."""

    def drain(self) -> None:
        """Begins an orderly end."""
        ...

    def kill_worker(self) -> None:
        """Ends the training process by force."""
        ...


class Stopper:
    """Takes the signals of the current loop, `install` to `remove`; cancels the current task while there is no node."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._node: Stoppable | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._signals = stop_signals()
        self.early = False  # stopped before there was anything to drain

    def install(self) -> None:
        """From here on the signals come here."""
        for number in self._signals:
            self._loop.add_signal_handler(number, self._told)

    def remove(self) -> None:
        """The signals are nobody's."""
        if self._deadline is not None:
            self._deadline.cancel()
        for number in self._signals:
            self._loop.remove_signal_handler(number)

    def drains(self, node: Stoppable) -> None:
        """From here on a signal drains `node`."""
        self._node = node

    def _told(self) -> None:
        if self._node is None:
            if not self.early and self._task is not None:
                self.early = True
                self._task.cancel()
        elif self._deadline is None:
            log.info("stopping: ending the round, saving, leaving the swarm; once more to stop at once")
            self._deadline = self._loop.call_later(ANSWER_S, self._force, "the training process does not answer")
            self._node.drain()
        else:
            self._force("told to stop at once")

    def _force(self, why: str) -> None:
        log.warning("%s: stopping without a new checkpoint, the last one stands", why)
        if self._node is not None:
            self._node.kill_worker()
