"""What can happen to the flood machine, and what it can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peerloom.protocol.effects import Count, ScorePeer, SetTimer
from peerloom.protocol.events import TimerFired
from peerloom.protocol.flood_messages import (
    Batch,
    FrameBody,
    HashQuery,
    HashReply,
    Proof,
    Segment,
    Segments,
    Versions,
    Wants,
)
from peerloom.protocol.types import PeerId

Refusal = Literal[
    "forged",  # the signature is not the origin's
    "false_proof",  # a proof that convicts nobody
    "bound",  # a scalar larger than the spec allows
    "budget",  # a step past the run's end, or more messages than steps
    "future",  # a period far past the latest one taken; may be taken later
    "gap",  # messages before it are missing; they are asked for
    "origin",  # nobody known, nor vouched for by enough neighbours
    "origins",  # there are too many already
    "rate",  # more than the origin may send in the time; may be taken later
    "cut",  # of an origin that was proven to lie
    "older",  # than all that is held here, so that it cannot be compared
    "doubtful",  # its signature does not fit what is held before it; asked for with the sender's own chain
    "wants",  # the peer asks for more than any neighbour lacks; it may ask again later
    "repeats",  # the peer sends more in vain than any neighbour does
    "talk",  # too many version vectors or questions for hashes in the time
    "pace",  # one of these three, and it goes on: dropped
]


# events


@dataclass(frozen=True, slots=True)
class PeersSeen:
    """The live view: all peers that train now, this node left out."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A stream with a peer stands."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The stream with a peer is over, or none came about."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Received:
    """A message came over the link with `peer`."""

    peer: PeerId
    body: FrameBody


@dataclass(frozen=True, slots=True)
class StepsDone:
    """This node's own local steps, already part of its state: scalars of consecutive steps from `step` on.

    `sequence` is that of the first, from which their directions were drawn.
    """

    step: int
    sequence: int
    scalars: tuple[int, ...]


FloodEvent = PeersSeen | LinkUp | LinkDown | Received | StepsDone | TimerFired


# effects


@dataclass(frozen=True, slots=True)
class Keep:
    """Append to the log; `own`: it must be durable before anything after it is performed.

    A node that forgot what it signed would sign something else at the same place, and be cut off for it.
    """

    item: Segment | Proof
    own: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    """Add these messages to the state."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Retract:
    """Take these messages, applied before, out of the state again: their origin lies, or they stand in nobody's row."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Resync:
    """The state counts messages of a liar that are not held here: fetch a peer's state anew."""

    origin: PeerId


@dataclass(frozen=True, slots=True)
class Exiled:
    """This node itself was cut off: its key signed two histories."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a peer with a link."""

    peer: PeerId
    body: Segments | Versions | Wants | Proof | HashReply


@dataclass(frozen=True, slots=True)
class Question:
    """A peer asks for a state hash: a Send of the reply is owed to it."""

    peer: PeerId
    query: HashQuery


@dataclass(frozen=True, slots=True)
class Links:
    """Open links to these peers, and close those that were opened to others."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the link with a peer: it broke the protocol."""

    peer: PeerId
    reason: str


FloodEffect = Keep | Apply | Retract | Resync | Exiled | Send | Question | Links | Drop | SetTimer | ScorePeer | Count
