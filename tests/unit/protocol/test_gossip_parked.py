"""The gossip machine at the rendezvous: offers of peers, taken, parked, held or declined."""

from __future__ import annotations

import pytest

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.gossip_parts import MAX_PARKED
from peerloom.protocol.messages import DeclineReason
from peerloom.protocol.types import PeerId
from tests.unit.protocol.gossip_bench import HIGH, HIGHER, LOW, SEEK, SIZE, STALL, TOP, Bench, offered, target


def test_with_no_active_offer_a_peer_is_taken_at_once_and_held_offers_withdrawn() -> None:
    bench = Bench(HIGH, HIGHER)
    effects = bench.ready()
    mine = offered(effects)
    bench.sees(target(effects), LOW)
    other = offered(bench.feed(ev.OfferHeld(mine)))
    bench.feed(ev.OfferHeld(other))
    assert bench.receives(LOW, "a") == [
        do.SendAccept("a", 0),
        do.Transfer("a", STALL),
        do.SendWithdraw(mine, "engaged with another peer"),
        do.SendWithdraw(other, "crossed"),
    ]


def test_the_oldest_parked_offer_is_taken_and_the_rest_stay_for_the_next_round() -> None:
    bench = Bench(LOW, HIGH)
    bench.receives(HIGH, "a")
    bench.receives(LOW, "b")
    assert bench.ready()[:2] == [do.SendAccept("a", 0), do.Transfer("a", STALL)]
    bench.feed(ev.CommitReceived("a"))
    bench.feed(ev.PayloadsVerified("a"))
    bench.feed(ev.RoundStarted(1))
    assert bench.ready(1)[0] == do.SendAccept("b", 1)


def test_crossed_offers_the_lower_rank_goes_on() -> None:
    low = Bench(HIGH)
    low.seeks()
    assert low.receives(HIGH, "theirs") == [
        do.Count("gossip_refused_crossed"),
        do.SendDecline("theirs", "crossed"),
    ]
    high = Bench(LOW)
    mine = high.seeks()
    assert high.receives(LOW, "theirs") == [
        do.SendAccept("theirs", 0),
        do.Transfer("theirs", STALL),
        do.CancelTimer("offer"),
        do.SendWithdraw(mine, "crossed"),
    ]


def bench_asking(peer: PeerId, third: PeerId) -> tuple[Bench, str]:
    """A machine with an active offer to `peer` that then also sees `third`."""
    bench = Bench(peer)
    mine = bench.seeks()
    bench.sees(peer, third)
    return bench, mine


def test_an_offer_of_lower_rank_outdoes_our_active_one() -> None:
    bench, mine = bench_asking(HIGH, LOW)
    assert bench.receives(LOW, "a") == [
        do.SendAccept("a", 0),
        do.Transfer("a", STALL),
        do.CancelTimer("offer"),
        do.SendWithdraw(mine, "engaged with another peer"),
    ]


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [("accepted", False), ("held", True), ("declined", True), ("broken", True), ("unanswered", True)],
)
def test_an_offer_of_higher_rank_waits_for_the_answer_to_ours(answer: str, accepted: bool) -> None:
    bench, mine = bench_asking(LOW, HIGH)
    assert bench.receives(HIGH, "a") == []
    answers: dict[str, ev.Event] = {
        "accepted": ev.OfferAccepted(mine, 0),
        "held": ev.OfferHeld(mine),
        "declined": ev.OfferDeclined(mine, "busy"),
        "broken": ev.ExchangeBroken(mine, "reset"),
        "unanswered": ev.TimerFired("offer"),
    }
    effects = bench.feed(answers[answer], STALL if answer == "unanswered" else 0.1)
    assert (do.SendAccept("a", 0) in effects) == accepted
    assert (do.SendDecline("a", "busy") in effects) == (not accepted)
    assert bench.machine.partner == (HIGH if accepted else LOW)


def test_a_deferred_offer_is_held_when_the_round_ends() -> None:
    bench, mine = bench_asking(LOW, HIGH)
    bench.receives(HIGH, "a")
    effects = bench.feed(ev.TimerFired("seek"), SEEK)
    assert effects[:3] == [
        do.Count("gossip_alone"),
        do.CancelTimer("offer"),
        do.SendWithdraw(mine, "finished the round alone"),
    ]
    assert do.SendHold("a") in effects


def test_a_parked_offer_whose_stream_breaks_is_forgotten() -> None:
    bench = Bench(LOW)
    bench.receives(LOW, "a")
    assert bench.machine.is_open("a")
    assert bench.feed(ev.ExchangeBroken("a", "withdrawn")) == []
    assert not bench.machine.is_open("a")
    assert target(bench.ready()) == LOW


@pytest.mark.parametrize(
    ("peer", "round", "changes", "reason"),
    [
        (TOP, 0, {}, "refused"),  # not in the view
        (LOW, 99, {}, None),  # ahead, by whatever it is
        (LOW, 0, {"layout": "00"}, "incompatible"),
        (LOW, 0, {"encoding": "bf16"}, "incompatible"),
        (LOW, 0, {"total_bytes": SIZE + 4}, "incompatible"),
    ],
)
def test_what_an_offer_must_bring(
    peer: PeerId, round: int, changes: dict[str, object], reason: DeclineReason | None
) -> None:
    bench = Bench(LOW)
    effects = bench.receives(peer, "a", round, **changes)
    if reason is None:
        assert effects == [do.SendHold("a")]
        return
    assert effects[0] == do.Count(f"gossip_refused_{reason}")
    assert isinstance(effects[1], do.SendDecline)
    assert (effects[1].exchange_id, effects[1].reason) == ("a", reason)
    for name in changes:
        assert name in effects[1].detail


def test_parking_is_bounded_and_one_a_peer() -> None:
    crowd = [PeerId(f"crowd{i}") for i in range(MAX_PARKED + 1)]
    bench = Bench(*crowd)
    assert bench.receives(crowd[0], "x0") == [do.SendHold("x0")]
    busy = [do.Count("gossip_refused_busy"), do.SendDecline("again", "busy")]
    assert bench.receives(crowd[0], "again") == busy
    for i in range(1, MAX_PARKED):
        assert bench.receives(crowd[i], f"x{i}") == [do.SendHold(f"x{i}")]
    assert bench.receives(crowd[-1], "again") == busy


def test_an_offer_during_an_exchange_is_declined_busy() -> None:
    bench = Bench(LOW, HIGH)
    bench.engaged_accepting()
    assert bench.receives(HIGH, "b") == [do.Count("gossip_refused_busy"), do.SendDecline("b", "busy")]


def test_an_exchange_id_in_use_is_a_fault_and_touches_nothing() -> None:
    bench = Bench(LOW, HIGH)
    bench.receives(LOW, "a")
    assert bench.receives(HIGH, "a") == [
        do.ScorePeer(HIGH, "duplicate_exchange"),
        do.Count("gossip_refused_duplicate"),
    ]
    assert bench.ready()[0] == do.SendAccept("a", 0)


def test_a_parked_peer_that_leaves_the_view_is_declined() -> None:
    bench = Bench(LOW)
    bench.receives(LOW, "a")
    assert bench.sees() == [do.Count("gossip_refused_refused"), do.SendDecline("a", "refused")]
