"""Who meets whom: the order among peers that breaks ties, and the policies."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple, Protocol

from peerloom.protocol import plan
from peerloom.protocol.events import PeerSeen
from peerloom.protocol.messages import DeclineReason
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId


class Place(NamedTuple):
    """One exchange of a node's whole run, in the order in which they come: fragment and leg count from 0."""

    round: int
    fragment: int = 0
    leg: int = 0


def rank(run_seed: int, peer: PeerId) -> bytes:
    """A total order over peers that nobody chooses and all compute alike; the lower rank goes first."""
    return sha256(f"peerloom-rank-v1:{run_seed}:{peer}".encode()).digest()


class Pairing(Protocol):
    """Whom a node may meet in a round; `view` is the live view, without this node."""

    view: dict[PeerId, PeerSeen]

    def see(self, peers: Iterable[PeerSeen]) -> None:
        """Takes the live view anew."""
        ...

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

    def refusal(self, peer: PeerId, place: Place, own: Place, is_open: bool) -> DeclineReason | None:
        """Why an offer for `place` cannot be taken now or later; `is_open`: our round has not ended."""
        ...

    def fits(self, theirs: int, own: int) -> bool:
        """Whether a partner that accepts in its round `theirs` may be met in ours."""
        ...

    def could_know(self) -> bool:
        """Whether a partner whose round does not fit could tell that from the offer."""
        ...

    def due(self, place: Place, own: Place) -> bool:
        """Whether an offer for `place`, not to be refused, is for where we are."""
        ...

    def why_alone(self, place: Place) -> str:
        """Why nobody is left to meet, as a sentence."""
        ...


class Rendezvous:
    """Any peer of the view that is not left behind, at the same fragment; the view is followed as it changes.

    Left behind is who stands more than `max_round_skew` rounds before the middle of the swarm, or before this node if
    that is behind the middle itself. Were it measured by this node's own round alone, a few fast nodes would in time
    stand so far ahead that they met none but each other, while the rest, more than half, has no reason to follow. Of an
    even number the upper middle counts, so that of two the one that comes back from a long absence fetches the state.
    """

    def __init__(self, max_round_skew: int) -> None:
        self.view: dict[PeerId, PeerSeen] = {}
        self._skew = max_round_skew

    def see(self, peers: Iterable[PeerSeen]) -> None:
        self.view = {seen.peer: seen for seen in peers if not seen.left_alone}

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

    def targets(self, place: Place) -> list[PeerId]:
        return list(self.view)

    def refusal(self, peer: PeerId, place: Place, own: Place, is_open: bool) -> DeclineReason | None:
        return None if not place.leg and self.fits(place.round, own.round) else "round"

    def fits(self, theirs: int, own: int) -> bool:
        if not self._skew:
            return theirs == own
        rounds = sorted([own, *(seen.round for seen in self.view.values())])
        return theirs >= min(own, rounds[len(rounds) // 2]) - self._skew

    def could_know(self) -> bool:
        return not self._skew  # else it hangs on where this node sees the middle

    def due(self, place: Place, own: Place) -> bool:
        return place[1:] == own[1:]

    def why_alone(self, place: Place) -> str:
        return "no other trainer could be reached" if self.view else "no other trainer"


class Planned:
    """The peers that the spec's topology names, leg by leg; a round's matchings stay as they were when it first met.

    Who has left since is not reached, and its edge is dropped; who has come since is in the next round. So it is with
    one that this node leaves alone: it is planned with, since others may still meet it, and were each to plan by a list
    of its own, nodes would settle on different matchings. Both ends offer: an answer tells at once whether the other is
    past this leg or has settled on other matchings.
    """

    def __init__(self, self_id: PeerId, run_seed: int, spec: GaslocSpec) -> None:
        self.view: dict[PeerId, PeerSeen] = {}
        self._self_id, self._seed, self._spec = self_id, run_seed, spec
        self._fixed: tuple[int, list[PeerId]] | None = None
        self._met: set[Place] = set()  # committed, of the settled round

    def see(self, peers: Iterable[PeerSeen]) -> None:
        self.view = {seen.peer: seen for seen in peers}

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
        partner = None if self._forgone(place) else self._partner(place)
        if partner is None or self._leaves_alone(partner) or self._has_passed(partner, place):
            return []
        return [partner]

    def refusal(self, peer: PeerId, place: Place, own: Place, is_open: bool) -> DeclineReason | None:
        over = place < own or (place.round == own.round and not is_open)
        if over or place.round - own.round > self._spec.max_round_skew:
            return "round"
        if self._leaves_alone(peer):
            return "refused"
        if peer == self._partner(place):
            return None
        return "plan" if self._fixed is not None and self._fixed[0] == place.round else "partner"

    def fits(self, theirs: int, own: int) -> bool:
        return theirs == own

    def could_know(self) -> bool:
        return True

    def due(self, place: Place, own: Place) -> bool:
        return place == own

    def why_alone(self, place: Place) -> str:
        if not self.view:
            return "no other trainer"
        partner = self._partner(place)
        if partner is None:
            return f"the topology gives this node nobody in leg {place.leg} of round {place.round}"
        if partner not in self.view:
            return f"the planned partner {partner} has left"
        if self._leaves_alone(partner):
            return f"the planned partner {partner} is left alone after repeated faults"
        if self._forgone(place):
            return f"leg {place.leg} would give back what leg {self.swap(place).halved} did not take"
        if self._has_passed(partner, place):
            return f"the planned partner {partner} is past round {place.round}"
        return f"the planned partner {partner} could not be reached"

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

    def _leaves_alone(self, partner: PeerId) -> bool:
        seen = self.view.get(partner)
        return seen is not None and seen.left_alone

    def _has_passed(self, partner: PeerId, place: Place) -> bool:
        seen = self.view.get(partner)
        return seen is None or seen.round > place.round


def pairing_of(spec: GaslocSpec, self_id: PeerId, run_seed: int) -> Pairing:
    """The policy that the run's spec names, with an empty view."""
    if spec.pairing == "rendezvous":
        return Rendezvous(spec.max_round_skew)
    return Planned(self_id, run_seed, spec)
