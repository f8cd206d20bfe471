"""The gossip machine with scheduled pairing: one leg a round of the planned form."""

from __future__ import annotations

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.graphs import scheduled_matching
from peerloom.protocol.types import PeerId
from tests.unit.protocol.gossip_bench import HIGH, HIGHER, LOW, ME, PEERS, SEED, Bench, target


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
