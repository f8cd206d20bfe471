from peerloom.proto import gossip_pb2 as _gossip_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FloodEnvelope(_message.Message):
    __slots__ = ("batches", "versions", "wants", "proof", "hash_query", "hash_reply", "end")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    HASH_QUERY_FIELD_NUMBER: _ClassVar[int]
    HASH_REPLY_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[FloodBatch]
    versions: FloodVersions
    wants: _containers.RepeatedCompositeFieldContainer[FloodWant]
    proof: FloodProof
    hash_query: FloodHashQuery
    hash_reply: FloodHashReply
    end: _gossip_pb2.End
    def __init__(self, batches: _Optional[_Iterable[_Union[FloodBatch, _Mapping]]] = ..., versions: _Optional[_Union[FloodVersions, _Mapping]] = ..., wants: _Optional[_Iterable[_Union[FloodWant, _Mapping]]] = ..., proof: _Optional[_Union[FloodProof, _Mapping]] = ..., hash_query: _Optional[_Union[FloodHashQuery, _Mapping]] = ..., hash_reply: _Optional[_Union[FloodHashReply, _Mapping]] = ..., end: _Optional[_Union[_gossip_pb2.End, _Mapping]] = ...) -> None: ...

class FloodBatch(_message.Message):
    __slots__ = ("origin", "sequence", "step", "scalars", "signature", "prev", "key")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PREV_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    origin: int
    sequence: int
    step: int
    scalars: _containers.RepeatedScalarFieldContainer[int]
    signature: bytes
    prev: bytes
    key: bytes
    def __init__(self, origin: _Optional[int] = ..., sequence: _Optional[int] = ..., step: _Optional[int] = ..., scalars: _Optional[_Iterable[int]] = ..., signature: _Optional[bytes] = ..., prev: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...

class FloodHead(_message.Message):
    __slots__ = ("origin", "next", "chain", "base", "key")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    origin: int
    next: int
    chain: bytes
    base: int
    key: bytes
    def __init__(self, origin: _Optional[int] = ..., next: _Optional[int] = ..., chain: _Optional[bytes] = ..., base: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class FloodVersions(_message.Message):
    __slots__ = ("heads", "cut")
    HEADS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedCompositeFieldContainer[FloodHead]
    cut: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, heads: _Optional[_Iterable[_Union[FloodHead, _Mapping]]] = ..., cut: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FloodWant(_message.Message):
    __slots__ = ("origin", "sequence", "key")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    origin: int
    sequence: int
    key: bytes
    def __init__(self, origin: _Optional[int] = ..., sequence: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class FloodProof(_message.Message):
    __slots__ = ("key", "one", "other")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ONE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    one: FloodBranch
    other: FloodBranch
    def __init__(self, key: _Optional[bytes] = ..., one: _Optional[_Union[FloodBranch, _Mapping]] = ..., other: _Optional[_Union[FloodBranch, _Mapping]] = ...) -> None: ...

class FloodBranch(_message.Message):
    __slots__ = ("sequence", "step", "scalars", "prev", "signature")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    PREV_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    step: int
    scalars: _containers.RepeatedScalarFieldContainer[int]
    prev: bytes
    signature: bytes
    def __init__(self, sequence: _Optional[int] = ..., step: _Optional[int] = ..., scalars: _Optional[_Iterable[int]] = ..., prev: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class FloodHashQuery(_message.Message):
    __slots__ = ("number", "heads")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    number: int
    heads: _containers.RepeatedCompositeFieldContainer[FloodHead]
    def __init__(self, number: _Optional[int] = ..., heads: _Optional[_Iterable[_Union[FloodHead, _Mapping]]] = ...) -> None: ...

class FloodHashReply(_message.Message):
    __slots__ = ("number", "digest")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    digest: bytes
    def __init__(self, number: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FloodMark(_message.Message):
    __slots__ = ("key", "next", "step", "chain", "signature")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    next: int
    step: int
    chain: bytes
    signature: bytes
    def __init__(self, key: _Optional[bytes] = ..., next: _Optional[int] = ..., step: _Optional[int] = ..., chain: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class FloodSnapshot(_message.Message):
    __slots__ = ("marks", "proofs", "state_digest")
    MARKS_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    marks: _containers.RepeatedCompositeFieldContainer[FloodMark]
    proofs: _containers.RepeatedCompositeFieldContainer[FloodProof]
    state_digest: bytes
    def __init__(self, marks: _Optional[_Iterable[_Union[FloodMark, _Mapping]]] = ..., proofs: _Optional[_Iterable[_Union[FloodProof, _Mapping]]] = ..., state_digest: _Optional[bytes] = ...) -> None: ...
