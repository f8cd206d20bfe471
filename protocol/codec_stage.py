"""The messages of Stage.Run to and from protobuf, checked as in `codec.py`."""

from __future__ import annotations

from typing import cast

from peerloom.proto import gossip_pb2, stage_pb2
from peerloom.protocol import checks, limits
from peerloom.protocol.codec_base import parse, serialize
from peerloom.protocol.codec_chunk import checked_chunk, read_chunk, written_chunk
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.messages import Chunk, PayloadEnd, StreamEnd
from peerloom.protocol.spec_pipeline import ActivationEncoding
from peerloom.protocol.stage_messages import (
    Activation,
    Beat,
    Copy,
    Credit,
    Gradient,
    Kept,
    Purpose,
    Score,
    StageMessage,
    StageOpen,
    StageOpened,
)

MAX_LANE = (1 << 53) - 1
MAX_DIMENSIONS = 4
MAX_FILES = 8
MAX_CREDIT = 1 << 20


def encode_stage(message: StageMessage | StreamEnd) -> bytes:
    """One envelope of Stage.Run."""
    if isinstance(message, Chunk):
        return written_chunk(message)  # its field has the number that it has in Gossip.Exchange
    return serialize(_envelope(message))


def decode_stage(data: bytes) -> StageMessage | StreamEnd:
    """The message in an envelope of Stage.Run; a chunk's data may be a view of `data`."""
    if (chunk := read_chunk(data)) is not None:
        return chunk
    envelope = parse(stage_pb2.StageEnvelope, data)
    match envelope.WhichOneof("message"):
        case "open":
            purpose = cast(Purpose, checks.one_of("purpose", envelope.open.purpose, Purpose))
            return StageOpen(purpose, _stage(envelope.open.stage))
        case "opened":
            return StageOpened()
        case "activation":
            return Activation(*_tensor(envelope.activation))
        case "gradient":
            return Gradient(*_tensor(envelope.gradient), checks.finite("loss", envelope.gradient.loss))
        case "chunk":
            return checked_chunk(envelope.chunk.offset, envelope.chunk.data)
        case "payload_end":
            return PayloadEnd(checks.octets("digest", envelope.payload_end.digest, limits.LINK_DIGEST_BYTES))
        case "score":
            score = envelope.score
            version = checks.position("version", score.version)
            return Score(_microbatch(score.microbatch), version, checks.finite("loss", score.loss))
        case "credit":
            return Credit(checks.whole("credit", envelope.credit.count, MAX_CREDIT))
        case "beat":
            return Beat(envelope.beat.waiting)
        case "copy":
            return _copy(envelope.copy)
        case "kept":
            return Kept()
        case "end":
            error = checks.text("error", envelope.end.error, limits.MAX_NAME_CHARS)
            return StreamEnd(error, checks.text("detail", envelope.end.detail, limits.MAX_ERROR_CHARS))
    raise MalformedMessage("a stage envelope holds no message known here")


def _envelope(message: StageMessage | StreamEnd) -> stage_pb2.StageEnvelope:
    envelope = stage_pb2.StageEnvelope
    match message:
        case StageOpen(purpose, stage):
            return envelope(open=stage_pb2.StageOpen(purpose=purpose, stage=stage))
        case StageOpened():
            return envelope(opened=stage_pb2.StageOpened())
        case Activation():
            return envelope(activation=_tensor_message(message))
        case Gradient():
            return envelope(gradient=_tensor_message(message, message.loss))
        case PayloadEnd(digest):
            return envelope(payload_end=gossip_pb2.PayloadEnd(digest=digest))
        case Score(microbatch, version, loss):
            score = stage_pb2.StageScore(microbatch=_id_message(microbatch), version=version, loss=loss)
            return envelope(score=score)
        case Credit(count):
            return envelope(credit=stage_pb2.StageCredit(count=count))
        case Beat(waiting):
            return envelope(beat=stage_pb2.StageBeat(waiting=waiting))
        case Copy(stage, update, files):
            listed = [stage_pb2.StageFile(name=name, size=size) for name, size in files]
            return envelope(copy=stage_pb2.StageCopy(stage=stage, update=update, files=listed))
        case Kept():
            return envelope(kept=stage_pb2.StageKept())
        case StreamEnd(error, text):
            return envelope(end=gossip_pb2.End(error=error, detail=checks.shown(text, limits.MAX_ERROR_CHARS)))
    raise TypeError(f"{type(message).__name__} is no message of Stage.Run")


def _id_message(microbatch: Microbatch) -> stage_pb2.MicrobatchId:
    return stage_pb2.MicrobatchId(lane=microbatch.lane, index=microbatch.index, held_out=microbatch.held_out)


def _tensor_message(message: Activation | Gradient, loss: float = 0.0) -> stage_pb2.StageTensor:
    return stage_pb2.StageTensor(
        microbatch=_id_message(message.microbatch),
        version=message.version,
        shape=message.shape,
        encoding=message.encoding,
        loss=loss,
    )


def _stage(value: int) -> int:
    return checks.whole("stage", value, limits.MAX_STAGES - 1)


def _microbatch(message: stage_pb2.MicrobatchId) -> Microbatch:
    return Microbatch(
        checks.whole("lane", message.lane, MAX_LANE),
        checks.position("microbatch", message.index),
        message.held_out,
    )


def _tensor(message: stage_pb2.StageTensor) -> tuple[Microbatch, int, tuple[int, ...], ActivationEncoding]:
    limits.check_number_of("dimensions", len(message.shape), MAX_DIMENSIONS)
    return (
        _microbatch(message.microbatch),
        checks.position("version", message.version),
        tuple(checks.whole("dimension", size) for size in message.shape),
        cast(ActivationEncoding, checks.one_of("encoding", message.encoding, ActivationEncoding)),
    )


def _copy(message: stage_pb2.StageCopy) -> Copy:
    limits.check_number_of("files", len(message.files), MAX_FILES)
    files = tuple(
        (
            checks.text("file name", file.name, limits.MAX_NAME_CHARS, empty=False),
            checks.whole("file's bytes", file.size, limits.MAX_PAYLOAD_BYTES),
        )
        for file in message.files
    )
    return Copy(_stage(message.stage), checks.position("update", message.update), files)
