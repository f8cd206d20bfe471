"""What the gossip machine keeps: offers, the exchange under way, and the effects and timers it has asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from peerloom.protocol.effects import CancelTimer, Count, Effect, SetTimer
from peerloom.protocol.messages import ExchangeId, Offer
from peerloom.protocol.pairing import Place
from peerloom.protocol.types import Encoding, PeerId

FANOUT = 3  # our offers that peers may hold at once
MAX_PARKED = 8  # peers' offers we keep at once
EARLY_S = 0.05  # a timer that fires earlier than this before its time was replaced while it was on its way


def place_of(offer: Offer) -> Place:
    """The exchange that an offer is for."""
    return Place(offer.round, offer.fragment, offer.leg)


@dataclass(slots=True)
class Sent:
    """An offer of ours, not yet taken."""

    exchange_id: ExchangeId
    peer: PeerId
    held: bool = False


@dataclass(slots=True)
class Parked:
    """A peer's offer that waits for us; `held` once we said so, else the peer's active offer is deferred."""

    exchange_id: ExchangeId
    peer: PeerId
    offer: Offer
    held: bool

    @property
    def place(self) -> Place:
        """The exchange it is for."""
        return place_of(self.offer)


@dataclass(slots=True)
class Engaged:
    """The exchange under way; `commit` is sent when we offer, received when we accept."""

    exchange_id: ExchangeId
    peer: PeerId
    partner_round: int
    offering: bool
    since: float = 0.0
    verified: bool = False
    commit: bool = False

    @property
    def in_doubt(self) -> bool:
        """Committed here, and not known whether there."""
        return self.offering and self.commit


@dataclass(slots=True)
class Book:
    """Every exchange that is open: our offers, peers' offers that wait, and the one under way."""

    sent: dict[ExchangeId, Sent] = field(default_factory=dict)
    parked: dict[ExchangeId, Parked] = field(default_factory=dict)  # oldest first
    engaged: Engaged | None = None

    def find(self, exchange_id: ExchangeId) -> Engaged | Sent | Parked | None:
        """What an exchange is to us; None once it is left behind."""
        if self.engaged is not None and self.engaged.exchange_id == exchange_id:
            return self.engaged
        return self.sent.get(exchange_id) or self.parked.get(exchange_id)

    def is_open(self, exchange_id: ExchangeId) -> bool:
        """Whether we still wait on it."""
        return self.find(exchange_id) is not None

    @property
    def active(self) -> Sent | None:
        """Our unanswered offer."""
        return next((sent for sent in self.sent.values() if not sent.held), None)

    def asked(self) -> set[PeerId]:
        """The peers that have an offer of ours."""
        return {sent.peer for sent in self.sent.values()}

    def deferred(self) -> list[Parked]:
        """The parked offers that we have not answered at all."""
        return [parked for parked in self.parked.values() if not parked.held]

    def has_parked(self, peer: PeerId) -> bool:
        """Whether an offer of the peer waits already."""
        return any(parked.peer == peer for parked in self.parked.values())

    def waits_for(self) -> str:
        """Whose move it is, as a sentence; "" when nothing of ours is out."""
        if self.engaged is not None:
            return f"exchanging with {self.engaged.peer}"
        if self.active is not None:
            return f"waiting for {self.active.peer} to answer an offer"
        return f"waiting for one of {len(self.sent)} peers to reach its exchange point" if self.sent else ""

    def check_invariants(self) -> None:
        """Raises AssertionError when the book contradicts itself; for tests."""
        peers = [parked.peer for parked in self.parked.values()]
        assert sum(not sent.held for sent in self.sent.values()) <= 1, "one active offer at most"
        assert len(self.sent) <= FANOUT, "our offers are few"
        assert len(peers) <= MAX_PARKED and len(set(peers)) == len(peers), "parked: bounded, one a peer"
        assert not self.sent.keys() & self.parked.keys(), "one meaning an exchange id"
        assert self.active or not self.deferred(), "an offer is deferred only for an active one of ours"


def misfit(offer: Offer, layout: str, encoding: Encoding, fragments: int, total_bytes: int | None) -> str:
    """What differs between a peer's payload and ours, "" if nothing does; `total_bytes` None: not known yet."""
    if offer.fragment >= fragments:
        return f"fragment is {offer.fragment} there, of {fragments} here"
    pairs = (
        ("layout", offer.layout, layout),
        ("encoding", offer.encoding, encoding),
        ("total_bytes", offer.total_bytes, offer.total_bytes if total_bytes is None else total_bytes),
    )
    return "; ".join(f"{name} is {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours)


@dataclass(slots=True)
class Outbox:
    """Gathers the effects of one event; knows which timers are set, so that none is cancelled in vain."""

    timers: dict[str, float] = field(default_factory=dict)
    _effects: list[Effect] = field(default_factory=list)

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: Effect) -> None:
        """Asks for one more thing."""
        self._effects.append(effect)

    def count(self, metric: str) -> None:
        """Adds one to a counter."""
        self.add(Count(metric))

    def set_timer(self, name: str, at: float) -> None:
        """Sets or replaces a timer."""
        self.timers[name] = at
        self.add(SetTimer(name, at))

    def cancel_timer(self, name: str) -> None:
        """Cancels a timer, if set."""
        if self.timers.pop(name, None) is not None:
            self.add(CancelTimer(name))

    def cancel_all(self) -> None:
        """Cancels what is set."""
        for name in list(self.timers):
            self.cancel_timer(name)

    def timer_due(self, name: str, now: float) -> bool:
        """Takes note that a timer fired; False when it was cancelled or replaced meanwhile."""
        at = self.timers.get(name)
        if at is None or now < at - EARLY_S:
            return False
        del self.timers[name]
        return True
