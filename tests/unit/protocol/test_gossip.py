"""The gossip machine, path by path: events in, the exact effects out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.errors import InvalidTransition
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.gossip_parts import MAX_PARKED
from peerloom.protocol.graphs import scheduled_matching
from peerloom.protocol.messages import DeclineReason, Offer
from peerloom.protocol.pairing import rank
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId

SEED, LAYOUT, SIZE = 7, "cd" * 32, 4096
PEERS = sorted((PeerId(f"peer{i}") for i in range(6)), key=lambda peer: rank(SEED, peer))
LOW, ME, HIGH, HIGHER, HIGHEST, TOP = PEERS  # in the order of rank
M = 10.0
STALL, SEEK = 0.25 * M, 0.75 * M


def offer(name: str, round: int = 0, **changes: object) -> Offer:
    return replace(Offer(name, round, LAYOUT, "fp32", SIZE), **changes)  # type: ignore[arg-type]


class Bench:
    """A machine, a clock, and the ids of the offers it makes."""

    def __init__(self, *peers: PeerId, pairing: str = "rendezvous", me: PeerId = ME, round: int = 0) -> None:
        spec = GaslocSpec(pairing=pairing, match_timeout_s=M)  # type: ignore[arg-type]
        self.machine = GossipMachine(me, spec, SEED, random.Random(1), LAYOUT, SIZE)
        self.now = 100.0
        self.sees(*peers)
        self.feed(ev.RoundStarted(round))

    def sees(self, *peers: PeerId, round: int = 0) -> list[do.Effect]:
        return self.feed(ev.PeersChanged(tuple(ev.PeerSeen(peer, round) for peer in peers)))

    def feed(self, event: ev.Event, after: float = 0.0) -> list[do.Effect]:
        self.now += after
        effects = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return effects

    def receives(self, peer: PeerId, name: str, round: int = 0, **changes: object) -> list[do.Effect]:
        return self.feed(ev.OfferReceived(peer, offer(name, round, **changes)))

    def ready(self, round: int = 0) -> list[do.Effect]:
        return self.feed(ev.ProposalReady(round))

    def seeks(self) -> str:
        """Comes to the exchange point with nothing parked; the id of the first offer."""
        return offered(self.ready())

    def engaged_offering(self) -> str:
        mine = self.seeks()
        self.feed(ev.OfferAccepted(mine, 0))
        return mine

    def engaged_accepting(self, peer: PeerId = LOW, name: str = "a") -> str:
        self.receives(peer, name)
        self.ready()
        assert self.machine.partner == peer
        return name

    @property
    def seek_timer(self) -> do.SetTimer:
        return do.SetTimer("seek", self.now + SEEK)


def offered(effects: list[do.Effect]) -> str:
    (sent,) = [effect for effect in effects if isinstance(effect, do.SendOffer)]
    return sent.exchange_id


def target(effects: list[do.Effect]) -> PeerId:
    (sent,) = [effect for effect in effects if isinstance(effect, do.SendOffer)]
    return sent.peer


# --- the two-sided commit


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


# --- rendezvous: our offers


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


def test_an_accept_from_a_round_too_far_behind_is_a_fault() -> None:
    bench = Bench(HIGH, round=20)
    bench.sees(HIGH, round=20)
    mine = offered(bench.ready(20))
    effects = bench.feed(ev.OfferAccepted(mine, 11))
    assert do.SendWithdraw(mine, "a message out of order") in effects
    assert do.ScorePeer(HIGH, "out_of_order") in effects


# --- rendezvous: peers' offers


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


# --- messages out of order: the peer's fault


@pytest.mark.parametrize("event", [ev.CommitReceived, ev.AckReceived, ev.OfferHeld])
def test_what_the_accepting_peer_may_not_send(event: type[ev.CommitReceived]) -> None:
    bench = Bench(HIGH)
    mine = bench.engaged_offering()
    effects = bench.feed(event(mine))
    assert effects[:3] == [
        do.SendWithdraw(mine, "a message out of order"),
        do.ScorePeer(HIGH, "out_of_order"),
        do.Count("gossip_broken"),
    ]


def test_an_offering_peer_may_neither_acknowledge_nor_commit_twice() -> None:
    for second in (ev.AckReceived("a"), ev.CommitReceived("a")):
        bench = Bench(LOW)
        bench.engaged_accepting()
        bench.feed(ev.CommitReceived("a"))
        assert do.ScorePeer(LOW, "out_of_order") in bench.feed(second)


def test_holding_twice_is_a_fault() -> None:
    bench = Bench(HIGH)
    mine = bench.seeks()
    bench.feed(ev.OfferHeld(mine))
    assert do.ScorePeer(HIGH, "out_of_order") in bench.feed(ev.OfferHeld(mine))


def test_a_parked_peer_may_only_wait() -> None:
    bench = Bench(LOW)
    bench.receives(LOW, "a")
    assert bench.feed(ev.CommitReceived("a")) == [
        do.SendWithdraw("a", "a message out of order"),
        do.ScorePeer(LOW, "out_of_order"),
    ]


# --- our own mistakes


@pytest.mark.parametrize(
    "events",
    [
        [ev.ProposalReady(1)],
        [ev.ProposalReady(0), ev.ProposalReady(0)],
        [ev.ProposalReady(0), ev.RoundStarted(1)],
        [ev.OfferReceived(LOW, offer("a")), ev.PayloadsVerified("a")],
        [
            ev.OfferReceived(LOW, offer("a")),
            ev.ProposalReady(0),
            ev.PayloadsVerified("a"),
            ev.PayloadsVerified("a"),
        ],
    ],
)
def test_an_event_we_may_not_give_raises_with_the_story(events: list[ev.Event]) -> None:
    bench = Bench(LOW)
    for event in events[:-1]:
        bench.feed(event)
    with pytest.raises(InvalidTransition) as caught:
        bench.feed(events[-1])
    for event in events:
        assert str(event) in str(caught.value)


def test_the_story_is_short() -> None:
    bench = Bench(LOW)
    for round in range(50):
        bench.feed(ev.RoundStarted(round))
    with pytest.raises(InvalidTransition) as caught:
        bench.feed(ev.ProposalReady(0))
    assert str(caught.value).count("RoundStarted") == 19


# --- draining


def test_draining_declines_what_is_parked_and_what_comes() -> None:
    bench = Bench(LOW, HIGH)
    bench.receives(LOW, "a")
    gone = [do.Count("gossip_refused_draining"), do.SendDecline("a", "draining")]
    assert bench.feed(ev.DrainStarted()) == gone
    assert bench.receives(HIGH, "a") == gone
    assert bench.ready() == [do.Count("gossip_alone"), do.FinishRound(0, None, 0, "this node is stopping")]


def test_draining_while_seeking_ends_the_round() -> None:
    bench = Bench(HIGH)
    mine = bench.seeks()
    effects = bench.feed(ev.DrainStarted())
    assert do.SendWithdraw(mine, "finished the round alone") in effects
    assert effects[-1] == do.FinishRound(0, None, 0, "this node is stopping")


def test_draining_lets_an_exchange_end() -> None:
    bench = Bench(HIGH)
    mine = bench.engaged_offering()
    assert bench.feed(ev.DrainStarted()) == []
    bench.feed(ev.PayloadsVerified(mine))
    assert bench.feed(ev.AckReceived(mine))[-1] == do.FinishRound(0, HIGH, 0, "")


def test_draining_does_not_seek_again_after_a_break() -> None:
    bench = Bench(HIGH, HIGHER)
    mine = bench.engaged_offering()
    bench.feed(ev.DrainStarted())
    effects = bench.feed(ev.ExchangeBroken(mine, "reset"))
    assert isinstance(effects[-1], do.FinishRound)
    assert not [effect for effect in effects if isinstance(effect, do.SendOffer)]


# --- scheduled pairing: one leg a round of the planned form


def scheduled_partner(round: int, *others: PeerId) -> PeerId | None:
    """Whom the round's matching over the sorted ids gives to ME."""
    ids = sorted([ME, *others])
    for pair in scheduled_matching(SEED, round, len(ids)):
        if ids.index(ME) in pair:
            return ids[sum(pair) - ids.index(ME)]
    return None


