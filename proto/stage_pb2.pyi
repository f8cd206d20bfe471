from peerloom.proto import gossip_pb2 as _gossip_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageEnvelope(_message.Message):
    __slots__ = ("open", "opened", "activation", "gradient", "chunk", "payload_end", "score", "credit", "beat", "copy", "kept", "end")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_END_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    open: StageOpen
    opened: StageOpened
    activation: StageTensor
    gradient: StageTensor
    chunk: _gossip_pb2.Chunk
    payload_end: _gossip_pb2.PayloadEnd
    score: StageScore
    credit: StageCredit
    beat: StageBeat
    copy: StageCopy
    kept: StageKept
    end: _gossip_pb2.End
    def __init__(self, open: _Optional[_Union[StageOpen, _Mapping]] = ..., opened: _Optional[_Union[StageOpened, _Mapping]] = ..., activation: _Optional[_Union[StageTensor, _Mapping]] = ..., gradient: _Optional[_Union[StageTensor, _Mapping]] = ..., chunk: _Optional[_Union[_gossip_pb2.Chunk, _Mapping]] = ..., payload_end: _Optional[_Union[_gossip_pb2.PayloadEnd, _Mapping]] = ..., score: _Optional[_Union[StageScore, _Mapping]] = ..., credit: _Optional[_Union[StageCredit, _Mapping]] = ..., beat: _Optional[_Union[StageBeat, _Mapping]] = ..., copy: _Optional[_Union[StageCopy, _Mapping]] = ..., kept: _Optional[_Union[StageKept, _Mapping]] = ..., end: _Optional[_Union[_gossip_pb2.End, _Mapping]] = ...) -> None: ...

class StageOpen(_message.Message):
    __slots__ = ("purpose", "stage")
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    purpose: str
    stage: int
    def __init__(self, purpose: _Optional[str] = ..., stage: _Optional[int] = ...) -> None: ...

class StageOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MicrobatchId(_message.Message):
    __slots__ = ("lane", "index", "held_out")
    LANE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    lane: int
    index: int
    held_out: bool
    def __init__(self, lane: _Optional[int] = ..., index: _Optional[int] = ..., held_out: bool = ...) -> None: ...

class StageTensor(_message.Message):
    __slots__ = ("microbatch", "version", "shape", "encoding", "loss")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    version: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    encoding: str
    loss: float
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., version: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., encoding: _Optional[str] = ..., loss: _Optional[float] = ...) -> None: ...

class StageScore(_message.Message):
    __slots__ = ("microbatch", "version", "loss")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    microbatch: MicrobatchId
    version: int
    loss: float
    def __init__(self, microbatch: _Optional[_Union[MicrobatchId, _Mapping]] = ..., version: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class StageCredit(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class StageBeat(_message.Message):
    __slots__ = ("waiting",)
    WAITING_FIELD_NUMBER: _ClassVar[int]
    waiting: bool
    def __init__(self, waiting: bool = ...) -> None: ...

class StageCopy(_message.Message):
    __slots__ = ("stage", "update", "files")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    update: int
    files: _containers.RepeatedCompositeFieldContainer[StageFile]
    def __init__(self, stage: _Optional[int] = ..., update: _Optional[int] = ..., files: _Optional[_Iterable[_Union[StageFile, _Mapping]]] = ...) -> None: ...

class StageFile(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class StageKept(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
