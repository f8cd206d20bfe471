"""One gossip machine on a bench: events in, the exact effects out."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import Offer
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


class MachineBench:
    """A machine and its clock."""

    machine: GossipMachine
    now: float

    def sees(self, *peers: PeerId, round: int = 0) -> list[do.Effect]:
        return self.feed(ev.PeersChanged(tuple(ev.PeerSeen(peer, round) for peer in peers)))

    def feed(self, event: ev.Event, after: float = 0.0) -> list[do.Effect]:
        self.now += after
        effects = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return effects


class Bench(MachineBench):
    """A machine, a clock, and the ids of the offers it makes."""

    def __init__(self, *peers: PeerId, me: PeerId = ME, round: int = 0, **gasloc: Any) -> None:
        spec = GaslocSpec(match_timeout_s=M, **gasloc)
        self.machine = GossipMachine(me, spec, SEED, random.Random(1), LAYOUT, SIZE)
        self.now = 100.0
        self.sees(*peers)
        self.feed(ev.RoundStarted(round))

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
