"""What moves beside the messages: room is made for it, once, and what is counted elsewhere is left out."""

from __future__ import annotations

import random

import pytest

from peerloom.protocol.beside import LAG_S, MEMORY_S, SETTLED_S, Beside, Rest
from peerloom.protocol.bucket import LEAST_SHARE, SLACK_S, WINDOW_S, Bucket

RATE = 100_000


def passing(bucket: Bucket, now: float) -> float:
    """Bytes a second of messages that pass."""
    bucket.wait_s(RATE, now)
    before = bucket.wait_s(RATE, now)
    return RATE / (bucket.wait_s(0, now) - before)


def test_what_was_seen_keeps_messages_waiting_and_no_longer_than_it_matters() -> None:
    bucket = Bucket(RATE)
    beside = Beside(bucket)
    beside.seen(RATE, 0.0)
    assert bucket.wait_s(0, 0.0) == pytest.approx(1.0 - SLACK_S)
    beside.seen(1000 * RATE, 1.0)
    assert bucket.wait_s(0, 1.0) == pytest.approx(WINDOW_S)


def test_as_much_as_the_largest_burst_is_held_free_while_it_is_remembered_and_half_the_cap_at_most() -> None:
    bucket = Bucket(RATE)
    beside = Beside(bucket)
    beside.seen(RATE, 0.0)
    largest = RATE * (1 - LAG_S / WINDOW_S)
    for now in range(6, 140, 2):
        beside.seen(0, float(now))
        held = largest / WINDOW_S if now <= MEMORY_S else 0.0
        if now <= MEMORY_S or now > 2 * MEMORY_S + 4:
            assert passing(bucket, float(now)) == pytest.approx(RATE - held)
    beside.seen(100 * RATE, 200.0)
    assert passing(bucket, 300.0) == pytest.approx(RATE * (1 - LEAST_SHARE))


def test_what_moves_at_all_times_holds_nothing_free() -> None:
    bucket = Bucket(RATE)
    beside = Beside(bucket)
    for step in range(2000):
        beside.seen(RATE // 20, step / 5)
    assert passing(bucket, 400.0) == pytest.approx(RATE, rel=0.02)


def test_for_what_was_saved_up_nothing_is_held_free() -> None:
    bucket = Bucket(RATE)
    beside = Beside(bucket)
    assert beside.saved(RATE, 0.0) == pytest.approx(1.0 - SLACK_S)
    beside.seen(RATE, 1.5)
    assert bucket.wait_s(0, 1.5) == pytest.approx(1.0 - SLACK_S)  # no 5 s that begin with it hold too much either
    assert passing(bucket, 10.0) == pytest.approx(RATE)
    beside.saved(RATE, 20.0)
    beside.seen(RATE, 40.0)  # it has not come when it was due: this is something else
    assert passing(bucket, 40.0) < 0.9 * RATE


def test_it_is_too_much_only_above_the_cap() -> None:
    beside, uncapped = Beside(Bucket(RATE)), Beside(None)
    for half in range(20):
        for each in (beside, uncapped):
            each.seen(RATE // 2, half / 2)
            assert not each.is_too_much
    beside.seen(1, 9.75)
    uncapped.seen(10**9, 9.75)
    assert beside.is_too_much and not uncapped.is_too_much


@pytest.mark.parametrize("leads", [True, False], ids=["counted as it goes in", "counted as it comes out"])
def test_the_rest_is_what_is_counted_nowhere_else(leads: bool) -> None:
    """Bytes of a part are on their way for a while; in the end every byte of the rest was counted, and no other."""
    rng, rest = random.Random(0), Rest()
    total = part = way = beyond = most = counted = 0
    for step in range(1000):
        moved, other = rng.randrange(10_000) * (step < 900), rng.randrange(1_000)
        arrived = rng.randrange(min(way + moved, 20_000) + 1) if step < 900 else way + moved
        way += moved - arrived
        most = max(most, way)
        part += moved if leads else arrived
        total += (arrived if leads else moved) + other
        beyond += other
        counted += rest.more(total, part, step / 10)
        assert -most - 1_000 <= counted - beyond <= most
    assert counted == pytest.approx(beyond, abs=0 if leads else most)


def test_what_was_counted_and_never_moved_is_forgotten() -> None:
    rest = Rest()
    rest.more(0, 5_000, 0.0)  # went into a tunnel that broke
    assert rest.more(1_000, 5_000, 1.0) == 0
    assert rest.more(1_000, 5_000, 1.0 + SETTLED_S) == 0
    assert rest.more(2_500, 5_000, 2.0 + SETTLED_S) == 1_500
