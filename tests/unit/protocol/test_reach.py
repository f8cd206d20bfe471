"""How a node finds out whether it can be dialled, and keeps its relays: events in, effects out."""

from __future__ import annotations

import random

from peerloom.protocol.reach import (
    ANSWER_S,
    GONE_S,
    MEASURE_S,
    RECHECK_S,
    RETRY_S,
    AskDialBack,
    DialledBack,
    KeepRelay,
    LeaveRelay,
    Looked,
    MeasureRelay,
    Reachability,
    ReachChanged,
    RelayLost,
    RelayMeasured,
)
from peerloom.protocol.relay_choice import RelayBook
from peerloom.protocol.types import PeerId
from tests.unit.protocol.test_relay_choice import record

A, B, C = (PeerId(name) for name in "abc")
MINE = ("192.168.1.2:1", "5.0.0.1:1")


def machine() -> Reachability:
    rng = random.Random(0)
    return Reachability(rng, RelayBook(rng))


def look(*peers: PeerId, addresses: tuple[str, ...] = MINE, relays: bool = True) -> Looked:
    return Looked(addresses=addresses, records=tuple(record(peer, relays=relays) for peer in peers))


def kept(made: Reachability, now: float = 0.0) -> Reachability:
    """A node behind a router, with a place at A and B."""
    made.handle(look(A, B), now)
    for peer in (A, B):
        made.handle(DialledBack(peer, ()), now)
    for peer in (A, B):
        made.handle(RelayMeasured(peer, 0.01, 0.0), now)
    return made


def test_two_peers_are_asked_and_both_must_have_reached_it() -> None:
    made = machine()
    told, *asked = sorted(made.handle(look(A, B), 0.0), key=lambda effect: isinstance(effect, AskDialBack))
    assert told == ReachChanged("unknown", (), MINE, "nobody has dialled this node back yet")
    assert sorted(asked, key=str) == [AskDialBack(A, MINE), AskDialBack(B, MINE)]
    assert made.handle(DialledBack(A, MINE[1:]), 1.0) == []
    why = "2 of 2 peers that dialled this node back reached it"
    assert made.handle(DialledBack(B, MINE[1:]), 2.0) == [ReachChanged("direct", (), MINE[::-1], why)]
    assert made.handle(look(A, B), 3.0) == [], "nothing is new"


def test_a_neighbours_yes_does_not_outweigh_a_no() -> None:
    made = machine()
    made.handle(look(A, B), 0.0)
    made.handle(DialledBack(A, MINE[:1]), 1.0)
    made.handle(DialledBack(B, ()), 1.0)
    assert made.reach == "via"


def test_silence_is_no_answer_and_is_asked_again_soon() -> None:
    made = machine()
    made.handle(look(A, B), 0.0)
    made.handle(DialledBack(A, None), 1.0)
    assert made.handle(look(A, B), ANSWER_S - 1) == []
    made.handle(look(A, B), ANSWER_S + 1)
    assert made.reach == "unknown"
    assert AskDialBack(A, MINE) in made.handle(look(A, B), ANSWER_S + 2 + RETRY_S)


def test_with_nobody_there_it_waits_and_then_asks_whoever_can_be_dialled() -> None:
    made = machine()
    assert [type(effect) for effect in made.handle(look(), 0.0)] == [ReachChanged]
    behind = Looked(addresses=MINE, records=(record(A, reach="via"), record(B), record(C, reach="unknown")))
    asked = {effect.peer for effect in made.handle(behind, RETRY_S) if isinstance(effect, AskDialBack)}
    assert asked == {B, C}


def test_it_is_found_out_anew_after_minutes_and_at_once_after_a_move() -> None:
    made = machine()
    made.handle(look(A), 0.0)
    made.handle(DialledBack(A, MINE), 0.0)
    assert made.handle(look(A), RECHECK_S - 1) == []
    assert made.handle(look(A), RECHECK_S) == [AskDialBack(A, MINE)]
    made.handle(DialledBack(A, MINE), RECHECK_S)
    moved = ("10.0.0.9:1",)
    effects = made.handle(look(A, addresses=moved), RECHECK_S + 1)
    assert AskDialBack(A, moved) in effects
    assert ReachChanged("direct", (), moved, made.why()) in effects


def test_a_late_answer_to_the_round_before_a_move_counts_for_nothing() -> None:
    made = machine()
    made.handle(look(A), 0.0)
    made.handle(look(addresses=("10.0.0.9:1",)), 1.0)
    assert made.handle(DialledBack(A, MINE), 2.0) == []
    assert made.reach == "unknown"


def test_one_that_cannot_be_dialled_takes_two_places_and_says_so_once_they_stand() -> None:
    made = machine()
    made.handle(look(A, B, C), 0.0)
    effects = [effect for peer in (A, B, C) for effect in made.handle(DialledBack(peer, ()), 1.0)]
    chosen = [effect.relay for effect in effects if isinstance(effect, KeepRelay)]
    (other,) = {A, B, C} - set(chosen)
    assert len(chosen) == 2 and MeasureRelay(other) in effects
    (told,) = (effect for effect in effects if isinstance(effect, ReachChanged))
    assert (told.reach, told.via) == ("via", ())
    (told,) = made.handle(RelayMeasured(chosen[0], 0.01, 0.0), 2.0)  # type: ignore[assignment]
    assert told.via == (chosen[0],)
    assert made.handle(RelayMeasured(chosen[0], 0.01, 0.0), 3.0) == []


def test_a_lost_relay_leaves_the_record_at_once_and_another_takes_its_place() -> None:
    made = kept(machine())
    made.handle(look(A, B, C), 1.0)
    effects = made.handle(RelayLost(A, "gone"), 2.0)
    assert KeepRelay(C) in effects
    (told,) = (effect for effect in effects if isinstance(effect, ReachChanged))
    assert told.via == (B,)


def test_the_only_relay_is_tried_again_after_a_pause() -> None:
    made = machine()
    made.handle(look(A), 0.0)
    assert KeepRelay(A) in made.handle(DialledBack(A, ()), 0.0)
    made.handle(RelayLost(A, "gone"), 1.0)
    assert made.handle(look(A), 1.0 + GONE_S - 0.1) == []
    assert made.handle(look(A), 1.0 + GONE_S) == [KeepRelay(A)]


def test_one_that_can_be_dialled_after_all_gives_its_places_up() -> None:
    made = kept(machine())
    made.handle(look(A, B), RECHECK_S)
    effects = [effect for peer in (A, B) for effect in made.handle(DialledBack(peer, MINE), RECHECK_S)]
    assert {effect.relay for effect in effects if isinstance(effect, LeaveRelay)} == {A, B}
    assert made.reach == "direct"


def test_others_are_measured_now_and_then() -> None:
    made = kept(machine())
    seen = [effect for second in range(int(MEASURE_S) + 2) for effect in made.handle(look(A, B, C), float(second))]
    assert [effect for effect in seen if isinstance(effect, MeasureRelay)] == [MeasureRelay(C)]


def test_relays_that_are_gone_are_forgotten_but_for_their_faults_and_those_kept() -> None:
    rng = random.Random(0)
    book = RelayBook(rng)
    made = kept(Reachability(rng, book))
    for number in range(100):
        made.handle(RelayMeasured(PeerId(f"relay {number}"), 0.1, 0.0), 0.0)
    book.fault(C, "corrupt", 0.0)
    made.handle(Looked(addresses=MINE, records=()), 1.0)
    assert set(book._relays) == {A, B, C}
