"""The messages of Gossip.Exchange and State.Fetch, as plain values; `codec.py` turns them to and from protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peerloom.protocol.types import Encoding

ExchangeId = str  # 16 random bytes as hex, chosen by the side that offers

DeclineReason = Literal[
    "busy",  # engaged with somebody else
    "crossed",  # both offered at once; the other offer goes on
    "round",  # too far apart in rounds, or not the scheduled round
    "partner",  # the matching names another partner
    "plan",  # as "partner" or with another weight, and the round's matchings are settled here: no use to ask again
    "incompatible",  # layout or encoding differ
    "refused",  # this peer is being left alone for a while
    "draining",
]


@dataclass(frozen=True, slots=True)
class Offer:
    """Opens an exchange: `total_bytes` of parameters of `round`, `layout` being the model's layout digest in hex.

    `max_chunk_bytes` asks for chunks no larger, as a side with a download cap does; 0: any size. So in an Accept.

    It is for one `fragment` and one `leg` of the round, over an edge of `weight` lambda: both sides must mean the same.
    """

    exchange_id: ExchangeId
    round: int
    layout: str
    encoding: Encoding
    total_bytes: int
    max_chunk_bytes: int = 0
    fragment: int = 0
    leg: int = 0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Hold:
    """The offer is kept: this side is still training and will answer when it reaches its exchange point."""


@dataclass(frozen=True, slots=True)
class Accept:
    """The offer is taken, with this side's own round; both payloads follow."""

    round: int
    max_chunk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Decline:
    """The offer is not taken."""

    reason: DeclineReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """`data` lies at byte `offset` of the payload; chunks come in order without gaps, at most 1 MiB each."""

    offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class PayloadEnd:
    """All chunks are sent; `digest` is XXH3 over the whole payload (16 bytes)."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """From the offering side: my payload is sent, yours is verified here, I commit when you acknowledge."""


@dataclass(frozen=True, slots=True)
class Ack:
    """From the accepting side: committed."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Either side ends the exchange uncommitted."""

    reason: str


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last message of either side of a stream: `error` names the error it ended with, "" for none."""

    error: str = ""
    detail: str = ""


ExchangeMessage = Offer | Hold | Accept | Decline | Chunk | PayloadEnd | Commit | Ack | Withdraw


StateKind = Literal[
    "theta",  # parameters in fp32
    "flood",  # SeedFlow's: a snapshot's marks, then the worker's sums
    "base_files",  # of a base model: see base.py
    "base",  # its parameters
]


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks for the donor's state from piece `start_piece` on.

    `snapshot` names the snapshot of a broken fetch, to go on with it if the donor still keeps it ("" otherwise).
    `max_piece_bytes` asks for pieces no larger; 0: any size. `kind` says which state; a base's `layout` is its digest.
    """

    layout: str
    snapshot: str = ""
    start_piece: int = 0
    max_piece_bytes: int = 0
    kind: StateKind = "theta"


@dataclass(frozen=True, slots=True)
class StateManifest:
    """First answer to a fetch: what will come. `piece_digests` are BLAKE3 over each `piece_bytes` of the state."""

    snapshot: str
    round: int
    step: int
    layout: str
    total_bytes: int
    piece_bytes: int
    piece_digests: tuple[bytes, ...]
    held_out_loss: float | None


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Piece `index` of the manifest, whole."""

    index: int
    data: bytes


StateMessage = StateManifest | StatePiece


@dataclass(frozen=True, slots=True)
class DialBack:
    """Asks a peer to dial the sender at `addresses` and to tell where it answered, under this certificate."""

    addresses: tuple[str, ...]
    cert_der: bytes
