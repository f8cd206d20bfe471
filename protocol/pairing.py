"""Who meets whom: the shared random matching of a round, the order among peers that breaks ties, the policies."""

from __future__ import annotations

from collections.abc import Iterable, Set
from hashlib import sha256
from typing import NamedTuple, Protocol

from peerloom.protocol import plan
from peerloom.protocol.events import PeerSeen
from peerloom.protocol.graphs import scheduled_matching
from peerloom.protocol.messages import DeclineReason
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId


class Place(NamedTuple):
    """One exchange of a node's whole run, in the order in which they come: fragment and leg count from 0."""

    round: int
    fragment: int = 0
    leg: int = 0


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

    def begin(self, round: int) -> None:
        """The round's first exchange begins: from now on its matchings stay."""
        ...

    def legs(self, round: int, fragment: int) -> int:
        """How many exchanges a fragment has in a round, at least 1 (which may be one with nobody)."""
        ...

    def weight(self, place: Place) -> float:
        """lambda of this node's edge there."""
        ...

    def swap(self, place: Place) -> plan.Swap:
        """The pieces that go both ways there."""
        ...

    def met(self, place: Place) -> None:
        """The edge there was committed."""
        ...

    def idles(self, place: Place) -> bool:
        """Whether the topology itself gives this node nobody there."""
        ...

    def targets(self, place: Place) -> list[PeerId]:
        """The peers to offer to."""
        ...

    def awaits(self, place: Place, excluded: Set[PeerId]) -> bool:
        """Whether somebody is bound to offer to us, so that waiting makes sense with no offer of ours out."""
        ...

    def refusal(self, peer: PeerId, place: Place, own: Place, is_open: bool) -> DeclineReason | None:
        """Why an offer for `place` cannot be taken now or later; `is_open`: our round has not ended."""
        ...

    def due(self, place: Place, own: Place) -> bool:
        """Whether an offer for `place`, not to be refused, is for where we are."""
        ...

    def why_alone(self, place: Place) -> str:
        """Why nobody is left to meet, as a sentence."""
        ...


class _OneLeg:
    """What the pairings with one partner a round have in common; the view is followed as it changes."""

    def begin(self, round: int) -> None:
        pass

    def legs(self, round: int, fragment: int) -> int:
        return 1

    def weight(self, place: Place) -> float:
        return 1.0

    def swap(self, place: Place) -> plan.Swap:
        whole = (place.fragment, place.fragment + 1)
        return plan.Swap(whole, whole)

    def met(self, place: Place) -> None:
        pass

    def idles(self, place: Place) -> bool:
        return False


class Rendezvous(_OneLeg):
    """Any peer of the view whose round is near enough, at the same fragment."""

    def __init__(self, max_round_skew: int) -> None:
        self.view: dict[PeerId, PeerSeen] = {}
        self._skew = max_round_skew

    def targets(self, place: Place) -> list[PeerId]:
        return list(self.view)

    def awaits(self, place: Place, excluded: Set[PeerId]) -> bool:
        return False

    def refusal(self, peer: PeerId, place: Place, own: Place, is_open: bool) -> DeclineReason | None:
        return "round" if abs(place.round - own.round) > self._skew else None

    def due(self, place: Place, own: Place) -> bool:
        return place[1:] == own[1:]

    def why_alone(self, place: Place) -> str:
        return "no other trainer could be reached" if self.view else "no other trainer"


class Scheduled(_OneLeg):
    """The peer that the round's matching over the view names; of the two, the lower rank offers."""

    def __init__(self, self_id: PeerId, run_seed: int, max_round_skew: int) -> None:
        self.view: dict[PeerId, PeerSeen] = {}
        self._self_id, self._seed, self._skew = self_id, run_seed, max_round_skew

    def targets(self, place: Place) -> list[PeerId]:
        partner = self._reachable(place)
        return [partner] if partner is not None and self._offers_to(partner) else []

    def awaits(self, place: Place, excluded: Set[PeerId]) -> bool:
        partner = self._reachable(place)
        return partner is not None and partner not in excluded and not self._offers_to(partner)

    def refusal(self, peer: PeerId, place: Place, own: Place, is_open: bool) -> DeclineReason | None:
        over = place < own or (place.round == own.round and not is_open)
        if over or place.round - own.round > self._skew:
            return "round"
        return None if peer == self._partner(place) else "partner"

    def due(self, place: Place, own: Place) -> bool:
        return place == own

    def why_alone(self, place: Place) -> str:
        if not self.view:
            return "no other trainer"
        partner = self._partner(place)
        if partner is None:
            return f"the matching leaves this node out of round {place.round}"
        if self._has_passed(partner, place):
            return f"the scheduled partner {partner} is past round {place.round}"
        return f"the scheduled partner {partner} could not be reached"

    def _partner(self, place: Place) -> PeerId | None:
        return scheduled_partner(self._seed, place.round, self._self_id, self.view)

    def _reachable(self, place: Place) -> PeerId | None:
        partner = self._partner(place)
        return None if partner is None or self._has_passed(partner, place) else partner

    def _has_passed(self, partner: PeerId, place: Place) -> bool:
        return self.view[partner].round > place.round

    def _offers_to(self, partner: PeerId) -> bool:
        return rank(self._seed, self._self_id) < rank(self._seed, partner)


