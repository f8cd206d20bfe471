"""How a node starts, when the run is done, when a dead worker is started again."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from peerloom.protocol.lifecycle import (
    LONE_S,
    LONGEST_RESTART_S,
    RECORD_LIFE_S,
    RESTART_LIMIT,
    StartDecision,
    budget_spent,
    catch_up_delay,
    choose_start,
    restart_delay,
    worse_than,
)
from peerloom.protocol.limits import MAX_LEAP, MAX_TAKEN
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
    *peers: PeerRecord,
    own_round: int = 0,
    resumed: bool = False,
    started_at: float | None = None,
    seen_s: float = LONE_S,
) -> StartDecision:
    seen = {peer.peer_id: seen_s for peer in peers}
    return choose_start(own_round, resumed, "mine", "L", peers, 8, NOW, started_at=started_at, seen_s=seen)


def test_alone_starts_fresh_or_resumes() -> None:
    alone = StartDecision("fresh", (), "no trainer to take over from: starting from the run's own theta_0")
    assert start() == alone
    assert start(record("a", state="starting")) == alone
    decision = start(own_round=7, resumed=True)
    assert decision == StartDecision(
        "resume", (), "no trainer to compare with: going on from the checkpoint of round 7"
    )


def test_peers_in_their_first_round_start_fresh_together() -> None:
    decision = start(record("a"), record("b", state="starting"))
    assert decision == StartDecision("fresh", (), "no trainer is past its first round")


def test_a_newcomer_fetches_from_the_middle_first() -> None:
    decision = start(
        record("liar", round=10**6),
        record("c", round=3),
        record("b", round=5),
        record("a", round=5, started_at=NOW - 200),
        record("d"),
    )
    assert (decision.kind, decision.donors) == ("fetch", ("a", "b", "c", "liar"))
    assert decision.reason == "the swarm is at round 5 already"


def test_of_two_donors_the_one_that_claims_less_is_asked_first() -> None:
    assert start(record("liar", round=10**6), record("a", round=5)).donors == ("a", "liar")


@pytest.mark.parametrize("changes", [{"round": MAX_LEAP + 1}, {"round": 5, "step": MAX_TAKEN + 1}])
def test_a_round_or_step_beyond_belief_makes_no_donor(changes: dict[str, Any]) -> None:
    assert start(record("liar", **changes)).kind == "fresh"
    assert start(record("liar", **changes), own_round=0, resumed=True).kind == "resume"


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
        record("a", round=21), record("b", round=22), record("liar", round=10**6), own_round=20, resumed=True
    )
    assert decision.kind == "resume"
    told = "1 of 3 other trainers are more than 8 rounds ahead: going on from the checkpoint of round 20"
    assert decision.reason == told


def test_the_only_other_one_is_asked_once_it_has_stayed() -> None:
    liar = record("liar", round=10**6)
    soon = start(liar, own_round=3, resumed=True, seen_s=LONE_S - 1)
    assert soon.kind == "resume"
    assert "the only other trainer says it is at round 1000000" in soon.reason
    assert start(liar, own_round=3, resumed=True, seen_s=LONE_S).donors == ("liar",)
    assert choose_start(3, True, "mine", "L", [liar], 8, NOW).kind == "resume"


def test_one_liar_of_two_moves_nobody_who_has_trained() -> None:
    decision = start(record("a", round=21), record("liar", round=10**6), own_round=20, resumed=True)
    assert decision.kind == "resume"


def test_half_of_the_swarm_ahead_is_caught_up_with_from_its_middle() -> None:
    ahead = [record("a", round=40), record("liar", round=10**6)]
    assert start(*ahead, record("b", round=20), own_round=20, resumed=True).donors == ("a", "liar")
    more = [record(name, round=20) for name in "bcd"]
    assert start(*ahead, *more, own_round=20, resumed=True).kind == "resume"


@pytest.mark.parametrize(
    ("loss", "reference", "worse"),
    [
        (127.0, 1.7, True),
        (1.7, 1.7, False),
        (2.2, 1.7, False),
        (2.21, 1.7, True),
        (7.4, 6.0, False),
        (7.6, 6.0, True),
        (math.nan, None, True),
        (math.inf, None, True),
        (127.0, None, False),
    ],
)
def test_when_a_fetched_state_is_worse(loss: float, reference: float | None, worse: bool) -> None:
    assert worse_than(loss, reference) is worse


def test_attempts_to_catch_up_grow_rarer_to_a_limit() -> None:
    assert [catch_up_delay(failures) for failures in (1, 2, 3, 6, 10_000)] == [60.0, 120.0, 240.0, 1800.0, 1800.0]


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


def test_the_budget_counts_the_whole_swarm() -> None:
    assert budget_spent([60, 30], 10, 100)
    assert not budget_spent([60, 30], 9, 100)
    assert not budget_spent([60, 30], 10**9, 0)
    assert not budget_spent([-50], 99, 100)
    assert budget_spent([-50], 100, 100)


def test_restarts_wait_longer_each_time_and_end() -> None:
    rng = random.Random(1)
    for failures in range(1, RESTART_LIMIT):
        delays = [restart_delay(failures, rng) for _ in range(50)]
        full = min(LONGEST_RESTART_S, 2.0 ** (failures - 1))
        assert all(delay is not None and full / 2 <= delay <= full for delay in delays)
        assert len(set(delays)) > 40
    assert restart_delay(RESTART_LIMIT, rng) is None
