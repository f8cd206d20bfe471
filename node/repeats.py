"""Notices peers whose parameters stand still."""

from __future__ import annotations

from collections import OrderedDict

from peerloom.protocol.errors import BadPayload
from peerloom.protocol.types import PeerId, Span

KEPT = 4096  # payloads: of the newest meetings with all peers


class Repeats:
    """Remembers the digests of payloads: a peer that trains never sends the same bytes in two rounds of its own.

    One that does is frozen, or a liar that hopes to hold others back, from so near that its distance says nothing. But
    a payload may cover only numbers that no training moves, such as rows of an embedding that no token names. So only
    where this node's own bytes have moved since it last met somebody there, and are not the peer's, is it to blame.
    """

    def __init__(self) -> None:
        self._rounds: OrderedDict[tuple[PeerId, bytes], int] = OrderedDict()
        self._own: dict[Span, tuple[int, bytes, bytes]] = {}  # the last round of this node, its digest, the one before

    def check(self, peer: PeerId, round: int, digest: bytes, *, pieces: Span, own_round: int, own: bytes) -> None:
        """Takes note of a payload that verified; raises BadPayload for one of another round.

        `own` is the digest of this node's proposal of the same pieces, in its round `own_round`.
        """
        moved = self._moved(pieces, own_round, own)
        before = self._rounds.setdefault((peer, digest), round)
        if before != round and moved and digest != own:
            raise BadPayload(f"its parameters of round {round} are those of round {before}, bit for bit")
        while len(self._rounds) > KEPT:
            self._rounds.popitem(last=False)

    def _moved(self, pieces: Span, round: int, digest: bytes) -> bool:
        """Whether this node's own bytes are others than in its round before; False while none is known."""
        last, now, before = self._own.get(pieces, (round, digest, digest))
        if round != last:
            now, before = digest, now
        self._own[pieces] = (round, now, before)
        return now != before
