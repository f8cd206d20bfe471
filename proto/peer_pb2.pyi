from peerloom.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("peer_id", "run_id", "spec_hash", "protocol_min", "protocol_max", "version", "wall_time", "challenge")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    run_id: str
    spec_hash: str
    protocol_min: int
    protocol_max: int
    version: str
    wall_time: float
    challenge: bytes
    def __init__(self, peer_id: _Optional[str] = ..., run_id: _Optional[str] = ..., spec_hash: _Optional[str] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., version: _Optional[str] = ..., wall_time: _Optional[float] = ..., challenge: _Optional[bytes] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("peer_id", "run_id", "spec_hash", "protocol_min", "protocol_max", "version", "wall_time", "nonce", "signature")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_HASH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    run_id: str
    spec_hash: str
    protocol_min: int
    protocol_max: int
    version: str
    wall_time: float
    nonce: bytes
    signature: bytes
    def __init__(self, peer_id: _Optional[str] = ..., run_id: _Optional[str] = ..., spec_hash: _Optional[str] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., version: _Optional[str] = ..., wall_time: _Optional[float] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ProveRequest(_message.Message):
    __slots__ = ("peer_id", "nonce", "signature")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    nonce: bytes
    signature: bytes
    def __init__(self, peer_id: _Optional[str] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ProveReply(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DialBackRequest(_message.Message):
    __slots__ = ("addresses", "cert_der")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CERT_DER_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    cert_der: bytes
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., cert_der: _Optional[bytes] = ...) -> None: ...

class DialBackReply(_message.Message):
    __slots__ = ("reached",)
    REACHED_FIELD_NUMBER: _ClassVar[int]
    reached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reached: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("record", "partners", "counters")
    class PartnersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PARTNERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    record: _common_pb2.PeerRecord
    partners: _containers.ScalarMap[str, int]
    counters: _containers.ScalarMap[str, float]
    def __init__(self, record: _Optional[_Union[_common_pb2.PeerRecord, _Mapping]] = ..., partners: _Optional[_Mapping[str, int]] = ..., counters: _Optional[_Mapping[str, float]] = ...) -> None: ...