class Planned(Scheduled):
    """The peers that the spec's topology names, leg by leg; a round's matchings stay as they were when it first met.

    Who has left since is not reached, and its edge is dropped; who has come since is in the next round. Both ends
    offer: an answer tells at once whether the other is past this leg or has settled on other matchings.
    """

    def __init__(self, self_id: PeerId, run_seed: int, spec: GaslocSpec) -> None:
        super().__init__(self_id, run_seed, spec.max_round_skew)
        self._spec = spec
        self._fixed: tuple[int, list[PeerId]] | None = None
        self._met: set[Place] = set()  # committed, of the settled round

    def begin(self, round: int) -> None:
        if self._fixed is None or self._fixed[0] != round:
            self._fixed = (round, self._ids(round))
            self._met.clear()

    def legs(self, round: int, fragment: int) -> int:
        return max(1, len(plan.legs(self._spec, self._seed, round, fragment, len(self._ids(round)))))

    def weight(self, place: Place) -> float:
        """0, which no peer's edge has, where the halving that this leg would give back has failed."""
        edge = self._edge(place)
        return 0.0 if self._forgone(place) else 1.0 if edge is None else edge[1]

    def swap(self, place: Place) -> plan.Swap:
        ids = self._ids(place.round)
        return plan.swap(self._spec, self._seed, *place, len(ids), ids.index(self._self_id))

    def met(self, place: Place) -> None:
        self._met.add(place)

    def _forgone(self, place: Place) -> bool:
        halved = self.swap(place).halved
        return halved >= 0 and place._replace(leg=halved) not in self._met

    def idles(self, place: Place) -> bool:
        return bool(self.view) and self._edge(place) is None

    def targets(self, place: Place) -> list[PeerId]:
        partner = None if self._forgone(place) else self._reachable(place)
        return [] if partner is None else [partner]

    def awaits(self, place: Place, excluded: Set[PeerId]) -> bool:
        return False

    def refusal(self, peer: PeerId, place: Place, own: Place, is_open: bool) -> DeclineReason | None:
        refusal = super().refusal(peer, place, own, is_open)
        settled = self._fixed is not None and self._fixed[0] == place.round
        return "plan" if refusal == "partner" and settled else refusal

    def why_alone(self, place: Place) -> str:
        edge = self._edge(place)
        if self.idles(place):
            return f"the topology gives this node nobody in leg {place.leg} of round {place.round}"
        if edge is not None and edge[0] not in self.view:
            return f"the planned partner {edge[0]} has left"
        if self._forgone(place):
            return f"leg {place.leg} would give back what leg {self.swap(place).halved} did not take"
        return super().why_alone(place)

    def _ids(self, round: int) -> list[PeerId]:
        if self._fixed is not None and self._fixed[0] == round:
            return self._fixed[1]
        return sorted({*self.view, self._self_id})

    def _edge(self, place: Place) -> tuple[PeerId, float] | None:
        ids = self._ids(place.round)
        legs = plan.legs(self._spec, self._seed, place.round, place.fragment, len(ids))
        mine = ids.index(self._self_id)
        for i, j, weight in legs[place.leg] if place.leg < len(legs) else ():
            if mine in (i, j):
                return ids[j if mine == i else i], weight
        return None

    def _partner(self, place: Place) -> PeerId | None:
        edge = self._edge(place)
        return None if edge is None else edge[0]

    def _has_passed(self, partner: PeerId, place: Place) -> bool:
        seen = self.view.get(partner)
        return seen is None or seen.round > place.round


def pairing_of(spec: GaslocSpec, self_id: PeerId, run_seed: int) -> Pairing:
    """The policy that the run's spec names, with an empty view."""
    if spec.pairing == "rendezvous":
        return Rendezvous(spec.max_round_skew)
    if spec.pairing == "scheduled" and spec.group_size == 2 and spec.fragments == 1:
        return Scheduled(self_id, run_seed, spec.max_round_skew)
    return Planned(self_id, run_seed, spec)
