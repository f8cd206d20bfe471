"""Encodings: exact bytes, rounding, non-finite numbers, shared memory and refusals."""

from __future__ import annotations

import re
import struct
import sys

import pytest
import torch

from peerloom.optim import encode as module
from peerloom.optim.encode import Encoding, count_non_finite, decode, encode, encoded_bytes
from tests.unit.optim.memory import shared

from .conftest import Draw


def bits(pattern: int) -> torch.Tensor:
    """One fp32 number from its bit pattern."""
    return torch.tensor([struct.unpack("<i", struct.pack("<I", pattern))[0]], dtype=torch.int32).view(torch.float32)


def test_fp32_is_little_endian_ieee_and_exact(draw: Draw) -> None:
    values = [0.0, -0.0, 1.0, -2.5, 3.4e38, 1e-45, float("inf"), float("-inf")]
    raw = encode(torch.tensor(values), "fp32")
    assert bytes(raw.tolist()) == struct.pack("<8f", *values)
    y = draw(1000, dtype=torch.float32)
    assert torch.equal(decode(encode(y, "fp32"), "fp32"), y)


def test_fp32_keeps_the_payload_of_a_nan() -> None:
    assert bytes(encode(bits(0xFFC12345), "fp32").tolist()) == bytes.fromhex("4523c1ff")


@pytest.mark.parametrize(
    ("fp32", "bf16"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # a tie goes to the even 0x3F80
        (0x3F818000, 0x3F82),  # a tie goes to the even 0x3F82
        (0x3F808001, 0x3F81),  # just over a tie
        (0x3F807FFF, 0x3F80),  # just under a tie
        (0x80000000, 0x8000),  # -0
        (0x00018000, 0x0002),  # a subnormal tie
        (0x7F7FFFFF, 0x7F80),  # the largest fp32 is beyond bf16: infinity
        (0xFF800000, 0xFF80),  # -infinity
        (0x7F800001, 0x7FC0),  # a signalling NaN must not turn into infinity
        (0xFFFFFFFF, 0x7FC0),
    ],
)
@pytest.mark.parametrize("length", [1, 67])  # scalar and vector code
def test_bf16_rounds_to_nearest_even(fp32: int, bf16: int, length: int) -> None:
    raw = encode(bits(fp32).expand(length).contiguous(), "bf16")
    assert bytes(raw.tolist()) == struct.pack("<H", bf16) * length


def test_a_nan_among_numbers_becomes_the_one_nan() -> None:
    y = torch.ones(67)
    y[[0, 20, 66]] = bits(0xFFC12345).expand(3)
    patterns = struct.unpack("<67H", bytes(encode(y, "bf16").tolist()))
    assert [k for k, pattern in enumerate(patterns) if pattern != 0x3F80] == [0, 20, 66]
    assert {patterns[k] for k in (0, 20, 66)} == {0x7FC0}


def test_bf16_error_is_at_most_half_a_step(draw: Draw) -> None:
    y = draw(5000, dtype=torch.float32)
    error = (decode(encode(y, "bf16"), "bf16") - y).abs()
    assert bool((error <= y.abs() * 2**-8).all()) and bool((error > 0).any())


def test_decoding_twice_changes_nothing(draw: Draw) -> None:
    once = decode(encode(draw(100, dtype=torch.float32), "bf16"), "bf16")
    assert torch.equal(decode(encode(once, "bf16"), "bf16"), once)


@pytest.mark.parametrize("encoding", ["fp32", "bf16"])
def test_shared_memory_at_an_offset_and_more_than_one_chunk(
    encoding: Encoding, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)
    y = draw(200, dtype=torch.float32)
    y[[3, 70, 199]] = float("nan")
    y[71] = float("inf")
    memory = shared(16 + encoded_bytes(200, encoding), torch.uint8)
    assert encode(y, encoding, memory[16:]).data_ptr() == memory[16:].data_ptr()
    out = torch.empty(200)
    assert decode(memory[16:], encoding, out) is out
    assert torch.equal(out.isnan(), y.isnan()) and bool(out[71].isinf())
    assert torch.allclose(out, y, rtol=2**-8, atol=0, equal_nan=True)
    assert count_non_finite(memory[16:], encoding) == 4 and count_non_finite(memory[:16], encoding) == 0


@pytest.mark.parametrize("encoding", ["fp32", "bf16"])
def test_a_big_endian_machine_writes_and_reads_the_same_bytes(
    encoding: Encoding, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = draw(9, dtype=torch.float32)
    little = encode(y, encoding)
    monkeypatch.setattr(sys, "byteorder", "big")  # then this machine's order is taken for the reverse
    swapped = encode(y, encoding)
    size = encoded_bytes(1, encoding)
    assert torch.equal(swapped.view(-1, size).flip(1).reshape(-1), little)
    kept = swapped.clone()
    assert torch.equal(decode(swapped, encoding), decode(encode(y, encoding), encoding))
    assert count_non_finite(swapped, encoding) == 0 and torch.equal(swapped, kept)


def test_lengths() -> None:
    assert (encoded_bytes(10, "fp32"), encoded_bytes(10, "bf16"), encoded_bytes(0, "fp32")) == (40, 20, 0)


def test_refusals() -> None:
    y, raw = torch.zeros(4), torch.zeros(16, dtype=torch.uint8)
    cases = [
        (lambda: encoded_bytes(1, "int4"), "unknown encoding 'int4'; it must be one of fp32, bf16"),  # type: ignore[arg-type]
        (lambda: encode(y.double(), "fp32"), "y must be flat, contiguous and torch.float32"),
        (lambda: encode(y.view(2, 2), "fp32"), "not torch.float32 of shape (2, 2)"),
        (lambda: encode(y, "bf16", raw), "out has 16 bytes; 4 parameters in bf16 take 8"),
        (lambda: encode(y, "fp32", y), "out must be flat, contiguous and torch.uint8"),
        (lambda: decode(raw, "fp32", torch.zeros(3)), "buf has 16 bytes; 3 parameters in fp32 take 12"),
        (lambda: decode(raw[:15], "fp32"), "buf has 15 bytes; 3 parameters in fp32 take 12"),
        (lambda: decode(raw[1:9], "bf16"), "buf starts at byte 1 of its storage, not on a multiple of 2"),
        (lambda: count_non_finite(raw[:3], "bf16"), "buf has 3 bytes"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
