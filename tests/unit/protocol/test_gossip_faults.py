"""The gossip machine and what goes wrong: a peer out of order, our own mistakes, draining."""

from __future__ import annotations

import pytest

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.errors import InvalidTransition
from tests.unit.protocol.gossip_bench import HIGH, HIGHER, LOW, Bench, offer

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
