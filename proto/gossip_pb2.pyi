from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeEnvelope(_message.Message):
    __slots__ = ("offer", "hold", "accept", "decline", "chunk", "payload_end", "commit", "ack", "withdraw", "end")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_END_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    hold: Hold
    accept: Accept
    decline: Decline
    chunk: Chunk
    payload_end: PayloadEnd
    commit: Commit
    ack: Ack
    withdraw: Withdraw
    end: End
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., payload_end: _Optional[_Union[PayloadEnd, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("exchange_id", "round", "layout", "encoding", "total_bytes", "max_chunk_bytes", "fragment", "leg", "weight")
    EXCHANGE_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    exchange_id: str
    round: int
    layout: str
    encoding: str
    total_bytes: int
    max_chunk_bytes: int
    fragment: int
    leg: int
    weight: float
    def __init__(self, exchange_id: _Optional[str] = ..., round: _Optional[int] = ..., layout: _Optional[str] = ..., encoding: _Optional[str] = ..., total_bytes: _Optional[int] = ..., max_chunk_bytes: _Optional[int] = ..., fragment: _Optional[int] = ..., leg: _Optional[int] = ..., weight: _Optional[float] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Accept(_message.Message):
    __slots__ = ("round", "max_chunk_bytes")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    round: int
    max_chunk_bytes: int
    def __init__(self, round: _Optional[int] = ..., max_chunk_bytes: _Optional[int] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    detail: str
    def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PayloadEnd(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("error", "detail")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    error: str
    detail: str
    def __init__(self, error: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
