"""The tunnel's wire: headers, answers, frames."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.protocol import tunnel
from peerloom.protocol.errors import MalformedMessage, PeerError
from peerloom.protocol.tunnel import DeliverFrom, Keep, Offer, OpenTo, Unframer
from peerloom.protocol.types import PeerId

PEER = PeerId("12D3KooW" + "A" * 44)
OFFER = Offer(40_001, bytes(range(240, 256)))
OFFERED = OFFER.port.to_bytes(2, "big") + OFFER.token


@pytest.mark.parametrize("header", [OpenTo(PEER), DeliverFrom(PEER), DeliverFrom(PEER, OFFER), Keep(True), Keep(False)])
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


NO_HEADERS = [b"", b"o", b"x" + PEER.encode(), b"k", b"k2", b"o../..", b"o\xff", b"d" + b"A" * 65]
NO_HEADERS += [b"D", b"D" + OFFERED, b"D" + OFFERED[1:], b"D\0\0" + OFFERED[2:] + PEER.encode()]


@pytest.mark.parametrize("body", NO_HEADERS)
def test_these_are_no_headers(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        tunnel.decode_header(body)


def test_every_answer_comes_back_and_says_why() -> None:
    for answer in tunnel._CODES:
        assert tunnel.decode_answer(tunnel.encode_answer(answer)) == answer
        assert tunnel.is_refusal(answer) == (answer not in ("taken", "moved", "offered"))
    for refusal in tunnel._REFUSALS:
        assert tunnel._SAID[refusal] in str(tunnel.TunnelRefused(PEER, refusal))
    for data in (b"", b"\x7f", b"\x00\x00"):
        with pytest.raises(MalformedMessage):
            tunnel.decode_answer(data)


def test_an_offer_comes_back_behind_its_answer() -> None:
    data = tunnel.encode_answer("offered", OFFER)
    assert tunnel.decode_answer(data[:1]) == "offered" and tunnel.decode_offer(data[1:]) == OFFER
    for bad in (b"", data[1:-1], data[1:] + b"x", b"\0\0" + data[3:]):
        with pytest.raises(MalformedMessage):
            tunnel.decode_offer(bad)


def test_a_greeting_shows_the_token_and_is_not_bytes_of_the_relays_choice() -> None:
    assert len(OFFER.greeting) == tunnel.GREETING_BYTES
    assert OFFER.token not in OFFER.greeting and OFFER.greeting != Offer(OFFER.port, bytes(16)).greeting


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
