from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.proto import stage_pb2
from peerloom.protocol.codec_stage import decode_stage, encode_stage
from peerloom.protocol.errors import LimitExceeded, MalformedMessage, ProtocolError
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.messages import Chunk, PayloadEnd, StreamEnd
from peerloom.protocol.stage_messages import (
    Activation,
    Beat,
    Copy,
    Credit,
    Gradient,
    Kept,
    Score,
    StageMessage,
    StageOpen,
    StageOpened,
)

MB = Microbatch(lane=2**48 - 1, index=2**40)
MESSAGES: list[StageMessage | StreamEnd] = [
    StageOpen("run", 3),
    StageOpen("keep", 0),
    StageOpened(),
    Activation(MB, 7, (4, 128, 64), "bf16"),
    Activation(Microbatch(0, 0, True), 0, (1, 2, 3), "fp32"),
    Gradient(MB, 7, (4, 128, 64), "fp32", 2.5),
    Chunk(12, b"abc"),
    PayloadEnd(b"d" * 16),
    Score(Microbatch(1, 2, True), 9, 3.25),
    Credit(4),
    Beat(True),
    Beat(False),
    Copy(2, 150, (("theta.safetensors", 2**35), ("meta.json", 90))),
    Kept(),
    StreamEnd("LinkError", "gone"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_each_message_comes_back(message: StageMessage | StreamEnd) -> None:
    assert decode_stage(encode_stage(message)) == message


def tensor(**fields: object) -> stage_pb2.StageEnvelope:
    given = {"microbatch": stage_pb2.MicrobatchId(), "shape": [1, 2, 3], "encoding": "fp32", **fields}
    return stage_pb2.StageEnvelope(activation=stage_pb2.StageTensor(**given))  # type: ignore[arg-type]


BAD: list[tuple[stage_pb2.StageEnvelope, type[ProtocolError]]] = [
    (stage_pb2.StageEnvelope(), MalformedMessage),
    (stage_pb2.StageEnvelope(open=stage_pb2.StageOpen(purpose="steal")), MalformedMessage),
    (stage_pb2.StageEnvelope(open=stage_pb2.StageOpen(purpose="run", stage=256)), MalformedMessage),
    (tensor(encoding="int8"), MalformedMessage),
    (tensor(version=-1), MalformedMessage),
    (tensor(shape=[-1]), MalformedMessage),
    (tensor(shape=[1] * 5), LimitExceeded),
    (tensor(microbatch=stage_pb2.MicrobatchId(index=-1)), MalformedMessage),
    (tensor(microbatch=stage_pb2.MicrobatchId(lane=-1)), MalformedMessage),
    (stage_pb2.StageEnvelope(gradient=stage_pb2.StageTensor(encoding="fp32", loss=float("nan"))), MalformedMessage),
    (stage_pb2.StageEnvelope(credit=stage_pb2.StageCredit(count=2**40)), MalformedMessage),
    (stage_pb2.StageEnvelope(copy=stage_pb2.StageCopy(files=[stage_pb2.StageFile(name="a")] * 9)), LimitExceeded),
    (stage_pb2.StageEnvelope(copy=stage_pb2.StageCopy(files=[stage_pb2.StageFile(size=-1)])), MalformedMessage),
]


@pytest.mark.parametrize(("envelope", "error"), BAD)
def test_what_is_out_of_range_is_refused(envelope: stage_pb2.StageEnvelope, error: type[ProtocolError]) -> None:
    with pytest.raises(error):
        decode_stage(envelope.SerializeToString())


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        decode_stage(data)
    except ProtocolError:
        return
