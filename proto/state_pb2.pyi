from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("layout", "snapshot", "start_piece", "max_piece_bytes", "kind")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    START_PIECE_FIELD_NUMBER: _ClassVar[int]
    MAX_PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    layout: str
    snapshot: str
    start_piece: int
    max_piece_bytes: int
    kind: str
    def __init__(self, layout: _Optional[str] = ..., snapshot: _Optional[str] = ..., start_piece: _Optional[int] = ..., max_piece_bytes: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class StateEnvelope(_message.Message):
    __slots__ = ("manifest", "piece")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    manifest: StateManifest
    piece: StatePiece
    def __init__(self, manifest: _Optional[_Union[StateManifest, _Mapping]] = ..., piece: _Optional[_Union[StatePiece, _Mapping]] = ...) -> None: ...

class StateManifest(_message.Message):
    __slots__ = ("snapshot", "round", "step", "layout", "total_bytes", "piece_bytes", "piece_digests", "held_out_loss")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_LOSS_FIELD_NUMBER: _ClassVar[int]
    snapshot: str
    round: int
    step: int
    layout: str
    total_bytes: int
    piece_bytes: int
    piece_digests: bytes
    held_out_loss: float
    def __init__(self, snapshot: _Optional[str] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., layout: _Optional[str] = ..., total_bytes: _Optional[int] = ..., piece_bytes: _Optional[int] = ..., piece_digests: _Optional[bytes] = ..., held_out_loss: _Optional[float] = ...) -> None: ...

class StatePiece(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
