"""What a peer's payload may hold, in each encoding."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from peerloom.node.payload import INT8_BLOCK, MAX_MAGNITUDE, IncomingPayload, Pace, outgoing, scale_bytes
from peerloom.optim import int8
from peerloom.optim.encode import encode
from peerloom.optim.int8 import Dither
from peerloom.protocol.errors import BadPayload, MalformedMessage
from peerloom.protocol.messages import Chunk
from peerloom.protocol.types import Encoding

ENCODINGS: list[Encoding] = ["fp32", "bf16", "int8"]


def encoded(values: torch.Tensor, encoding: Encoding) -> bytes:
    return encode(values, encoding, dither=Dither(1, 2, "me")).numpy().tobytes()


def take(payload: bytes, encoding: Encoding, chunk_bytes: int) -> bytearray:
    into = bytearray(len(payload))
    incoming = IncomingPayload(memoryview(into), encoding)
    for message in outgoing(memoryview(payload), Pace(chunk_bytes)):
        if isinstance(message, Chunk):
            incoming.add(message)
        else:
            incoming.end(message)
    assert incoming.complete
    return into


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 9_000, 8_192])
def test_what_is_sent_arrives(encoding: Encoding, chunk_bytes: int) -> None:
    payload = encoded(torch.linspace(-MAX_MAGNITUDE, MAX_MAGNITUDE, 300_000), encoding)
    assert take(payload, encoding, chunk_bytes) == payload


@pytest.mark.parametrize("encoding", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e6, -1e6, 66_000.0])
@pytest.mark.parametrize("where", [0, 777, 1499])
def test_bad_numbers_are_refused(encoding: Encoding, value: float, where: int) -> None:
    values = torch.ones(1500)
    values[where] = value
    with pytest.raises(BadPayload, match="beyond 65536" if math.isfinite(value) else "non-finite"):
        take(encoded(values, encoding), encoding, 1 << 20)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 517.0, 1e30])
@pytest.mark.parametrize("block", [0, 2047, 2048, 2343])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 8192])
def test_bad_scales_are_refused(scale: float, block: int, chunk_bytes: int) -> None:
    payload = bytearray(encoded(torch.ones(300_000), "int8"))
    payload[4 * block : 4 * block + 4] = struct.pack("<f", scale)
    with pytest.raises(BadPayload, match="beyond 65536|scales that are not finite and positive"):
        take(bytes(payload), "int8", chunk_bytes)


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 1500])
def test_the_scales_are_found_where_the_encoder_puts_them(numel: int) -> None:
    assert INT8_BLOCK == int8.BLOCK
    assert scale_bytes(int8.encoded_bytes(numel), "int8") == int8.encoded_bytes(numel) - numel
    assert scale_bytes(4 * numel, "fp32") == 0


def test_any_int8_is_a_number() -> None:
    payload = struct.pack("<f", 1.0) + np.arange(-128, 0, dtype=np.int8).tobytes()
    assert take(payload, "int8", 1 << 20) == payload


@pytest.mark.parametrize(
    ("encoding", "chunk"), [("fp32", 8194), ("bf16", 8193), ("int8", 8194)], ids=["fp32", "bf16", "int8 scales"]
)
def test_a_chunk_that_ends_within_a_number_is_refused(encoding: Encoding, chunk: int) -> None:
    incoming = IncomingPayload(memoryview(bytearray(528_000)), encoding)
    with pytest.raises(MalformedMessage, match="within a number"):
        incoming.add(Chunk(0, bytes(chunk)))


def test_scales_are_checked_in_every_piece() -> None:
    piece = encode(torch.randn(256), "int8", dither=Dither(1, 0, "a")).numpy().tobytes()
    bad = bytearray(piece)
    bad[:4] = np.float32(np.nan).tobytes()
    for data, fits in ((piece + piece, True), (piece + bytes(bad), False)):
        incoming = IncomingPayload(memoryview(bytearray(len(data))), "int8", (len(piece), len(piece)))
        if fits:
            incoming.add(Chunk(0, data))
        else:
            with pytest.raises(BadPayload, match="not finite"):
                incoming.add(Chunk(0, data))
