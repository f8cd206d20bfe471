"""Notices peers whose parameters stand still."""

from __future__ import annotations

from collections import OrderedDict

from peerloom.protocol.errors import BadPayload
from peerloom.protocol.types import PeerId

KEPT = 4096  # payloads: of the newest meetings with all peers


class Repeats:
    """Remembers the digests of payloads: a peer that trains never sends the same bytes in two rounds of its own.

    One that does is frozen, or a liar that hopes to hold others back, from so near that its distance says nothing.
    """

    def __init__(self) -> None:
        self._rounds: OrderedDict[tuple[PeerId, bytes], int] = OrderedDict()

    def check(self, peer: PeerId, round: int, digest: bytes) -> None:
        """Takes note of a payload that verified; raises BadPayload for one of another round."""
        before = self._rounds.setdefault((peer, digest), round)
        if before != round:
            raise BadPayload(f"its parameters of round {round} are those of round {before}, bit for bit")
        while len(self._rounds) > KEPT:
            self._rounds.popitem(last=False)
