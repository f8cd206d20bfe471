"""What can happen to the gossip machine: past tense, plain values."""

from __future__ import annotations

from dataclasses import dataclass

from peerloom.protocol.messages import DeclineReason, ExchangeId, Offer
from peerloom.protocol.types import PeerId


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """One live trainer of the run, other than this node, as its newest record says.

    One that is `left_alone` for its faults counts where all nodes are to plan alike, and is met by this node nowhere.
    """

    peer: PeerId
    round: int
    left_alone: bool = False


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """The live view: all trainers that the swarm may pair now, this node left out."""

    peers: tuple[PeerSeen, ...]


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """The worker began the local steps of `round`."""

    round: int


@dataclass(frozen=True, slots=True)
class ProposalReady:
    """The worker stands at an exchange point of `round`: the fragment's y is in memory, encoded."""

    round: int
    fragment: int = 0
    leg: int = 0


@dataclass(frozen=True, slots=True)
class OfferReceived:
    """A peer opened an exchange with us."""

    peer: PeerId
    offer: Offer


@dataclass(frozen=True, slots=True)
class OfferHeld:
    """The peer keeps our offer until it reaches its own exchange point."""

    exchange_id: ExchangeId


@dataclass(frozen=True, slots=True)
class OfferAccepted:
    """The peer takes our offer; its own proposal is of `round`."""

    exchange_id: ExchangeId
    round: int


@dataclass(frozen=True, slots=True)
class OfferDeclined:
    """The peer does not take our offer."""

    exchange_id: ExchangeId
    reason: DeclineReason


@dataclass(frozen=True, slots=True)
class PayloadsVerified:
    """Our payload is sent, the peer's is here whole, its digest right and its numbers finite."""

    exchange_id: ExchangeId


@dataclass(frozen=True, slots=True)
class CommitReceived:
    """The offering side committed to commit on our acknowledgement."""

    exchange_id: ExchangeId


@dataclass(frozen=True, slots=True)
class AckReceived:
    """The accepting side has committed."""

    exchange_id: ExchangeId


@dataclass(frozen=True, slots=True)
class ExchangeBroken:
    """The stream is over: withdrawn, reset, stalled, or broken by a bad message (`at_fault`: the peer's doing)."""

    exchange_id: ExchangeId
    reason: str
    at_fault: bool = False


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer set by SetTimer is due."""

    name: str


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """The node is stopping: an exchange under way may end, no new one begins."""


Event = (
    PeersChanged
    | RoundStarted
    | ProposalReady
    | OfferReceived
    | OfferHeld
    | OfferAccepted
    | OfferDeclined
    | PayloadsVerified
    | CommitReceived
    | AckReceived
    | ExchangeBroken
    | TimerFired
    | DrainStarted
)
