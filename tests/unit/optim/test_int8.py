"""int8 by blocks: exact lengths, a bounded and unbiased error, equal decoding, and what is refused."""

from __future__ import annotations

import math
import re
import struct
import sys

import pytest
import torch

from peerloom.optim import int8
from peerloom.optim.encode import count_non_finite, decode, encode, encoded_bytes
from peerloom.optim.int8 import BLOCK, Dither
from tests.unit.optim.memory import shared

from .conftest import Draw

DITHER = Dither(seed=1, round=2, sender="a")


@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 1000, 65536 + 130])
def test_lengths_are_exact_and_tell_the_number(numel: int) -> None:
    raw = encode(torch.ones(numel), "int8", dither=DITHER)
    assert raw.numel() == encoded_bytes(numel, "int8") == numel + 4 * math.ceil(numel / 128)
    assert int8.numel_of(raw.numel()) == numel
    torch.testing.assert_close(decode(raw, "int8"), torch.ones(numel), atol=1e-6, rtol=0)


def test_a_number_is_its_int8_times_the_scale_of_its_block() -> None:
    y = torch.full((130,), 2.0)
    y[128:] = torch.tensor([-127.0, 64.0])
    raw = bytes(encode(y, "int8", dither=DITHER).tolist())
    assert struct.unpack("<ff", raw[:8]) == (struct.unpack("<f", struct.pack("<f", 2 / 127))[0], 1.0)
    assert struct.unpack("<130b", raw[8:]) == (127,) * 128 + (-127, 64)


def test_the_error_is_under_a_step(draw: Draw) -> None:
    y = draw(10_000, dtype=torch.float32) * torch.logspace(-20, 20, 10_000)
    error = (decode(encode(y, "int8", dither=DITHER), "int8") - y).abs()
    steps = torch.nn.functional.pad(y, (0, -y.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1) / 127
    assert bool((error <= 1.0001 * steps.repeat_interleave(BLOCK)[: y.numel()]).all())


def test_rounding_keeps_the_mean(draw: Draw) -> None:
    """Over 3,000 rounds, 640 numbers: each mean within its standard error as often as a normal one would be."""
    y, rounds = draw(640, dtype=torch.float32), 3000
    total = torch.zeros(640, dtype=torch.float64)
    for round in range(rounds):
        total += decode(encode(y, "int8", dither=Dither(1, round, "a")), "int8")
    step = (y.view(-1, BLOCK).abs().amax(1) / 127).repeat_interleave(BLOCK).double()
    fraction = (y.double() / step) % 1
    deviation = step * (fraction * (1 - fraction) / rounds).sqrt()
    z = ((total / rounds - y.double()) / deviation)[deviation > 0.05 * step / math.sqrt(rounds)]
    assert len(z) > 500 and z.abs().max().item() < 4.5
    assert z.std().item() == pytest.approx(1.0, abs=0.1) and abs(z.mean().item()) * math.sqrt(len(z)) < 4


def test_rounding_differs_by_seed_round_sender_and_place_and_repeats_otherwise() -> None:
    y = torch.full((2 * int8._CHUNK,), 0.3)
    y[::BLOCK] = 1.0
    first = encode(y, "int8", dither=DITHER)
    assert torch.equal(first, encode(y, "int8", dither=DITHER))
    for other in (Dither(2, 2, "a"), Dither(1, 3, "a"), Dither(1, 2, "b")):
        assert (first != encode(y, "int8", dither=other)).float().mean().item() > 0.05
    numbers = decode(first, "int8").view(2, -1)
    assert not torch.equal(numbers[0], numbers[1])


def test_the_random_numbers_are_even_and_uncorrelated() -> None:
    u = torch.stack([int8._uniform(int8._CHUNK, DITHER, k, torch.device("cpu")) for k in (0, 1)]).double()
    assert bool(((u > 0) & (u < 1)).all())
    counts = torch.histc(u, bins=64, min=0, max=1)
    expected = u.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum().item() < 110  # 63 degrees of freedom, once in four thousand
    lagged = [torch.stack([u[0, :-lag], u[0, lag:]]) for lag in (1, 2, 128)] + [u]
    assert all(abs(torch.corrcoef(pair)[0, 1].item()) < 0.02 for pair in lagged)


def test_tiny_and_zero_blocks_become_zeros() -> None:
    y = torch.cat([torch.zeros(128), torch.full((128,), 1e-40), torch.full((128,), -3.4e38)])
    back = decode(encode(y, "int8", dither=DITHER), "int8")
    assert bool((back[:256] == 0).all())
    torch.testing.assert_close(back[256:], y[256:], rtol=1e-6, atol=0)
    assert bool(back.isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 127, 130])
def test_non_finite_numbers_are_refused_when_encoding_and_counted_when_decoding(bad: float, place: int) -> None:
    y = torch.ones(131)
    y[place] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        encode(y, "int8", dither=DITHER)
    raw = encode(torch.ones(131), "int8", dither=DITHER)
    assert count_non_finite(raw, "int8") == 0
    raw[: 2 * 4].view(torch.float32)[place // BLOCK] = bad
    assert count_non_finite(raw, "int8") == (128 if place < BLOCK else 3)
    assert count_non_finite(encode(torch.zeros(0), "int8", dither=DITHER), "int8") == 0


def test_a_big_endian_machine_writes_and_reads_the_same_bytes(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    y = draw(300, dtype=torch.float32)
    little = encode(y, "int8", dither=DITHER)
    monkeypatch.setattr(sys, "byteorder", "big")  # then this machine's order is taken for the reverse
    swapped = encode(y, "int8", dither=DITHER)
    assert torch.equal(swapped[:12].view(3, 4).flip(1).reshape(-1), little[:12])
    assert torch.equal(swapped[12:], little[12:])
    kept, expected = swapped.clone(), decode(swapped, "int8")
    monkeypatch.undo()
    assert torch.equal(expected, decode(little, "int8")) and torch.equal(swapped, kept)


def test_shared_memory_and_refusals() -> None:
    y, raw = torch.ones(200), shared(4 + encoded_bytes(200, "int8"), torch.uint8)
    assert encode(y, "int8", raw[4:], DITHER).data_ptr() == raw[4:].data_ptr()
    out = torch.empty(200)
    assert decode(raw[4:], "int8", out) is out and torch.equal(out, decode(raw[4:], "int8"))
    cases = [
        (lambda: encode(y, "int8"), "int8 rounds at random and needs a dither"),
        (lambda: encode(y, "int8", raw, DITHER), "out has 212 bytes; 200 parameters in int8 take 208"),
        (lambda: decode(raw[:4], "int8"), "4 bytes are not a whole int8 encoding"),
        (lambda: decode(raw[2:210], "int8", out), "buf starts at byte 2 of its storage, not on a multiple of 4"),
        (lambda: count_non_finite(raw[: 132 + 3], "int8"), "135 bytes are not a whole int8 encoding"),
        (lambda: decode(raw[4:], "int8", torch.empty(201)), "buf has 208 bytes; 201 parameters in int8 take 209"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
