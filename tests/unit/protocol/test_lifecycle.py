"""How a node starts, when the run is done, when a dead worker is started again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from peerloom.protocol.lifecycle import (
    LONGEST_RESTART_S,
    RECORD_LIFE_S,
    RESTART_LIMIT,
    StartDecision,
    budget_spent,
    choose_start,
    restart_delay,
)
from peerloom.protocol.types import PeerId, PeerRecord

NOW = 1_000_000.0


def record(name: str, **changes: Any) -> PeerRecord:
    base: dict[str, Any] = {
        "peer_id": PeerId(name),
        "name": name,
        "role": "trainer",
        "addresses": (),
        "cert_der": b"",
        "version": "0.1.0",
        "instance": "00",
        "started_at": NOW - 100,
        "issued_at": NOW - 1,
        "state": "training",
        "layout_digest": "L",
        "init_digest": "mine",
    }
    return PeerRecord(**(base | changes))


def start(
    *peers: PeerRecord, own_round: int = 0, resumed: bool = False, started_at: float | None = None
) -> StartDecision:
    return choose_start(own_round, resumed, "mine", "L", peers, 8, NOW, started_at=started_at)


def test_alone_starts_fresh_or_resumes() -> None:
    assert start() == StartDecision("fresh", (), "no other trainer is there")
    assert start(own_round=7, resumed=True).kind == "resume"


def test_peers_in_their_first_round_start_fresh_together() -> None:
    decision = start(record("a"), record("b", state="starting"))
    assert decision == StartDecision("fresh", (), "no trainer is past its first round")


def test_a_newcomer_fetches_from_the_furthest_first() -> None:
    decision = start(
        record("c", round=3), record("b", round=5), record("a", round=5, started_at=NOW - 200), record("d")
    )
    assert (decision.kind, decision.donors) == ("fetch", ("a", "b", "c"))
    assert decision.reason == "the swarm is at round 5 already"


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "bootstrap"},
        {"layout_digest": "other"},
        {"state": "draining"},
        {"state": "done"},
        {"state": "starting"},
        {"state": "fetching"},
        {"issued_at": NOW - RECORD_LIFE_S - 1},
    ],
)
def test_who_is_no_donor(changes: dict[str, Any]) -> None:
    assert start(record("a", round=50, **changes)).kind == "fresh"


@pytest.mark.parametrize(("behind", "kind"), [(-5, "resume"), (0, "resume"), (8, "resume"), (9, "fetch")])
def test_a_checkpoint_is_good_until_it_is_too_far_behind(behind: int, kind: str) -> None:
    decision = start(record("a", round=20 + behind), own_round=20, resumed=True)
    assert decision.kind == kind
    assert decision.donors == (("a",) if kind == "fetch" else ())


def test_one_liar_does_not_make_a_checkpoint_old() -> None:
    decision = start(
        record("a", round=21), record("b", round=22), record("liar", round=10**9), own_round=20, resumed=True
    )
    assert decision.kind == "resume"


def test_a_checkpoint_of_another_theta_0_is_resumed_all_the_same() -> None:
    assert start(record("a", round=21, init_digest="theirs"), own_round=20, resumed=True).kind == "resume"


def test_another_theta_0_follows_the_majority() -> None:
    theirs = [record("a", init_digest="theirs"), record("b", init_digest="theirs")]
    decision = start(*theirs, started_at=NOW - 500)
    assert (decision.kind, decision.donors) == ("fetch", ("a", "b"))
    assert "theta_0" in decision.reason
    assert start(*theirs, record("c"), record("d")).kind == "fresh"


def test_of_two_with_different_theta_0_exactly_the_younger_follows() -> None:
    theirs = record("a", init_digest="theirs", started_at=NOW - 10)
    assert start(theirs, started_at=NOW - 5).donors == ("a",)
    assert start(theirs, started_at=NOW - 20).kind == "fresh"
    assert start(theirs).kind == "fetch"


def test_two_of_the_same_age_do_not_follow_each_other() -> None:
    def kind(own: str, other: str) -> str:
        peer = record("a", init_digest=other, started_at=NOW)
        return choose_start(0, False, own, "L", [peer], 8, NOW, started_at=NOW).kind

    assert sorted([kind("x", "y"), kind("y", "x")]) == ["fetch", "fresh"]


def test_whom_to_follow_may_not_be_ready_yet() -> None:
    decision = start(record("a", init_digest="theirs", state="starting"))
    assert (decision.kind, decision.donors) == ("fetch", ())


def test_the_budget_counts_the_whole_swarm_once() -> None:
    peers = [record("a", tokens=60), record("b", tokens=30), record("a", tokens=60)]
    assert budget_spent(peers, 10, 100)
    assert not budget_spent(peers, 9, 100)
    assert not budget_spent(peers, 10**9, 0)
    assert not budget_spent([record("liar", tokens=-50)], 99, 100)
    assert budget_spent([record("liar", tokens=-50)], 100, 100)


def test_restarts_wait_longer_each_time_and_end() -> None:
    rng = random.Random(1)
    for failures in range(1, RESTART_LIMIT):
        delays = [restart_delay(failures, rng) for _ in range(50)]
        full = min(LONGEST_RESTART_S, 2.0 ** (failures - 1))
        assert all(delay is not None and full / 2 <= delay <= full for delay in delays)
        assert len(set(delays)) > 40
    assert restart_delay(RESTART_LIMIT, rng) is None
