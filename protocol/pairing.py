"""Who meets whom: the shared random matching of a round, the order among peers that breaks ties, the two policies."""

from __future__ import annotations

from collections.abc import Iterable, Set
from hashlib import sha256
from typing import Protocol

from peerloom.protocol.events import PeerSeen
from peerloom.protocol.messages import DeclineReason
from peerloom.protocol.runspec import GaslocSpec
from peerloom.protocol.types import PeerId


def scheduled_matching(seed: int, round: int, n: int) -> list[tuple[int, int]]:
    """A uniform random matching of 0..n-1 as sorted pairs (i, j), i < j; an odd n leaves one index out.

    The indices are ordered by SHA-256 of "peerloom-matching-v1:{seed}:{round}:{i}" and paired consecutively, so every
    node, on any machine, draws the same matching.
    """
    if n < 0:
        raise ValueError(f"n is {n}: a matching needs a number of peers, 0 or more")
    order = sorted(range(n), key=lambda i: sha256(f"peerloom-matching-v1:{seed}:{round}:{i}".encode("ascii")).digest())
    return sorted((min(pair), max(pair)) for pair in zip(order[::2], order[1::2], strict=False))


def scheduled_partner(seed: int, round: int, me: PeerId, peers: Iterable[PeerId]) -> PeerId | None:
    """The peer that the round's matching over the sorted ids gives to `me`, None when it leaves `me` out.

    `peers` may hold `me` or not; two nodes agree when they see the same set.
    """
    ids = sorted({*peers, me})
    mine = ids.index(me)
    for i, j in scheduled_matching(seed, round, len(ids)):
        if mine in (i, j):
            return ids[j if mine == i else i]
    return None


def rank(run_seed: int, peer: PeerId) -> bytes:
    """A total order over peers that nobody chooses and all compute alike; the lower rank goes first."""
    return sha256(f"peerloom-rank-v1:{run_seed}:{peer}".encode()).digest()


class Pairing(Protocol):
    """Whom a node may meet in a round; `view` is the live view, without this node."""

    view: dict[PeerId, PeerSeen]

    def targets(self, round: int) -> list[PeerId]:
        """The peers to offer to."""
        ...

    def awaits(self, round: int, excluded: Set[PeerId]) -> bool:
        """Whether somebody is bound to offer to us, so that waiting makes sense with no offer of ours out."""
        ...

    def refusal(self, peer: PeerId, round: int, own_round: int, is_open: bool) -> DeclineReason | None:
        """Why an offer of `round` cannot be taken now or later; `is_open`: our round has not ended."""
        ...

    def due(self, round: int, own_round: int) -> bool:
        """Whether an offer of `round`, not to be refused, is for the round we are in."""
        ...

    def why_alone(self, round: int) -> str:
        """Why nobody is left to meet, as a sentence."""
        ...


class Rendezvous:
    """Any peer of the view whose round is near enough."""

    def __init__(self, max_round_skew: int) -> None:
        self.view: dict[PeerId, PeerSeen] = {}
        self._skew = max_round_skew

    def targets(self, round: int) -> list[PeerId]:
        return list(self.view)

    def awaits(self, round: int, excluded: Set[PeerId]) -> bool:
        return False

    def refusal(self, peer: PeerId, round: int, own_round: int, is_open: bool) -> DeclineReason | None:
        return "round" if abs(round - own_round) > self._skew else None

    def due(self, round: int, own_round: int) -> bool:
        return True

    def why_alone(self, round: int) -> str:
        return "no other trainer could be reached" if self.view else "no other trainer"


class Scheduled:
    """The peer that the round's matching over the view names; of the two, the lower rank offers."""

    def __init__(self, self_id: PeerId, run_seed: int, max_round_skew: int) -> None:
        self.view: dict[PeerId, PeerSeen] = {}
        self._self_id, self._seed, self._skew = self_id, run_seed, max_round_skew

    def targets(self, round: int) -> list[PeerId]:
        partner = self._reachable(round)
        return [partner] if partner is not None and self._offers_to(partner) else []

    def awaits(self, round: int, excluded: Set[PeerId]) -> bool:
        partner = self._reachable(round)
        return partner is not None and partner not in excluded and not self._offers_to(partner)

    def refusal(self, peer: PeerId, round: int, own_round: int, is_open: bool) -> DeclineReason | None:
        over = round < own_round or (round == own_round and not is_open)
        if over or round - own_round > self._skew:
            return "round"
        return None if peer == self._partner(round) else "partner"

    def due(self, round: int, own_round: int) -> bool:
        return round == own_round

    def why_alone(self, round: int) -> str:
        if not self.view:
            return "no other trainer"
        partner = self._partner(round)
        if partner is None:
            return f"the matching leaves this node out of round {round}"
        if self._has_passed(partner, round):
            return f"the scheduled partner {partner} is past round {round}"
        return f"the scheduled partner {partner} could not be reached"

    def _partner(self, round: int) -> PeerId | None:
        return scheduled_partner(self._seed, round, self._self_id, self.view)

    def _reachable(self, round: int) -> PeerId | None:
        partner = self._partner(round)
        return None if partner is None or self._has_passed(partner, round) else partner

    def _has_passed(self, partner: PeerId, round: int) -> bool:
        return self.view[partner].round > round

    def _offers_to(self, partner: PeerId) -> bool:
        return rank(self._seed, self._self_id) < rank(self._seed, partner)


def pairing_of(spec: GaslocSpec, self_id: PeerId, run_seed: int) -> Pairing:
    """The policy that the run's spec names, with an empty view."""
    if spec.pairing == "scheduled":
        return Scheduled(self_id, run_seed, spec.max_round_skew)
    return Rendezvous(spec.max_round_skew)
