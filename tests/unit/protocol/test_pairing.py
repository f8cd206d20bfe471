"""The shared matching: a fixed function of (seed, round, n), fair, and the same from every peer's side."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.optim.topology import random_matching
from peerloom.protocol.events import PeerSeen
from peerloom.protocol.graphs import scheduled_matching
from peerloom.protocol.pairing import Place, Planned, Rendezvous, rank
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId


def test_known_matchings() -> None:
    assert scheduled_matching(1, 0, 0) == []
    assert scheduled_matching(1, 0, 1) == []
    assert scheduled_matching(1, 0, 2) == [(0, 1)]
    assert scheduled_matching(1, 0, 6) == GOLDEN_6
    assert scheduled_matching(1, 1, 7) == GOLDEN_7


GOLDEN_6 = [(0, 2), (1, 3), (4, 5)]
GOLDEN_7 = [(0, 4), (1, 5), (2, 3)]


@given(seed=st.integers(0, 2**63), round=st.integers(0, 10**9), n=st.integers(0, 40))
def test_a_matching_pairs_all_but_one_if_odd(seed: int, round: int, n: int) -> None:
    pairs = scheduled_matching(seed, round, n)
    members = [index for pair in pairs for index in pair]
    assert len(pairs) == n // 2
    assert len(set(members)) == len(members)
    assert set(members) <= set(range(n))
    assert all(i < j for i, j in pairs)
    assert pairs == sorted(pairs)


def test_every_pair_is_as_likely() -> None:
    rounds = 3000
    seen = Counter(pair for round in range(rounds) for pair in scheduled_matching(5, round, 5))
    assert len(seen) == 10
    for count in seen.values():  # expected 600, standard deviation about 22
        assert abs(count - rounds / 5) < 110


@given(seed=st.integers(0, 2**32), round=st.integers(0, 1000), n=st.integers(0, 17))
def test_the_optimizer_side_draws_the_same(seed: int, round: int, n: int) -> None:
    assert random_matching(n, seed, round) == scheduled_matching(seed, round, n)


def test_negative_n_is_refused() -> None:
    with pytest.raises(ValueError, match="n is -1"):
        scheduled_matching(1, 0, -1)


def test_rank_is_an_order_that_the_run_seed_changes() -> None:
    peers = [PeerId(f"peer{i}") for i in range(8)]
    assert len({rank(1, peer) for peer in peers}) == 8
    assert sorted(peers, key=lambda peer: rank(1, peer)) != sorted(peers, key=lambda peer: rank(2, peer))


@pytest.mark.parametrize(
    ("own", "others", "theirs", "refused"),
    [
        (20, (20, 21, 12), 12, False),  # 8 behind
        (20, (20, 21, 11), 11, True),
        (20, (11, 11, 11), 11, False),  # this node is the one that is fast: the middle is there
        (11, (20, 20, 20), 20, False),  # it is left behind, and met by whoever offers
        (11, (20, 20, 20), 3, False),  # who is no slower than it
        (11, (20, 20, 20), 2, True),
        (520, (60,), 60, True),  # of two, one was away
        (60, (520,), 520, False),
    ],
)
def test_who_is_left_behind_is_measured_by_the_middle(
    own: int, others: tuple[int, ...], theirs: int, refused: bool
) -> None:
    pairing = Rendezvous(8)
    pairing.view = {PeerId(str(index)): PeerSeen(PeerId(str(index)), round) for index, round in enumerate(others)}
    refusal = pairing.refusal(PeerId("0"), Place(theirs), Place(own), True)
    assert (refusal == "round") is refused
    assert pairing.fits(theirs, own) is not refused


def test_a_rendezvous_has_one_leg() -> None:
    """An offer for another one would never be due, and stay parked."""
    pairing = Rendezvous(8)
    assert pairing.refusal(PeerId("a"), Place(5, 0, 1), Place(5), True) == "round"
    assert pairing.refusal(PeerId("a"), Place(5, 0, 0), Place(5), True) is None


def test_without_skew_rounds_are_the_same() -> None:
    pairing = Rendezvous(0)
    pairing.view = {PeerId("a"): PeerSeen(PeerId("a"), 5)}
    assert [pairing.fits(theirs, 5) for theirs in (4, 5, 6)] == [False, True, False]


def test_a_plan_counts_whom_this_node_leaves_alone_and_passes_him_by() -> None:
    spec, everybody = GaslocSpec(pairing="scheduled", group_size=4), [PeerId(name) for name in "abcdefgh"]
    liar, places = everybody[3], [Place(0, 0, leg) for leg in range(4)]
    met: dict[PeerId, list[PeerId | None]] = {}
    for own in everybody[:3] + everybody[4:]:
        pairing, trusting = (Planned(own, 7, spec) for _ in range(2))
        others = [peer for peer in everybody if peer != own]
        trusting.see(PeerSeen(peer, 0) for peer in others)
        pairing.see(PeerSeen(peer, 0, left_alone=peer == liar) for peer in others)
        assert pairing.refusal(liar, places[0], places[0], True) == "refused"
        for place in places:
            (planned,) = trusting.targets(place) or [None]
            if planned == liar:
                assert not pairing.targets(place) and "left alone" in pairing.why_alone(place)
            met.setdefault(own, []).append(planned)
            for each in (pairing, trusting):
                each.met(place)
            assert pairing.targets(place) == [planned] or planned == liar
    assert sum(partners.count(liar) for partners in met.values()) == 4  # two of its group, there and back
    rendezvous = Rendezvous(8)
    rendezvous.see([PeerSeen(liar, 0, left_alone=True), PeerSeen(everybody[0], 0)])
    assert rendezvous.targets(places[0]) == [everybody[0]]
