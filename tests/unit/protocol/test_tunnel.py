"""The tunnel's wire: headers, answers, frames."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.protocol import tunnel
from peerloom.protocol.errors import MalformedMessage, PeerError
from peerloom.protocol.tunnel import DeliverFrom, Keep, OpenTo, Unframer
from peerloom.protocol.types import PeerId

PEER = PeerId("12D3KooW" + "A" * 44)


@pytest.mark.parametrize("header", [OpenTo(PEER), DeliverFrom(PEER), Keep(True), Keep(False)])
def test_a_header_comes_back(header: tunnel.Header) -> None:
    data = tunnel.encode_header(header)
    assert data[0] == len(data) - 1 <= tunnel.MAX_HEADER_BYTES
    assert tunnel.decode_header(data[1:]) == header


@given(st.binary(max_size=80))
def test_a_header_that_is_none_is_refused(data: bytes) -> None:
    try:
        header = tunnel.decode_header(data)
    except PeerError:
        return
    assert tunnel.encode_header(header)[1:] == data


@pytest.mark.parametrize("body", [b"", b"o", b"x" + PEER.encode(), b"k", b"k2", b"o../..", b"o\xff", b"d" + b"A" * 65])
def test_these_are_no_headers(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        tunnel.decode_header(body)


def test_every_answer_comes_back_and_says_why() -> None:
    assert tunnel.decode_answer(tunnel.encode_answer(None)) is None
    for refusal in tunnel._REFUSALS:
        assert tunnel.decode_answer(tunnel.encode_answer(refusal)) == refusal
        assert tunnel._SAID[refusal] in str(tunnel.TunnelRefused(PEER, refusal))
    for data in (b"", b"\x7f", b"\x00\x00"):
        with pytest.raises(MalformedMessage):
            tunnel.decode_answer(data)


def framed(*parts: bytes) -> bytes:
    return b"".join(tunnel.frame_head(len(part)) + part for part in parts) + tunnel.END


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.integers(0, 2**32))
def test_frames_come_apart_however_they_are_cut(parts: list[bytes], seed: int) -> None:
    data, rng, found, unframer = framed(*parts), random.Random(seed), b"", Unframer()
    while data:
        assert not unframer.ended
        size = rng.randint(1, 9)
        found += b"".join(unframer.feed(data[:size]))
        data = data[size:]
    assert unframer.ended and found == b"".join(parts)


def test_a_frame_too_large_and_bytes_past_the_end_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="limit"):
        Unframer().feed(tunnel.frame_head(tunnel.MAX_FRAME_BYTES + 1))
    with pytest.raises(MalformedMessage, match="after the end"):
        Unframer().feed(tunnel.END + b"x")


def test_a_frame_may_go_another_way_between_two_heads() -> None:
    unframer = tunnel.Unframer()
    assert (unframer.left, unframer.head_left) == (0, 4)
    assert unframer.feed(tunnel.frame_head(5)[:3]) == [] and (unframer.left, unframer.head_left) == (0, 1)
    assert unframer.feed(tunnel.frame_head(5)[3:]) == [] and unframer.left == 5
    unframer.skip(3)
    assert [bytes(piece) for piece in unframer.feed(b"45" + tunnel.END)] == [b"45"]
    assert unframer.ended and unframer.left == 0
