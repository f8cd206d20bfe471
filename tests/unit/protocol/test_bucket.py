"""The cap on bytes a second: exact in any window, in order, and fair to small messages."""

from __future__ import annotations

import random

import pytest

from peerloom.protocol.bucket import LEAST_CAP, SLACK_S, Bucket, agreed_bytes, slice_bytes
from peerloom.protocol.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES


def passes(rate: int, sizes: list[int], start: float = 100.0) -> list[tuple[float, int]]:
    """When each message passes, asked for as soon as the one before has."""
    bucket, now, passed = Bucket(rate), start, []
    for size in sizes:
        now += bucket.wait_s(size, now)
        passed.append((now, size))
    return passed


@pytest.mark.parametrize("rate", [LEAST_CAP, 1_000_000, 123_456_789])
def test_no_window_of_five_seconds_holds_five_percent_too_much_or_too_little(rate: int) -> None:
    passed = passes(rate, [slice_bytes(rate)] * int(30 * rate / slice_bytes(rate)))
    assert passed[-1][0] - passed[0][0] > 29
    for begin, _ in passed:
        if begin + 5 > passed[-1][0]:
            break
        inside = sum(size for at, size in passed if begin <= at < begin + 5)
        assert 0.95 * 5 * rate <= inside <= 1.05 * 5 * rate


def test_an_idle_time_earns_no_more_than_the_slack() -> None:
    bucket = Bucket(1000)
    assert bucket.wait_s(500, 0.0) == 0.0
    assert bucket.wait_s(500, 60.0) == 0.0
    assert bucket.wait_s(500, 60.0) == pytest.approx(0.5 - SLACK_S)


def test_a_late_timer_is_made_up_for() -> None:
    rate, size, rng = 1_000_000, 100_000, random.Random(0)
    bucket, now = Bucket(rate), 0.0
    for _ in range(1000):
        now += bucket.wait_s(size, now) + rng.uniform(0.0, SLACK_S * 0.9)
    assert now == pytest.approx(1000 * size / rate, rel=0.01)


def test_a_small_message_waits_for_one_slice_of_each_stream_only() -> None:
    rate = 100_000
    bucket = Bucket(rate)
    waits = [bucket.wait_s(slice_bytes(rate), 0.0) for _ in range(3)]  # three streams, each with its next chunk
    small = bucket.wait_s(100, 0.0)
    assert waits == sorted(waits)
    assert small <= 3 * slice_bytes(rate) / rate < 0.5


def test_sizes() -> None:
    assert slice_bytes(0) == CHUNK_BYTES == slice_bytes(10**9)
    assert slice_bytes(1_000_001) == 150_000
    assert agreed_bytes(CHUNK_BYTES, 0) == CHUNK_BYTES
    assert agreed_bytes(CHUNK_BYTES, 10_003) == 10_000
    assert agreed_bytes(9_000, 10_003) == 9_000
    assert agreed_bytes(CHUNK_BYTES, 1) == LEAST_CHUNK_BYTES  # nobody has us cut a payload into crumbs


@pytest.mark.parametrize("rate", [0, -1])
def test_a_cap_is_positive(rate: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        Bucket(rate)
