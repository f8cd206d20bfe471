"""Whom a node may pair with, and how faults take a peer out of sight for a while."""

from __future__ import annotations

from typing import Any

import pytest

from peerloom.protocol.events import PeerSeen
from peerloom.protocol.membership import (
    FIRST_BAN_S,
    FORGIVEN_AFTER_S,
    HALF_LIFE_S,
    LONGEST_BAN_S,
    WORSE_STATE,
    Membership,
    ban_length,
    decayed,
)
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId, PeerRecord

ME, A, B = PeerId("me"), PeerId("a"), PeerId("b")


def record(peer: PeerId, **changes: Any) -> PeerRecord:
    base: dict[str, Any] = {
        "peer_id": peer,
        "name": str(peer),
        "role": "trainer",
        "addresses": ("127.0.0.1:1",),
        "cert_der": b"",
        "version": "0.1.0",
        "instance": "00",
        "started_at": 0.0,
        "issued_at": 0.0,
        "state": "training",
        "layout_digest": "L",
        "init_digest": "I",
    }
    return PeerRecord(**(base | changes))


@pytest.fixture
def membership() -> Membership:
    made = Membership(ME, GaslocSpec())
    made.set_layout("L")
    return made


def test_the_live_view_is_ordered_and_leaves_this_node_out(membership: Membership) -> None:
    assert membership.update([record(B, round=3), record(ME), record(A, round=5)], 0.0)
    assert membership.live(0.0) == (PeerSeen(A, 5), PeerSeen(B, 3))
    assert membership.reason_excluded(A, 0.0) == ""
    assert membership.reason_excluded(ME, 0.0) == "is this node itself"
    assert membership.reason_excluded(PeerId("c"), 0.0) == "has no live record"


def test_update_tells_whether_the_view_changed(membership: Membership) -> None:
    assert not membership.update([], 0.0)
    assert membership.update([record(A)], 0.0)
    assert not membership.update([record(A, tokens=5)], 0.0)
    assert membership.update([record(A, round=1)], 0.0)
    assert membership.update([], 0.0)


@pytest.mark.parametrize("state", ["training", "seeking", "exchanging"])
def test_states_that_pair(membership: Membership, state: str) -> None:
    membership.update([record(A, state=state)], 0.0)
    assert membership.live(0.0) == (PeerSeen(A, 0),)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "starting"}, "is starting"),
        ({"state": "fetching", "reason": "the swarm is ahead"}, "is fetching: the swarm is ahead"),
        ({"state": "restarting"}, "is restarting"),
        ({"state": "draining"}, "is draining"),
        ({"state": "done"}, "is done"),
        ({"role": "bootstrap"}, "is a bootstrap node, not a trainer"),
        ({"layout_digest": "other"}, "trains a model of another layout"),
        ({"protocol_min": 2, "protocol_max": 3}, "speaks protocol 2 to 3, not 1"),
    ],
)
def test_who_does_not_pair_and_why(membership: Membership, changes: dict[str, Any], words: str) -> None:
    membership.update([record(A, **changes)], 0.0)
    assert membership.live(0.0) == ()
    assert membership.reason_excluded(A, 0.0) == words


def test_nobody_pairs_before_our_own_model_is_built() -> None:
    membership = Membership(ME, GaslocSpec())
    membership.update([record(A)], 0.0)
    assert membership.live(0.0) == ()
    assert "not built yet" in membership.reason_excluded(A, 0.0)
    membership.set_layout("L")
    assert membership.live(0.0) == (PeerSeen(A, 0),)


def test_repeated_faults_leave_a_peer_alone_longer_each_time(membership: Membership) -> None:
    membership.update([record(A), record(B)], 0.0)
    membership.score(A, "bad_exchange", 0.0)
    assert len(membership.live(0.0)) == 2
    membership.score(A, "bad_exchange", 0.0)
    assert membership.live(0.0) == (PeerSeen(B, 0),)
    assert membership.reason_excluded(A, 0.0) == "is left alone for 30 s after repeated faults"
    assert len(membership.live(FIRST_BAN_S)) == 2
    membership.score(A, "bad_piece", FIRST_BAN_S)
    assert membership.reason_excluded(A, FIRST_BAN_S) == "is left alone for 60 s after repeated faults"


def test_a_state_clearly_worse_leaves_its_donor_alone_at_once(membership: Membership) -> None:
    membership.update([record(A)], 0.0)
    assert not membership.left_alone(A, 0.0)
    membership.score(A, WORSE_STATE, 0.0)
    assert membership.left_alone(A, 1.0)
    assert not membership.left_alone(A, FIRST_BAN_S)


def test_a_ban_that_ends_changes_the_view(membership: Membership) -> None:
    membership.update([record(A)], 0.0)
    membership.score(A, "bad_piece", 0.0)
    assert membership.update([record(A)], 1.0)
    assert membership.update([record(A)], FIRST_BAN_S + 1)


def test_points_fade(membership: Membership) -> None:
    assert decayed(8.0, HALF_LIFE_S) == 4.0
    assert decayed(8.0, -5.0) == 8.0
    membership.update([record(A)], 0.0)
    for i in range(50):  # a slip every half-life adds up to less than twice its weight
        membership.score(A, "bad_exchange", i * HALF_LIFE_S)
        assert membership.live(i * HALF_LIFE_S) == (PeerSeen(A, 0),)


def test_an_unknown_fault_counts_too(membership: Membership) -> None:
    membership.update([record(A)], 0.0)
    for _ in range(3):
        membership.score(A, "something new", 0.0)
    assert membership.live(0.0) == ()


def test_ban_lengths_grow_to_a_limit_and_never_below_three_match_timeouts() -> None:
    assert [ban_length(bans, 1.0) for bans in (1, 2, 3)] == [30.0, 60.0, 120.0]
    assert ban_length(10_000, 1.0) == LONGEST_BAN_S
    assert ban_length(1, 60.0) == 180.0
    assert ban_length(5, 3600.0) == 3 * 3600.0


def test_a_long_quiet_time_makes_the_next_ban_a_first_one(membership: Membership) -> None:
    membership.update([record(A)], 0.0)
    membership.score(A, "bad_piece", 0.0)
    later = FIRST_BAN_S + FORGIVEN_AFTER_S + 1
    membership.score(A, "bad_piece", later)
    assert membership.reason_excluded(A, later) == "is left alone for 30 s after repeated faults"


def test_standings_of_strangers_are_dropped_in_the_end(membership: Membership) -> None:
    for i in range(100):
        membership.score(PeerId(f"stranger{i}"), "unanswered", 0.0)
    membership.update([], 0.0)
    assert len(membership._standings) == 100
    membership.update([], 20 * HALF_LIFE_S)
    assert not membership._standings


def test_who_is_left_alone_is_seen_and_not_live(membership: Membership) -> None:
    membership.update([record(A), record(B)], 0.0)
    assert membership.seen(0.0) == membership.live(0.0)
    assert membership.score(A, WORSE_STATE, 0.0)
    assert membership.seen(0.0) == (PeerSeen(A, 0, left_alone=True), PeerSeen(B, 0))
    assert membership.live(0.0) == (PeerSeen(B, 0),)
    assert membership.update([record(A), record(B)], 0.0)  # the view of a moment ago had A in it
    assert not membership.update([record(A), record(B)], 1.0)
