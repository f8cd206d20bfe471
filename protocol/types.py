"""Identifiers and records that every layer above the wire speaks in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

PeerId = NewType("PeerId", str)  # libp2p peer id in base58, "12D3Koo…" for an Ed25519 key
RunId = NewType("RunId", str)  # first 16 hex digits of SHA-256 over the spec's canonical form

Span = tuple[int, int]  # pieces of an encoded proposal: the first, and the one past the last

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

Role = Literal["trainer", "bootstrap"]
NodeState = Literal[
    "starting", "fetching", "training", "seeking", "exchanging", "stalled", "restarting", "draining", "done", "serving"
]
Reach = Literal["unknown", "direct", "via"]  # not found out yet; can be dialled; is reached through others
Encoding = Literal["fp32", "bf16", "int8"]
StageRole = Literal["", "claims", "hosts", "stands_by"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRecord:
    """What a node says of itself in the DHT and in Status; signed there by the peer's own key.

    `addresses` are gRPC endpoints "host:port" ("[v6]:port"), best first. `init_digest` and `layout_digest` are hex
    (BLAKE3 of theta_0, and of names and shapes); empty until the model is built, and for a bootstrap peer. Times are
    Unix seconds. `sketch` is a seeded random projection of the parameters, from which distances between peers are told.
    `via` names the relays of a node that cannot be dialled, `relays` says that this one carries others' tunnels, and
    `libp2p` holds the multiaddrs of its libp2p daemon.
    """

    peer_id: PeerId
    name: str
    role: Role
    addresses: tuple[str, ...]
    cert_der: bytes
    version: str
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    instance: str  # random hex per process start: tells a restart from a second node with the same key
    started_at: float
    issued_at: float
    state: NodeState = "starting"
    reason: str = ""  # why it is not training, if so: one sentence
    init_digest: str = ""
    layout_digest: str = ""
    round: int = 0
    step: int = 0  # inner optimizer steps behind the current parameters
    tokens: int = 0  # tokens this node itself has trained on, over all its lives
    tokens_per_s: float = 0.0
    loss: float | None = None  # held-out, nats a token
    up_bytes: int = 0
    down_bytes: int = 0
    sketch: tuple[float, ...] = ()
    reach: Reach = "unknown"
    via: tuple[PeerId, ...] = ()
    relays: bool = False
    libp2p: tuple[str, ...] = ()
    state_hash: str = ""  # SeedFlow: hex, of all sums, as of `messages`
    messages: int = 0  # SeedFlow: how many the state counts, the sum of the version vector
    accuracy: float | None = None  # held-out, of a classification task
    stage: int = -1  # of a pipeline, that it hosts, claims or stands by for; -1: none
    stage_role: StageRole = ""
    up_bytes_per_s: float = 0.0  # over the last half minute
    down_bytes_per_s: float = 0.0
    last_partner: str = ""  # whom it exchanged with last: a peer id, "" for nobody yet
    last_met_at: float = 0.0  # when that was


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node's answer to Status: its record plus what is too much for the DHT.

    `partners` counts committed exchanges a peer; `counters` are the metrics of `effects.Count`, cumulative.
    """

    record: PeerRecord
    partners: dict[PeerId, int] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedSpec:
    """A run's spec as it travels: canonical TOML text, owner and the owner's Ed25519 signature.

    The signature covers b"peerloom-spec-v1\\0" + text; the run id follows from the text.
    """

    text: str
    owner: PeerId
    signature: bytes
