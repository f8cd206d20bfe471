"""The gossip machine's two-sided commit, path by path: events in, the exact effects out."""

from __future__ import annotations

import pytest

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from tests.unit.protocol.gossip_bench import HIGH, HIGHER, LOW, SEEK, STALL, Bench, offered, target


def test_offering_side_from_offer_to_ack() -> None:
    bench = Bench(HIGH)
    effects = bench.ready()
    mine = offered(effects)
    assert len(mine) == 32
    assert int(mine, 16) >= 0
    assert effects == [do.SendOffer(mine, HIGH, 0), do.SetTimer("offer", bench.now + STALL), bench.seek_timer]
    assert bench.machine.reason == f"waiting for {HIGH} to answer an offer"
    assert bench.feed(ev.OfferAccepted(mine, 0)) == [do.CancelTimer("offer"), do.Transfer(mine, STALL)]
    assert (bench.machine.state, bench.machine.partner) == ("exchanging", HIGH)
    assert bench.feed(ev.PayloadsVerified(mine), 1.0) == [
        do.SendCommit(mine),
        do.SetTimer("commit", bench.now + STALL),
    ]
    assert bench.feed(ev.AckReceived(mine)) == [
        do.Count("gossip_committed"),
        do.CancelTimer("seek"),
        do.CancelTimer("commit"),
        do.FinishRound(0, HIGH, 0, ""),
    ]
    assert (bench.machine.state, bench.machine.partner, bench.machine.reason) == ("training", None, "")
    assert bench.feed(ev.ExchangeBroken(mine, "closed")) == [do.Count("gossip_late_event")]


def test_accepting_side_takes_the_parked_offer_and_commits_on_commit() -> None:
    bench = Bench(LOW)
    assert bench.receives(LOW, "a") == [do.SendHold("a")]
    assert bench.ready() == [do.SendAccept("a", 0), do.Transfer("a", STALL), bench.seek_timer]
    assert bench.feed(ev.PayloadsVerified("a"), 1.0) == [do.SetTimer("commit", bench.now + STALL)]
    assert bench.feed(ev.CommitReceived("a")) == [
        do.SendAck("a"),
        do.Count("gossip_committed"),
        do.CancelTimer("seek"),
        do.CancelTimer("commit"),
        do.FinishRound(0, LOW, 0, ""),
    ]


def test_accepting_side_may_hear_the_commit_before_its_own_payload_is_out() -> None:
    bench = Bench(LOW)
    name = bench.engaged_accepting()
    assert bench.feed(ev.CommitReceived(name)) == []
    effects = bench.feed(ev.PayloadsVerified(name))
    assert effects[0] == do.SendAck(name)
    assert effects[-1] == do.FinishRound(0, LOW, 0, "")


def test_a_partner_of_another_round_is_named_and_counted() -> None:
    bench = Bench(HIGH)
    mine = bench.seeks()
    bench.feed(ev.OfferAccepted(mine, 3))
    bench.feed(ev.PayloadsVerified(mine))
    effects = bench.feed(ev.AckReceived(mine))
    assert do.Count("gossip_stale_round") in effects
    assert effects[-1] == do.FinishRound(0, HIGH, 3, "")


def test_broken_before_the_commit_counts_for_nobody_and_another_peer_is_sought() -> None:
    bench = Bench(HIGH, HIGHER)
    effects = bench.ready()
    first, peer = offered(effects), target(effects)
    bench.feed(ev.OfferAccepted(first, 0))
    effects = bench.feed(ev.ExchangeBroken(first, "reset"), 1.0)
    second = offered(effects)
    other = ({HIGH, HIGHER} - {peer}).pop()
    assert effects == [
        do.Count("gossip_broken"),
        do.SendOffer(second, other, 0),
        do.SetTimer("offer", bench.now + STALL),
    ]


def test_broken_with_nobody_left_ends_the_round_alone() -> None:
    bench = Bench(HIGH)
    mine = bench.engaged_offering()
    assert bench.feed(ev.ExchangeBroken(mine, "reset")) == [
        do.Count("gossip_broken"),
        do.Count("gossip_alone"),
        do.CancelTimer("seek"),
        do.FinishRound(0, None, 0, "no other trainer could be reached"),
    ]


def test_broken_after_the_time_to_seek_ends_the_round_alone() -> None:
    bench = Bench(HIGH, HIGHER)
    mine = bench.engaged_offering()
    assert bench.feed(ev.TimerFired("seek"), SEEK) == []
    effects = bench.feed(ev.ExchangeBroken(mine, "reset"), 0.1)
    (finish,) = [e for e in effects if isinstance(e, do.FinishRound)]
    assert finish.partner is None
    assert "reset" in finish.reason


def test_broken_between_commit_and_ack_is_in_doubt() -> None:
    bench = Bench(HIGH, HIGHER)
    mine = bench.engaged_offering()
    bench.feed(ev.PayloadsVerified(mine))
    effects = bench.feed(ev.ExchangeBroken(mine, "reset"))
    assert effects[:4] == [
        do.CancelTimer("commit"),
        do.Count("gossip_in_doubt"),
        do.Count("gossip_alone"),
        do.CancelTimer("seek"),
    ]
    assert isinstance(effects[4], do.FinishRound)
    assert effects[4].partner is None
    assert effects[4].reason.endswith("broke after this side committed: reset")


def test_an_ack_that_does_not_come_is_in_doubt() -> None:
    bench = Bench(HIGH)
    mine = bench.engaged_offering()
    bench.feed(ev.PayloadsVerified(mine))
    effects = bench.feed(ev.TimerFired("commit"), STALL)
    assert effects[:2] == [
        do.SendWithdraw(mine, "no acknowledgement within 2.5 s"),
        do.Count("gossip_in_doubt"),
    ]
    assert isinstance(effects[-1], do.FinishRound)


def test_a_commit_that_does_not_come_breaks_the_exchange() -> None:
    bench = Bench(LOW)
    name = bench.engaged_accepting()
    bench.feed(ev.PayloadsVerified(name))
    effects = bench.feed(ev.TimerFired("commit"), STALL)
    assert effects[:2] == [do.SendWithdraw(name, "no commit within 2.5 s"), do.Count("gossip_broken")]


@pytest.mark.parametrize("held", [False, True])
def test_a_fault_is_scored_and_the_peer_not_heard_again_this_round(held: bool) -> None:
    bench = Bench(HIGH, LOW)
    bench.receives(LOW, "a")
    bench.ready()
    effects = bench.feed(ev.ExchangeBroken("a", "digest differs", at_fault=True))
    assert effects[:2] == [do.ScorePeer(LOW, "bad_exchange"), do.Count("gossip_broken")]
    if held:
        bench.feed(ev.OfferHeld(offered(effects)))
    assert bench.receives(LOW, "b") == [do.Count("gossip_refused_refused"), do.SendDecline("b", "refused")]
