"""Rounds of several exchanges, path by path: events in, the exact effects out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol import plan
from peerloom.protocol.errors import InvalidTransition
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import Offer
from peerloom.protocol.pairing import Place, rank
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId
from tests.unit.protocol.gossip_bench import MachineBench

SEED, LAYOUT, M = 7, "cd" * 32, 10.0
STALL, SEEK = 0.25 * M, 0.75 * M
IDS = sorted(PeerId(f"peer{i}") for i in range(4))
SIZES = (100, 90)


class Bench(MachineBench):
    """A machine of IDS[0] and its clock."""

    def __init__(self, *, round: int = 0, sizes: tuple[int, ...] = (100,), **gasloc: Any) -> None:
        self.spec = GaslocSpec(match_timeout_s=M, fragments=len(sizes), **gasloc)
        self.machine = GossipMachine(IDS[0], self.spec, SEED, random.Random(1), LAYOUT, sizes)
        self.now = 50.0
        self.sees(*IDS[1:])
        self.feed(ev.RoundStarted(round))

    def partner(self, place: Place) -> tuple[PeerId, float]:
        """Whom the plan names at a place, and the weight."""
        leg = plan.legs(self.spec, SEED, place.round, place.fragment, len(IDS))[place.leg]
        ((i, j, weight),) = [edge for edge in leg if 0 in edge[:2]]
        return IDS[i + j], weight

    def meets(self, place: Place) -> list[do.Effect]:
        """Offers at a place, is accepted and acknowledged; the effects of the last event."""
        effects = self.feed(ev.ProposalReady(*place))
        peer, weight = self.partner(place)
        (offer,) = [effect for effect in effects if isinstance(effect, do.SendOffer)]
        whole = (place.fragment, place.fragment + 1)
        assert offer == do.SendOffer(offer.exchange_id, peer, *place, weight, whole)
        accepted = self.feed(ev.OfferAccepted(offer.exchange_id, place.round))
        assert do.Transfer(offer.exchange_id, STALL, whole, whole) in accepted
        self.feed(ev.PayloadsVerified(offer.exchange_id))
        return self.feed(ev.AckReceived(offer.exchange_id))


def offer(name: str, place: Place, weight: float, size: int = 100) -> Offer:
    return Offer(
        name, place.round, LAYOUT, "fp32", size, fragment=place.fragment, leg=place.leg, weight=weight
    )


def test_a_ring_is_two_legs_with_metropolis_weights() -> None:
    bench = Bench(pairing="ring", alpha=0.9)
    peers = []
    for leg in range(2):
        peer, weight = bench.partner(Place(0, 0, leg))
        assert weight == 2 / 3
        assert bench.meets(Place(0, 0, leg)) == [
            do.Count("gossip_committed"),
            do.CancelTimer("seek"),
            do.CancelTimer("commit"),
            do.FinishRound(0, peer, 0, "", 2 / 3),
        ]
        peers.append(peer)
    assert len(set(peers)) == bench.machine.legs(0) == 2
    with pytest.raises(InvalidTransition, match="round 0 is not open"):
        bench.feed(ev.ProposalReady(0, 0, 2))


def test_turns_come_in_order() -> None:
    bench = Bench(pairing="ring", alpha=0.9, sizes=SIZES)
    with pytest.raises(InvalidTransition, match="next is Place"):
        bench.feed(ev.ProposalReady(0, 0, 1))
    for place in (Place(0), Place(0, 0, 1), Place(0, 1), Place(0, 1, 1)):
        assert isinstance(bench.meets(place)[-1], do.FinishRound)


def test_an_offer_for_a_later_turn_is_held_and_taken_there() -> None:
    bench = Bench(pairing="ring", alpha=0.9, sizes=SIZES)
    later = Place(0, 1, 1)
    peer, weight = bench.partner(later)
    assert bench.feed(ev.OfferReceived(peer, offer("a", later, weight, SIZES[1]))) == [do.SendHold("a")]
    for place in (Place(0), Place(0, 0, 1), Place(0, 1)):
        bench.meets(place)
    effects = bench.feed(ev.ProposalReady(*later))
    assert effects[:2] == [do.SendAccept("a", 0), do.Transfer("a", STALL, (1, 2), (1, 2))]


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"size": 90}, "total_bytes is 90 there, 100 here"), ({"place": Place(0, 2)}, "fragment is 2 there, of 2 here")],
)
def test_a_slice_must_be_the_same_on_both_sides(changes: dict[str, Any], what: str) -> None:
    bench = Bench(pairing="ring", alpha=0.9, sizes=SIZES)
    place, size = changes.get("place", Place(0)), changes.get("size", 100)
    effects = bench.feed(ev.OfferReceived(IDS[1], offer("a", place, 2 / 3, size)))
    assert effects == [do.Count("gossip_refused_incompatible"), do.SendDecline("a", "incompatible", what)]


def test_an_edge_of_another_weight_or_partner_is_refused_for_good() -> None:
    bench = Bench(pairing="ring", alpha=0.9)
    peer, weight = bench.partner(Place(0))
    bench.feed(ev.ProposalReady(0))
    for other, its in ((peer, 1.0), (next(p for p in IDS[1:] if p != peer), weight)):
        assert bench.feed(ev.OfferReceived(other, offer("a", Place(0), its))) == [
            do.Count("gossip_refused_plan"),
            do.SendDecline("a", "plan"),
        ]


@pytest.mark.parametrize("reason", ["plan", "round", "draining"])
def test_a_partner_that_is_past_or_planned_otherwise_drops_the_edge_at_once(reason: Any) -> None:
    bench = Bench(pairing="ring", alpha=0.9)
    (mine,) = [e.exchange_id for e in bench.feed(ev.ProposalReady(0)) if isinstance(e, do.SendOffer)]
    effects = bench.feed(ev.OfferDeclined(mine, reason))
    assert do.Count("gossip_alone") in effects
    assert isinstance(effects[-1], do.FinishRound)
    assert effects[-1].partner is None
    assert isinstance(bench.meets(Place(0, 0, 1))[-1], do.FinishRound)  # the other edge is whole


def test_an_offer_for_a_turn_that_is_over_is_refused() -> None:
    bench = Bench(pairing="ring", alpha=0.9)
    bench.meets(Place(0))
    peer, weight = bench.partner(Place(0))
    assert bench.feed(ev.OfferReceived(peer, offer("a", Place(0), weight))) == [
        do.Count("gossip_refused_round"),
        do.SendDecline("a", "round"),
    ]


def test_a_later_leg_waits_for_those_an_earlier_one_has_kept() -> None:
    bench = Bench(pairing="ring", alpha=0.9)
    bench.meets(Place(0))
    effects = bench.feed(ev.ProposalReady(0, 0, 1), 1.0)
    assert do.SetTimer("seek", bench.now - 1.0 + 2 * SEEK) in effects


def test_who_leaves_within_a_round_drops_its_edge_and_who_comes_waits_for_the_next() -> None:
    bench = Bench(pairing="complete")
    bench.meets(Place(0))
    peer, _ = bench.partner(Place(0, 0, 1))
    bench.sees(*(p for p in IDS[1:] if p != peer), PeerId("newcomer"))
    effects = bench.feed(ev.ProposalReady(0, 0, 1))
    assert effects[-1] == do.FinishRound(0, None, 0, f"the planned partner {peer} has left")
    assert isinstance(bench.meets(Place(0, 0, 2))[-1], do.FinishRound)
    bench.feed(ev.RoundStarted(1))
    bench.feed(ev.ProposalReady(1))
    assert bench.machine.legs(0) == 3  # four nodes again, the newcomer among them


def test_an_idle_leg_is_no_round_alone() -> None:
    bench = Bench(pairing="ring", alpha=0.9)
    bench.sees(*IDS[1:3])  # a triangle: three legs of one edge each, and each node idles in one
    counts = []
    for leg in range(3):
        effects = bench.feed(ev.ProposalReady(0, 0, leg))
        if isinstance(effects[-1], do.FinishRound):
            counts += [effect.metric for effect in effects if isinstance(effect, do.Count)]
            assert "gives this node nobody in leg" in effects[-1].reason
            continue
        (mine,) = [e.exchange_id for e in effects if isinstance(e, do.SendOffer)]
        bench.feed(ev.OfferDeclined(mine, "draining"))
    assert counts == ["gossip_idle"]


def test_a_node_with_no_other_trainer_has_one_turn_a_fragment() -> None:
    bench = Bench(pairing="complete", sizes=SIZES)
    bench.sees()
    for fragment in range(2):
        effects = bench.feed(ev.ProposalReady(0, fragment))
        assert effects == [do.Count("gossip_alone"), do.FinishRound(0, None, 0, "no other trainer")]
        assert bench.machine.legs(fragment) == 1


def test_both_ends_offer_and_one_gives_way() -> None:
    a, b = sorted(IDS[:2], key=lambda peer: rank(SEED, peer))
    spec = GaslocSpec(pairing="hypercube", match_timeout_s=M)
    machines = {}
    offers = {}
    for me, other in ((a, b), (b, a)):
        machine = GossipMachine(me, spec, SEED, random.Random(1), LAYOUT, 100)
        machine.handle(ev.PeersChanged((ev.PeerSeen(other, 0),)), 0.0)
        machine.handle(ev.RoundStarted(0), 0.0)
        (offers[me],) = [e for e in machine.handle(ev.ProposalReady(0), 0.0) if isinstance(e, do.SendOffer)]
        machines[me] = machine
    crossed = machines[a].handle(ev.OfferReceived(b, offer("f" * 32, Place(0), 1.0)), 0.1)
    taken = machines[b].handle(ev.OfferReceived(a, offer("e" * 32, Place(0), 1.0)), 0.1)
    assert crossed == [do.Count("gossip_refused_crossed"), do.SendDecline("f" * 32, "crossed")]
    assert taken[0] == do.SendAccept("e" * 32, 0)
    assert do.SendWithdraw(offers[b].exchange_id, "crossed") in taken


def test_a_group_halves_and_gives_back() -> None:
    sizes = (10, 20, 30, 40)
    spec = GaslocSpec(pairing="hypercube", group_size=4, match_timeout_s=M)
    machine = GossipMachine(IDS[0], spec, SEED, random.Random(1), LAYOUT, sizes)
    machine.handle(ev.PeersChanged(tuple(ev.PeerSeen(peer, 0) for peer in IDS[1:])), 0.0)
    machine.handle(ev.RoundStarted(0), 0.0)
    seen = []
    for leg in range(4):
        swap = plan.swap(spec, SEED, 0, 0, leg, 4, 0)
        (sent,) = [e for e in machine.handle(ev.ProposalReady(0, 0, leg), 0.0) if isinstance(e, do.SendOffer)]
        assert sent.send == swap.send
        accepted = machine.handle(ev.OfferAccepted(sent.exchange_id, 0), 0.0)
        assert do.Transfer(sent.exchange_id, STALL, swap.send, swap.receive) in accepted
        machine.handle(ev.PayloadsVerified(sent.exchange_id), 0.0)
        end = machine.handle(ev.AckReceived(sent.exchange_id), 0.0)[-1]
        assert end == do.FinishRound(0, sent.peer, 0, "", 1.0, swap.receive, leg >= 2)
        seen.append(sent.peer)
    assert seen == [IDS[2], IDS[1], IDS[1], IDS[2]]


@pytest.mark.parametrize("total_bytes", [30, 70, 100])
def test_a_group_takes_an_offer_of_the_half_it_waits_for(total_bytes: int) -> None:
    spec = GaslocSpec(pairing="hypercube", group_size=4, match_timeout_s=M)
    machine = GossipMachine(IDS[0], spec, SEED, random.Random(1), LAYOUT, (10, 20, 30, 40))
    machine.handle(ev.PeersChanged(tuple(ev.PeerSeen(peer, 0) for peer in IDS[1:])), 0.0)
    machine.handle(ev.RoundStarted(0), 0.0)
    held = machine.handle(ev.OfferReceived(IDS[2], offer("a", Place(0), 1.0, total_bytes)), 0.0)
    assert held == [do.SendHold("a")]
    taken = machine.handle(ev.ProposalReady(0), 0.0)
    fits = total_bytes == 30  # it keeps the first half
    assert (do.SendAccept("a", 0) in taken) == fits
    assert (do.SendDecline("a", "plan") in taken) != fits


def test_what_was_not_halved_is_not_given_back() -> None:
    spec = GaslocSpec(pairing="hypercube", group_size=4, match_timeout_s=M)
    machine = GossipMachine(IDS[0], spec, SEED, random.Random(1), LAYOUT, (10, 20, 30, 40))
    machine.handle(ev.PeersChanged(tuple(ev.PeerSeen(peer, 0) for peer in IDS[1:])), 0.0)
    machine.handle(ev.RoundStarted(0), 0.0)
    partners = []
    for leg in range(4):
        effects = machine.handle(ev.ProposalReady(0, 0, leg), 0.0)
        offers = [e for e in effects if isinstance(e, do.SendOffer)]
        if leg == 0:  # its partner is past it
            effects = machine.handle(ev.OfferDeclined(offers[0].exchange_id, "round"), 0.0)
        elif offers:
            machine.handle(ev.OfferAccepted(offers[0].exchange_id, 0), 0.0)
            machine.handle(ev.PayloadsVerified(offers[0].exchange_id), 0.0)
            effects = machine.handle(ev.AckReceived(offers[0].exchange_id), 0.0)
        end = effects[-1]
        assert isinstance(end, do.FinishRound)
        partners.append(end.partner)
    assert partners == [None, IDS[1], IDS[1], None]
    assert end.reason == "leg 3 would give back what leg 0 did not take"


def test_rendezvous_meets_at_the_same_fragment_only() -> None:
    bench = Bench(pairing="rendezvous", sizes=SIZES)
    assert bench.feed(ev.OfferReceived(IDS[1], offer("a", Place(0, 1), 1.0, SIZES[1]))) == [do.SendHold("a")]
    effects = bench.feed(ev.ProposalReady(0))
    assert [e for e in effects if isinstance(e, do.SendAccept)] == []
    (mine,) = [e.exchange_id for e in effects if isinstance(e, do.SendOffer)]
    bench.feed(ev.OfferAccepted(mine, 0))
    bench.feed(ev.PayloadsVerified(mine))
    bench.feed(ev.AckReceived(mine))
    assert bench.feed(ev.ProposalReady(0, 1))[0] == do.SendAccept("a", 0)
