"""Fresh company: who is left aside, when, and that equal nodes come to meet everybody."""

from __future__ import annotations

import random

import pytest

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.company import LEAST_SHARE, MOST_SHARE, Company
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import Offer
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId

A, B, ME = PeerId("a"), PeerId("b"), PeerId("me")
SPEC = GaslocSpec(match_timeout_s=8.0)


def test_a_partner_is_avoided_at_doubling_streaks_only() -> None:
    company = Company(random.Random(1), 100.0)
    avoided = []
    for meeting in range(1, 20):
        company.met(A)
        if company.to_avoid({A, B}, 10.0) is not None:
            avoided.append(meeting)
    assert avoided == [2, 4, 8, 16]


def test_another_partner_ends_the_streak_and_nobody_is_avoided_when_alone() -> None:
    company = Company(random.Random(1), 100.0)
    company.met(A)
    company.met(A)
    assert company.to_avoid({A}, 10.0) is None
    company.met(B)
    assert company.to_avoid({A, B}, 10.0) is None


def test_who_was_slow_is_avoided_the_next_time() -> None:
    company = Company(random.Random(1), 100.0)
    company.met(A, slow=True)
    assert company.to_avoid({A}, 10.0) is None
    avoid = company.to_avoid({A, B}, 10.0)
    assert avoid is not None and avoid[0] == A
    company.met(B)
    assert company.to_avoid({A, B}, 10.0) is None


@pytest.mark.parametrize(("trained_s", "least", "most"), [(10.0, 3.0, 10.0), (1000.0, 3.0, 3.0)])
def test_the_pause_is_a_share_of_the_round_and_bounded(trained_s: float, least: float, most: float) -> None:
    assert (LEAST_SHARE, MOST_SHARE) == (0.3, 1.0)
    for seed in range(50):
        company = Company(random.Random(seed), 3.0 if trained_s == 1000.0 else 100.0)
        company.met(A)
        company.met(A)
        avoid = company.to_avoid({A, B}, trained_s)
        assert avoid is not None and avoid[0] == A and least <= avoid[1] <= most


def _stale_machine() -> GossipMachine:
    """A machine that has met A twice running, in rounds of 1 s, with B in view."""
    machine = GossipMachine(ME, SPEC, 1, random.Random(1), "layout", 4)
    machine.handle(ev.PeersChanged((ev.PeerSeen(A, 0), ev.PeerSeen(B, 0))), 0.0)
    for round in range(2):
        machine.handle(ev.RoundStarted(round), float(round))
        machine.handle(ev.OfferReceived(A, Offer(f"{round:032x}", round, "layout", "fp32", 4)), round + 0.5)
        machine.handle(ev.ProposalReady(round), round + 1.0)
        machine.handle(ev.PayloadsVerified(f"{round:032x}"), round + 1.0)
        effects = machine.handle(ev.CommitReceived(f"{round:032x}"), round + 1.0)
        assert do.FinishRound(round, A, round, "") in effects
    machine.handle(ev.RoundStarted(2), 2.0)
    return machine


def test_a_stale_partners_offer_is_held_until_the_pause_is_over() -> None:
    machine = _stale_machine()
    machine.handle(ev.OfferReceived(A, Offer("f" * 32, 2, "layout", "fp32", 4)), 2.5)
    effects = machine.handle(ev.ProposalReady(2), 3.0)
    machine.check_invariants()
    assert [effect.peer for effect in effects if isinstance(effect, do.SendOffer)] == [B]
    [pause] = [effect.at - 3.0 for effect in effects if isinstance(effect, do.SetTimer) and effect.name == "company"]
    assert 0.3 <= pause <= 1.0
    offered = next(effect.exchange_id for effect in effects if isinstance(effect, do.SendOffer))
    machine.handle(ev.OfferHeld(offered), 3.1)
    effects = machine.handle(ev.TimerFired("company"), 3.0 + pause)
    machine.check_invariants()
    assert do.SendAccept("f" * 32, 2) in effects


def test_a_stale_partner_is_taken_at_once_when_everybody_else_is_gone() -> None:
    machine = _stale_machine()
    machine.handle(ev.OfferReceived(A, Offer("f" * 32, 2, "layout", "fp32", 4)), 2.5)
    machine.handle(ev.ProposalReady(2), 3.0)
    effects = machine.handle(ev.PeersChanged((ev.PeerSeen(A, 2),)), 3.1)
    machine.check_invariants()
    assert do.SendAccept("f" * 32, 2) in effects
