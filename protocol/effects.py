"""What the gossip machine can ask for: imperative, plain values; the driver performs them and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from peerloom.protocol.messages import DeclineReason, ExchangeId
from peerloom.protocol.types import PeerId, Span


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Open an exchange stream to `peer` and offer these pieces of our proposal of `round`, for one leg."""

    exchange_id: ExchangeId
    peer: PeerId
    round: int
    fragment: int = 0
    leg: int = 0
    weight: float = 1.0
    send: Span = (0, 1)


@dataclass(frozen=True, slots=True)
class SendHold:
    """Tell the offering peer that we keep its offer."""

    exchange_id: ExchangeId


@dataclass(frozen=True, slots=True)
class SendAccept:
    """Take a peer's offer, naming our own round; a Transfer of the same exchange follows at once."""

    exchange_id: ExchangeId
    round: int


@dataclass(frozen=True, slots=True)
class SendDecline:
    """Refuse a peer's offer and end its stream."""

    exchange_id: ExchangeId
    reason: DeclineReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move pieces of both payloads at once; break the exchange when no byte moves for `stall_s` seconds."""

    exchange_id: ExchangeId
    stall_s: float
    send: Span = (0, 1)
    receive: Span = (0, 1)


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Offering side: tell the peer to commit."""

    exchange_id: ExchangeId


@dataclass(frozen=True, slots=True)
class SendAck:
    """Accepting side: tell the peer that we have committed, and end the stream."""

    exchange_id: ExchangeId


@dataclass(frozen=True, slots=True)
class SendWithdraw:
    """End an exchange or an offer of ours uncommitted."""

    exchange_id: ExchangeId
    reason: str


@dataclass(frozen=True, slots=True)
class FinishRound:
    """End `round`, or one turn of it: mix with the peer's payload if an edge was committed, else with the edge dropped.

    `reason` says why there was no partner ("" with one); `weight` is the edge's lambda. `receive` are the pieces that
    came, and `replace` says that they are a group's mean already.
    """

    round: int
    partner: PeerId | None
    partner_round: int
    reason: str
    weight: float = 1.0
    receive: Span = (0, 1)
    replace: bool = False


@dataclass(frozen=True, slots=True)
class CutShort:
    """End the local steps of `round` after the current one: a peer waits for us, and the last round ended alone."""

    round: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Fire TimerFired(name) at time `at` (the clock of `handle`'s now); replaces one of the same name."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Forget the timer, if set."""

    name: str


@dataclass(frozen=True, slots=True)
class ScorePeer:
    """Hold a fault against a peer."""

    peer: PeerId
    fault: str


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a cumulative counter."""

    metric: str
    amount: float = 1.0


Effect = (
    SendOffer
    | SendHold
    | SendAccept
    | SendDecline
    | Transfer
    | SendCommit
    | SendAck
    | SendWithdraw
    | FinishRound
    | CutShort
    | SetTimer
    | CancelTimer
    | ScorePeer
    | Count
)
