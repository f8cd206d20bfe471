"""What a stage remembers of a microbatch under way, and of a node of the next stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.types import PeerId

Phase = Literal["queued", "forward", "unsent", "sent", "answered", "backward"]


@dataclass(slots=True)
class Flight:
    """A microbatch under way here; `counted`: its gradient goes into `update`, computed with `version`.

    `upstreams` are those who sent it and are still linked, with the version each sent it with: all get the answer.
    `origin` is who sent it last, linked or not.
    """

    microbatch: Microbatch
    counted: bool
    upstreams: dict[PeerId, int] = field(default_factory=dict)
    origin: PeerId | None = None
    phase: Phase = "queued"
    update: int = 0
    version: int = 0
    downstream: PeerId | None = None
    loss: float = 0.0


@dataclass(slots=True)
class Downstream:
    """A linked node of the next stage; `answered_at`: since when it owes an answer, if it owes one.

    `last` numbers what it was sent last among all that was sent.
    """

    credit: int
    answered_at: float
    waiting: bool = False
    last: int = 0
