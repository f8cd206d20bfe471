"""One-byte words between the ranks of one host, over pipes: what they wait for, and learn of each other's end by."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Iterable, Mapping

from peerloom.optim.matrix_fsdp.deadline import Deadline
from peerloom.optim.matrix_fsdp.links import Links


class Words:
    """A pipe from each rank of a group to each other; `incoming` and `outgoing` are their ends here, by rank.

    Gloo would carry the same words at a hundred times the cost: it has a thread to wake on both sides, and a
    connection's two directions to arrange. A pipe is written and read by who computes, and ends when its writer does.
    As any lock of the kernel it orders memory: who has heard a word sees what was written before it was said.
    """

    def __init__(self, links: Links, incoming: Mapping[int, int], outgoing: Mapping[int, int]) -> None:
        self._links = links
        self._incoming, self._outgoing = dict(incoming), dict(outgoing)
        for fd in self._incoming.values():
            os.set_blocking(fd, False)
        self._end = weakref.finalize(self, close_all, [*incoming.values(), *outgoing.values()])

    def say(self, word: int, what: str) -> None:
        """Tells all others; `what` is what it is about. Raises RankLost."""
        for peer, fd in self._outgoing.items():
            try:
                os.write(fd, bytes([word]))
            except OSError as error:
                raise self._links.loss([peer], what, RuntimeError(str(error))) from error

    def hear(self, word: int, what: str) -> None:
        """Returns when all others have said it, as the next of their words. Raises RankLost, also for another word."""
        deadline = self._links.deadline()
        for peer, fd in self._incoming.items():
            try:
                said = _read(fd, deadline)
                if said != word:
                    raise RuntimeError(f"rank {self._links.ranks[peer]} is at another point of its pass")
            except (RuntimeError, OSError) as error:
                raise self._links.loss([peer], what, RuntimeError(str(error))) from error

    def meet(self, word: int, what: str) -> None:
        """Returns when all have come here."""
        self.say(word, what)
        self.hear(word, what)

    def close(self) -> None:
        """Ends all pipes, at which whoever waits for this rank fails; and so does this one from now on."""
        self._end()
        self._incoming, self._outgoing = dict.fromkeys(self._incoming, -1), dict.fromkeys(self._outgoing, -1)


def close_all(fds: Iterable[int]) -> None:
    """Closes these descriptors."""
    for fd in fds:
        os.close(fd)


def _read(fd: int, deadline: Deadline) -> int:
    while True:
        try:
            said = os.read(fd, 1)
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(deadline.left.total_seconds() * 1e3):
                raise RuntimeError("it said nothing in time") from None
            continue
        if not said:
            raise RuntimeError("it has closed its end")
        return said[0]
