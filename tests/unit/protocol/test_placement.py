from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from peerloom.protocol.placement import Claim, choose_place, keeper_of, missing_stages, turn_to_move
from peerloom.protocol.types import PeerId


def p(index: int) -> PeerId:
    return PeerId(f"peer-{index:03d}")


def claim(index: int, stage: int = -1, role: str = "claims") -> Claim:
    return Claim(p(index), stage, role)  # type: ignore[arg-type]


def settle(count: int, stages: int, seed: int, standbys: int = 1, hosts: int = 0) -> dict[PeerId, Claim]:
    """Nodes look at one another's last published claims, in any order, until a whole pass changes nothing."""
    rng = random.Random(seed)
    claims = {p(i): claim(i, i % stages, "hosts") for i in range(hosts)}
    claims |= {p(i): claim(i) for i in range(hosts, hosts + count)}
    for _ in range(4 * (count + 2)):
        seen, changed = dict(claims), False
        for peer in rng.sample(sorted(claims), len(claims)):
            own = claims[peer]
            if own.role == "hosts":
                continue
            view = seen if rng.random() < 0.5 else claims  # some see what the others have just published
            place = choose_place(own, [c for c in view.values() if c.peer != peer], stages, standbys=standbys)
            new = Claim(peer, place.stage, "stands_by" if place.role == "stands_by" else "claims")
            changed = changed or new != own
            claims[peer] = new
        if not changed:
            return claims
    raise AssertionError("they never settle")


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**32))
def test_all_who_claim_at_once_settle_on_different_stages(count: int, stages: int, seed: int) -> None:
    claims = settle(count, stages, seed)
    of_stage = Counter(c.stage for c in claims.values() if c.role == "claims")
    assert len(of_stage) == min(count, stages)
    if count <= stages:
        assert set(of_stage.values()) == {1}


def test_two_at_once_settle_on_one_and_the_lower_id_stays() -> None:
    first = choose_place(claim(1, 0), [claim(2, 0)], 2)
    second = choose_place(claim(2, 0), [claim(1, 0)], 2)
    assert (first.stage, second.stage) == (0, 1)


def test_a_host_is_never_displaced_by_a_lower_id() -> None:
    place = choose_place(claim(1), [claim(9, 0, "hosts")], 2)
    assert (place.stage, place.role, place.reason) == (1, "hosts", "stage 1 of 2 has no host")


def test_a_checkpoint_decides_among_the_missing_and_the_owner_over_all() -> None:
    assert choose_place(claim(1), [claim(2, 0, "hosts")], 4, held={2: 50, 3: 20}).stage == 2
    assert choose_place(claim(1), [], 4, wanted=3).stage == 3


def test_surplus_nodes_stand_by_and_then_share_stages() -> None:
    hosts = [claim(0, 0, "hosts"), claim(1, 1, "hosts")]
    third = choose_place(claim(2), hosts, 2)
    assert (third.stage, third.role) == (0, "stands_by")
    standing = [*hosts, claim(2, 0, "stands_by"), claim(3, 1, "stands_by")]
    fifth = choose_place(claim(4), standing, 2)
    assert (fifth.stage, fifth.role) == (0, "hosts")
    assert choose_place(claim(2, 0, "stands_by"), [*hosts, claim(3, 1, "stands_by")], 2).role == "stands_by"


def test_a_lost_stage_is_taken_by_its_own_standby_else_by_the_first_of_all() -> None:
    left = [claim(0, 0, "hosts"), claim(2, 2, "hosts")]
    three, four, five = claim(3, 0, "stands_by"), claim(4, 1, "stands_by"), claim(5, 1, "stands_by")
    assert choose_place(four, [*left, three, five], 3).role == "hosts"
    assert choose_place(three, [*left, four, five], 3).role == "stands_by"
    assert choose_place(five, [*left, three, four], 3).role == "stands_by"
    assert choose_place(three, left, 3).stage == 1
    assert missing_stages([*left, three, four], 3) == [1]


def test_the_copy_goes_to_the_standby_else_to_the_next_stage() -> None:
    hosts = [claim(i, i, "hosts") for i in range(3)]
    assert keeper_of(2, [*hosts, claim(7, 2, "stands_by")], 3, p(2)) == p(7)
    assert keeper_of(2, hosts, 3, p(2)) == p(0)
    assert keeper_of(0, hosts[:1], 3, p(0)) is None


def test_one_host_too_many_moves_and_who_was_placed_by_its_owner_keeps_nobody_back() -> None:
    claims = [claim(0, 0, "hosts"), claim(4, 0, "hosts"), claim(1, 1, "hosts"), claim(3, 3, "hosts")]
    turns = [turn_to_move(each, claims, 4) for each in claims]
    assert turns == [1, 0, None, None]
    assert turn_to_move(claims[0], [claims[2], claims[3]], 4) is None, "4 has left: the stage needs 0"
    coming = [claim(7, 3, "stands_by"), claim(8, 2)]
    assert turn_to_move(claims[1], [*claims, *coming], 4) == 2, "first those who have nothing to leave"
    assert turn_to_move(claims[1], [*claims, claim(9, 2, "hosts")], 4) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10), st.integers(2, 5), st.integers(0, 2**32))
def test_hosts_that_move_fill_every_stage_one_at_a_time(count: int, stages: int, seed: int) -> None:
    rng = random.Random(seed)
    claims = {p(i): claim(i, rng.randrange(stages), "hosts") for i in range(count)}
    placed = set(rng.sample(sorted(claims), rng.randrange(count + 1)))
    for _ in range(stages):
        hosts = Counter(c.stage for c in claims.values())
        lost = missing_stages(claims.values(), stages)
        turns = {peer: turn_to_move(own, list(claims.values()), stages) for peer, own in claims.items()}
        going = {turn: peer for peer, turn in turns.items() if turn is not None}
        assert len(going) == sum(turn is not None for turn in turns.values()), "no two at once"
        movers = [peer for _, peer in sorted(going.items()) if peer not in placed]
        if not movers:
            surplus = {peer for peer, own in claims.items() if hosts[own.stage] > 1}
            assert not lost or surplus <= placed, "none is never"
            return
        assert hosts[claims[movers[0]].stage] > 1
        others = [c for peer, c in claims.items() if peer != movers[0]]
        claims[movers[0]] = Claim(movers[0], choose_place(Claim(movers[0], -1, ""), others, stages).stage, "hosts")
        assert len(missing_stages(claims.values(), stages)) == len(lost) - 1
