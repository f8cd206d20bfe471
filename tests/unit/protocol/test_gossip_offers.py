"""The gossip machine at the rendezvous: the offers that it makes."""

from __future__ import annotations

import pytest

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.messages import DeclineReason
from tests.unit.protocol.gossip_bench import (
    HIGH,
    HIGHER,
    HIGHEST,
    LOW,
    SEEK,
    STALL,
    TOP,
    Bench,
    M,
    offered,
    target,
)


def test_alone_in_the_view_goes_on_at_once() -> None:
    bench = Bench()
    assert bench.ready() == [do.Count("gossip_alone"), do.FinishRound(0, None, 0, "no other trainer")]


def test_a_held_offer_stands_and_the_next_peer_is_asked_up_to_the_fanout() -> None:
    bench = Bench(HIGH, HIGHER, HIGHEST, TOP)
    asked = []
    effects = bench.ready()
    for _ in range(3):
        asked.append(target(effects))
        effects = bench.feed(ev.OfferHeld(offered(effects)))
    assert effects == [do.CancelTimer("offer")]
    assert len(set(asked)) == 3
    assert bench.machine.reason == "waiting for one of 3 peers to reach its exchange point"


def test_a_held_offer_may_be_accepted_and_the_others_are_withdrawn() -> None:
    bench = Bench(HIGH, HIGHER)
    effects = bench.ready()
    first, peer = offered(effects), target(effects)
    second = offered(bench.feed(ev.OfferHeld(first)))
    assert bench.feed(ev.OfferAccepted(first, 0)) == [
        do.Transfer(first, STALL),
        do.CancelTimer("offer"),
        do.SendWithdraw(second, "engaged with another peer"),
    ]
    assert bench.machine.partner == peer
    assert bench.feed(ev.OfferAccepted(second, 0)) == [do.Count("gossip_late_event")]


@pytest.mark.parametrize("reason", ["busy", "crossed"])
def test_declined_for_now_is_asked_again_after_a_growing_jittered_pause(reason: DeclineReason) -> None:
    bench = Bench(HIGH)
    mine, pauses = bench.seeks(), []
    for _ in range(6):
        effects = bench.feed(ev.OfferDeclined(mine, reason))
        assert effects[:2] == [do.CancelTimer("offer"), do.Count(f"gossip_declined_{reason}")]
        assert isinstance(effects[2], do.SetTimer)
        assert effects[2].name == "retry"
        pauses.append(effects[2].at - bench.now)
        mine = offered(bench.feed(ev.TimerFired("retry"), pauses[-1]))
    for k, pause in enumerate(pauses):
        full = 0.02 * M * 2 ** min(k, 3)
        assert 0.5 * full <= pause <= 1.5 * full


@pytest.mark.parametrize("reason", ["round", "incompatible", "refused", "draining"])
def test_declined_for_good_is_not_asked_again_this_round_but_in_the_next(reason: DeclineReason) -> None:
    bench = Bench(HIGH)
    mine = bench.seeks()
    effects = bench.feed(ev.OfferDeclined(mine, reason))
    assert effects[-1] == do.FinishRound(0, None, 0, "no other trainer could be reached")
    bench.feed(ev.RoundStarted(1))
    assert target(bench.ready(1)) == HIGH


def test_no_answer_is_withdrawn_scored_and_the_next_peer_asked() -> None:
    bench = Bench(HIGH, HIGHER)
    effects = bench.ready()
    mine, peer = offered(effects), target(effects)
    effects = bench.feed(ev.TimerFired("offer"), STALL)
    assert effects[:3] == [
        do.SendWithdraw(mine, "no answer"),
        do.Count("gossip_unanswered"),
        do.ScorePeer(peer, "unanswered"),
    ]
    assert target(effects) != peer


def test_a_lost_offer_is_counted_without_a_fault() -> None:
    bench = Bench(HIGH)
    mine = bench.seeks()
    effects = bench.feed(ev.ExchangeBroken(mine, "refused to connect"))
    assert effects[:2] == [do.CancelTimer("offer"), do.Count("gossip_offer_lost")]
    assert isinstance(effects[-1], do.FinishRound)


def test_the_time_to_seek_ends_with_everything_withdrawn() -> None:
    bench = Bench(HIGH, HIGHER)
    first = bench.seeks()
    second = offered(bench.feed(ev.OfferHeld(first)))
    bench.feed(ev.OfferHeld(second))
    assert bench.feed(ev.TimerFired("seek"), SEEK) == [
        do.Count("gossip_alone"),
        do.SendWithdraw(first, "finished the round alone"),
        do.SendWithdraw(second, "finished the round alone"),
        do.FinishRound(0, None, 0, "no partner within 7.5 s"),
    ]


def test_a_timer_that_was_cancelled_on_its_way_is_late() -> None:
    bench = Bench(HIGH)
    bench.engaged_offering()
    assert bench.feed(ev.TimerFired("offer"), STALL) == [do.Count("gossip_late_event")]


def test_a_newcomer_is_asked_while_we_wait() -> None:
    bench = Bench(HIGH)
    bench.feed(ev.OfferHeld(bench.seeks()))
    assert target(bench.sees(HIGH, LOW)) == LOW


def test_an_offer_to_a_peer_that_left_is_withdrawn() -> None:
    bench = Bench(HIGH)
    mine = bench.seeks()
    assert bench.sees() == [
        do.CancelTimer("offer"),
        do.SendWithdraw(mine, "no longer a candidate"),
        do.Count("gossip_alone"),
        do.CancelTimer("seek"),
        do.FinishRound(0, None, 0, "no other trainer"),
    ]


def test_an_accept_from_a_round_too_far_behind_is_withdrawn_and_no_fault() -> None:
    """Who comes back after a while is told nothing of where we see the middle of the swarm."""
    bench = Bench(HIGH, round=20)
    bench.sees(HIGH, round=20)
    mine = offered(bench.ready(20))
    effects = bench.feed(ev.OfferAccepted(mine, 11))
    assert do.SendWithdraw(mine, "too many rounds behind") in effects
    assert not [effect for effect in effects if isinstance(effect, do.ScorePeer)]
    assert isinstance(effects[-1], do.FinishRound) and bench.machine.round == 20
    strict = Bench(HIGH, round=20, max_round_skew=0)
    strict.sees(HIGH, round=20)
    mine = offered(strict.ready(20))
    assert do.ScorePeer(HIGH, "out_of_order") in strict.feed(ev.OfferAccepted(mine, 19)), "it knew"
