from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PeerRecord(_message.Message):
    __slots__ = ("peer_id", "name", "role", "addresses", "cert_der", "version", "protocol_min", "protocol_max", "instance", "started_at", "issued_at", "state", "reason", "init_digest", "layout_digest", "round", "step", "tokens", "tokens_per_s", "loss", "up_bytes", "down_bytes", "state_hash", "messages", "accuracy", "sketch", "reach", "via", "relays", "libp2p", "stage", "stage_role", "up_bytes_per_s", "down_bytes_per_s", "last_partner", "last_met_at")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CERT_DER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INIT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    SKETCH_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    LIBP2P_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_ROLE_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LAST_PARTNER_FIELD_NUMBER: _ClassVar[int]
    LAST_MET_AT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    role: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    cert_der: bytes
    version: str
    protocol_min: int
    protocol_max: int
    instance: str
    started_at: float
    issued_at: float
    state: str
    reason: str
    init_digest: str
    layout_digest: str
    round: int
    step: int
    tokens: int
    tokens_per_s: float
    loss: float
    up_bytes: int
    down_bytes: int
    state_hash: str
    messages: int
    accuracy: float
    sketch: _containers.RepeatedScalarFieldContainer[float]
    reach: str
    via: _containers.RepeatedScalarFieldContainer[str]
    relays: bool
    libp2p: _containers.RepeatedScalarFieldContainer[str]
    stage: int
    stage_role: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    last_partner: str
    last_met_at: float
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., cert_der: _Optional[bytes] = ..., version: _Optional[str] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., instance: _Optional[str] = ..., started_at: _Optional[float] = ..., issued_at: _Optional[float] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., init_digest: _Optional[str] = ..., layout_digest: _Optional[str] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., loss: _Optional[float] = ..., up_bytes: _Optional[int] = ..., down_bytes: _Optional[int] = ..., state_hash: _Optional[str] = ..., messages: _Optional[int] = ..., accuracy: _Optional[float] = ..., sketch: _Optional[_Iterable[float]] = ..., reach: _Optional[str] = ..., via: _Optional[_Iterable[str]] = ..., relays: bool = ..., libp2p: _Optional[_Iterable[str]] = ..., stage: _Optional[int] = ..., stage_role: _Optional[str] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., last_partner: _Optional[str] = ..., last_met_at: _Optional[float] = ...) -> None: ...
