"""Rounds longer than the timeout: a node that met nobody comes early to a peer that waits."""

from __future__ import annotations

import random

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import Offer
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId

PEER, ME = PeerId("peer"), PeerId("me")
SPEC = GaslocSpec(match_timeout_s=4.0)
TRAINED_S = 20.0


def offer(number: int, round: int) -> ev.OfferReceived:
    return ev.OfferReceived(PEER, Offer(f"{number:032x}", round, "L", "fp32", 4))


def machine_after_round_0(*, alone: bool) -> GossipMachine:
    """It trained for 20 s and met the peer, or waited for it in vain; round 1 begins at 23 s."""
    machine = GossipMachine(ME, SPEC, 1, random.Random(1), "L", 4)
    machine.handle(ev.PeersChanged((ev.PeerSeen(PEER, 0),)), 0.0)
    machine.handle(ev.RoundStarted(0), 0.0)
    if not alone:
        machine.handle(offer(0, 0), TRAINED_S - 1)
    effects = machine.handle(ev.ProposalReady(0), TRAINED_S)
    if alone:
        (sent,) = [effect for effect in effects if isinstance(effect, do.SendOffer)]
        machine.handle(ev.OfferHeld(sent.exchange_id), TRAINED_S)
        machine.handle(ev.TimerFired("seek"), TRAINED_S + 3.0)
    else:
        machine.handle(ev.PayloadsVerified(f"{0:032x}"), TRAINED_S)
        machine.handle(ev.CommitReceived(f"{0:032x}"), TRAINED_S)
    assert machine.state == "training"
    machine.handle(ev.RoundStarted(1), 23.0)
    return machine


def test_past_the_middle_it_comes_at_once_and_only_once() -> None:
    machine = machine_after_round_0(alone=True)
    held = do.SendHold(f"{1:032x}")
    assert machine.handle(offer(1, 1), 33.0) == [held, do.Count("gossip_cut_short"), do.CutShort(1)]
    machine.check_invariants()
    machine.handle(ev.ExchangeBroken(f"{1:032x}", "gone"), 33.1)
    assert do.CutShort(1) not in machine.handle(offer(2, 1), 33.2)
    effects = machine.handle(ev.ProposalReady(1), 33.5)
    assert do.SendAccept(f"{2:032x}", 1) in effects


def test_before_the_middle_the_peer_waits() -> None:
    machine = machine_after_round_0(alone=True)
    assert machine.handle(offer(1, 1), 32.9) == [do.SendHold(f"{1:032x}")]


def test_who_met_somebody_does_all_its_steps() -> None:
    machine = machine_after_round_0(alone=False)
    assert machine.handle(offer(1, 1), 42.0) == [do.SendHold(f"{1:032x}")]
