"""Whom a node floods with: a ring over all live peers, and random chords; the same view gives the same overlay."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from peerloom.protocol.types import PeerId


def partners(own: PeerId, peers: Collection[PeerId], seed: int, neighbours: int) -> tuple[PeerId, ...]:
    """The peers that this node opens a link to; with those that open one to it some `neighbours` links.

    The ring orders all by a hash of the run's seed, so it is connected whatever the chords; chords go to the peers of
    highest hash with this one, so that a peer that comes or goes moves few of them.
    """
    others = sorted(set(peers) - {own}, key=lambda peer: _hash(seed, peer))
    if not others:
        return ()
    place = _hash(seed, own)
    after = next((peer for peer in others if _hash(seed, peer) > place), others[0])
    chosen = {after: None}
    far = sorted(others, key=lambda peer: _hash(seed, *sorted((own, peer))), reverse=True)
    for peer in far:
        if len(chosen) > (neighbours - 1) // 2:  # each chord has two ends, as each edge of the ring has
            break
        chosen.setdefault(peer)
    return tuple(chosen)


def _hash(seed: int, *peers: PeerId) -> bytes:
    text = "\0".join((str(seed), *peers))
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"floodoverlay").digest()
