"""Which relays are chosen, kept, passed over."""

from __future__ import annotations

import random
from typing import Any

from peerloom.protocol.relay_choice import FIRST_BAN_S, LIMIT, RelayBook
from peerloom.protocol.types import PeerId, PeerRecord

A, B, C, D = (PeerId(name) for name in "abcd")
NONE: frozenset[PeerId] = frozenset()


def record(peer: PeerId, **changes: Any) -> PeerRecord:
    fields: dict[str, Any] = {"reach": "direct", "relays": True} | changes
    common: dict[str, Any] = {"name": "", "role": "trainer", "addresses": (), "cert_der": b"", "version": ""}
    return PeerRecord(peer_id=peer, instance="", started_at=0.0, issued_at=0.0, **(common | fields))


def book(**latency_s: float) -> RelayBook:
    made = RelayBook(random.Random(0))
    for peer, seconds in latency_s.items():
        made.measured(PeerId(peer), seconds, 0.0)
    return made


def test_two_of_the_nearest_that_can_be_dialled_and_offer_it() -> None:
    made = book(a=0.2, b=0.02, c=0.03, d=0.001)
    records = [record(A), record(B), record(C), record(D, relays=False)]
    assert made.choose(records, (), NONE, 0.0) == (B, C)
    assert made.choose([record(A, reach="via"), record(B, reach="unknown")], (), NONE, 0.0) == ()


def test_a_full_relay_counts_as_far() -> None:
    made = book(a=0.02, b=0.05)
    made.measured(A, 0.02, 1.0)
    assert made.order((A, B), 0.0) == (B, A)


def test_those_kept_stay_unless_others_are_far_better() -> None:
    made = book(a=0.05, b=0.05, c=0.04)
    records = [record(peer) for peer in (A, B, C)]
    assert made.choose(records, (A, B), NONE, 0.0) == (A, B)
    for _ in range(20):
        made.measured(A, 0.3, 0.0)
    assert made.choose(records, (A, B), NONE, 0.0) == (C, B)


def test_one_whose_record_is_late_stays_and_one_that_broke_off_goes() -> None:
    made, records = book(), [record(B)]
    assert made.choose(records, (A,), NONE, 0.0) == (A, B)
    assert made.choose(records, (A,), frozenset({A}), 0.0) == (B,)
    assert made.choose([record(A, relays=False), record(B)], (A,), NONE, 0.0) == (B,)


def test_faults_put_a_relay_last_then_out_of_use_longer_each_time() -> None:
    made = book(a=0.01, b=0.1)
    made.fault(A, "broken", 0.0)
    assert made.order((A, B), 0.0) == (B, A)
    assert made.order((A, B), 3600.0) == (A, B), "an occasional slip is forgotten"
    banned, lengths, now = 0.0, [], 10_000.0
    for _ in range(2):
        while not made.fault(A, "corrupt", now):
            pass
        banned = now
        while made.left_alone(A, now):
            now += 1.0
        lengths.append(now - banned)
    assert lengths == [FIRST_BAN_S, 2 * FIRST_BAN_S]


def test_one_left_alone_is_not_chosen_and_not_measured_but_still_tried_last() -> None:
    made, records = book(), [record(A), record(B)]
    for _ in range(int(LIMIT)):
        made.fault(A, "refused", 0.0)
    assert made.choose(records, (A,), NONE, 1.0) == (B,)
    assert made.candidates(records, (), 1.0) == (B,)
    assert made.order((A, B), 1.0) == (B, A)


def test_a_cut_of_our_own_is_no_fault_of_theirs() -> None:
    made = book()
    for second in range(1000):
        assert not made.fault(A, "gone", float(second))
    assert made.choose([record(A)], (), NONE, 1000.0) == (A,)


def test_what_says_nothing_is_forgotten() -> None:
    made = book(a=0.1, b=0.1)
    made.fault(B, "corrupt", 0.0)
    made.forget([C], 1.0)
    assert set(made._relays) == {B}
    made.forget([C], 10_000.0)
    assert not made._relays