def test_scheduled_follows_the_shared_matching() -> None:
    others = [peer for peer in PEERS if peer != ME]
    for round in range(10):
        bench = Bench(*others, pairing="scheduled", round=round)
        bench.sees(*others, round=round)
        assert target(bench.ready(round)) == scheduled_partner(round, *others)


def test_scheduled_odd_node_out_goes_on_at_once() -> None:
    left_out = next(r for r in range(99) if scheduled_partner(r, LOW, HIGH) is None)
    bench = Bench(LOW, HIGH, pairing="scheduled", round=left_out)
    (idle, finish) = bench.ready(left_out)
    assert idle == do.Count("gossip_idle")
    assert isinstance(finish, do.FinishRound)
    assert finish.reason == f"the topology gives this node nobody in leg 0 of round {left_out}"


def test_scheduled_holds_the_partner_of_a_round_ahead() -> None:
    bench = Bench(LOW, pairing="scheduled")
    assert bench.receives(LOW, "a", 1) == [do.SendHold("a")]
    bench.feed(ev.OfferDeclined(bench.seeks(), "round"))
    bench.feed(ev.RoundStarted(1))
    assert bench.ready(1)[0] == do.SendAccept("a", 1)


def test_scheduled_declines_others_and_rounds_gone_by() -> None:
    others = [LOW, HIGH, HIGHER]
    partner = scheduled_partner(4, *others)
    stranger = next(peer for peer in others if peer != partner)
    bench = Bench(*others, pairing="scheduled", round=4)
    assert bench.receives(stranger, "a", 4)[1] == do.SendDecline("a", "partner")
    assert bench.receives(stranger, "b", 3)[1] == do.SendDecline("b", "round")
    assert bench.receives(stranger, "c", 13)[1] == do.SendDecline("c", "round")


def test_scheduled_goes_alone_when_the_partner_is_past_the_round() -> None:
    bench = Bench(LOW, pairing="scheduled")
    bench.ready()
    effects = bench.sees(LOW, round=1)
    assert effects[-1] == do.FinishRound(0, None, 0, f"the planned partner {LOW} is past round 0")
    declined = Bench(HIGH, pairing="scheduled")
    effects = declined.feed(ev.OfferDeclined(declined.seeks(), "round"))
    assert effects[-1] == do.FinishRound(0, None, 0, f"the planned partner {HIGH} could not be reached")


def test_scheduled_asks_again_while_views_differ() -> None:
    bench = Bench(HIGH, pairing="scheduled")
    effects = bench.feed(ev.OfferDeclined(bench.seeks(), "partner"))
    assert isinstance(effects[-1], do.SetTimer)
    assert effects[-1].name == "retry"
    assert bench.machine.reason == "every peer asked is busy; asking again soon"


def test_scheduled_accept_of_another_round_is_a_fault() -> None:
    bench = Bench(HIGH, pairing="scheduled")
    assert do.ScorePeer(HIGH, "out_of_order") in bench.feed(ev.OfferAccepted(bench.seeks(), 1))
