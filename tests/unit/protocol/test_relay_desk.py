"""A relay's limits, each with what it answers, and how it shares its bandwidth out."""

from __future__ import annotations

from peerloom.protocol.relay_desk import OPENS_BURST, DeskLimits, RelayDesk, RelayShares
from peerloom.protocol.types import PeerId

ME, A, B, C = (PeerId(name) for name in ("me", "a", "b", "c"))
NOBODY: frozenset[PeerId] = frozenset()


def desk(**limits: int | bool) -> RelayDesk:
    made = RelayDesk(ME, DeskLimits(**limits))  # type: ignore[arg-type]
    assert made.keep(B, True, NOBODY) is None
    return made


def test_a_tunnel_leads_to_one_that_holds_a_place_and_to_no_other() -> None:
    made = desk()
    assert made.open_to(A, B, 0.0) is None
    assert made.open_to(A, C, 0.0) == "unknown"
    assert made.open_to(B, B, 0.0) == "own"
    made.unkept(B, True)
    assert made.open_to(A, B, 0.0) == "unknown"


def test_a_node_that_does_not_relay_or_cannot_be_dialled_is_unwilling() -> None:
    assert RelayDesk(ME, DeskLimits(relays=False)).keep(A, True, NOBODY) == "unwilling"
    made = desk()
    made.willing = False
    assert made.open_to(A, B, 0.0) == "unwilling"
    assert made.keep(A, False, NOBODY) == "unwilling"


def test_two_that_are_each_others_relays_would_be_a_loop() -> None:
    made = desk()
    assert made.keep(A, True, frozenset({A})) == "loop"
    assert made.keep(A, False, frozenset({A})) is None


def test_each_limit_holds_and_what_is_given_back_counts_again() -> None:
    made = desk(tunnels=3, tunnels_of_peer=2, tunnels_of_pair=1)
    assert made.keep(C, True, NOBODY) is None
    assert made.open_to(A, B, 0.0) is None
    assert made.open_to(A, B, 0.0) == "greedy"  # the pair
    assert made.open_to(A, C, 0.0) is None
    assert made.keep(ME, True, NOBODY) is None
    assert made.open_to(A, ME, 0.0) == "greedy"  # the peer
    assert made.open_to(C, B, 0.0) is None
    assert made.open_to(B, C, 0.0) == "busy"
    assert made.load() == 1.0
    made.closed(A, B)
    assert made.open_to(B, C, 0.0) is None


def test_half_open_streams_are_bounded_for_each_and_for_all() -> None:
    made = desk(half_open=3, half_open_of_peer=2)
    assert [made.arrived(A) for _ in range(3)] == [None, None, "greedy"]
    assert [made.arrived(peer) for peer in (B, C)] == [None, "busy"]
    made.settled(A)
    assert made.arrived(C) is None


def test_openings_are_limited_in_rate() -> None:
    made = desk()
    opened = 0
    while made.open_to(A, B, 0.0) is None:
        made.closed(A, B)
        opened += 1
    assert opened == OPENS_BURST
    assert made.open_to(C, B, 0.0) is None, "others have budgets of their own"
    assert made.open_to(A, B, 0.5) is None, "time fills it again"
    made.open_to(C, B, 1000.0)
    assert list(made._budgets) == [C], "whole budgets take no memory"


def test_a_tunnel_to_this_node_comes_from_its_origin_or_by_its_own_relay() -> None:
    made = desk(delivered=2, delivered_of_origin=1)
    relays = frozenset({B})
    assert made.deliver(A, A, relays, 0.0) is None
    assert made.deliver(B, A, relays, 0.0) == "greedy"
    assert made.deliver(C, A, relays, 0.0) == "unwilling"
    assert made.deliver(B, ME, relays, 0.0) == "own"
    assert made.deliver(B, C, relays, 0.0) is None
    assert made.deliver(B, B, relays, 0.0) == "busy"
    made.left(A)
    assert made.deliver(B, B, relays, 0.0) is None


def test_places_are_bounded() -> None:
    made = RelayDesk(ME, DeskLimits(places=1))
    assert [made.keep(peer, True, NOBODY) for peer in (A, B, A)] == [None, "busy", None]
    made.unkept(A, True)
    assert made.keep(B, True, NOBODY) == "busy", "one stream of A still holds its place"
    made.unkept(A, True)
    assert made.keep(B, True, NOBODY) is None


def test_those_that_watch_without_a_place_are_bounded_for_each_and_for_all() -> None:
    made = RelayDesk(ME, DeskLimits(watchers=3, watchers_of_peer=2))
    assert [made.keep(A, False, NOBODY) for _ in range(3)] == [None, None, "greedy"]
    assert [made.keep(peer, False, NOBODY) for peer in (B, C)] == [None, "busy"]
    assert made.keep(A, True, NOBODY) is None, "places are counted apart"
    made.unkept(A, True)
    assert made.keep(C, False, NOBODY) == "busy"
    made.unkept(A, False)
    assert made.keep(C, False, NOBODY) is None
    for peer in (A, B, C):
        made.unkept(peer, False)
    assert not made._watchers, "those gone take no memory"


def moved(shares: RelayShares, greedy: bool, seconds: float) -> dict[str, float]:
    """Bytes by pair when each sends its next piece as soon as it may; the greedy one has four senders."""
    senders = [(A, B, f"{A}-{n}") for n in range(4 if greedy else 1)] + [(C, B, "c")]
    ready = {name: 0.0 for *_, name in senders}
    total = {A: 0.0, C: 0.0}
    while (now := min(ready.values())) < seconds:
        name = min(ready, key=lambda each: ready[each])
        source = next(one for one, _, each in senders if each == name)
        total[source] += 1000
        ready[name] = now + max(1e-6, shares.wait_s((source, B), 1000, now))
    return {str(peer): amount for peer, amount in total.items()}


def test_a_greedy_pair_gets_no_more_than_its_share() -> None:
    total = moved(RelayShares(100_000, 0), greedy=True, seconds=20.0)
    assert 0.9 < total["a"] / total["c"] < 1.1
    assert 0.9 < sum(total.values()) / 2_000_000 < 1.1


def test_a_pair_alone_has_it_all_up_to_its_own_quota() -> None:
    for pair_rate, wanted in ((0, 100_000), (30_000, 30_000)):
        shares, now = RelayShares(100_000, pair_rate), 0.0
        for _ in range(1000):
            now += shares.wait_s((A, B), 1000, now)
        assert 0.9 < 1_000_000 / now / wanted < 1.1
    shares = RelayShares(0, 0)
    assert shares.wait_s((A, B), 10**9, 0.0) == shares.wait_s((A, B), 10**9, 0.0) == 0.0


def test_pairs_that_fell_silent_take_no_memory() -> None:
    shares = RelayShares(0, 1000)
    for number in range(50):
        shares.wait_s((A, PeerId(str(number))), 10, float(10 * number))
    assert len(shares._free_at) == 1
