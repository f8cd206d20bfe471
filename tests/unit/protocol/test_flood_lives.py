"""A node's own history over its lives: out for good once cut off, nothing signed twice, and never back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerloom.protocol.effects import Count
from peerloom.protocol.flood import FloodMachine
from peerloom.protocol.flood_events import (
    Apply,
    Exiled,
    FloodEffect,
    FloodEvent,
    Keep,
    LinkUp,
    PeersSeen,
    Received,
    Retract,
    StepsDone,
)
from peerloom.protocol.flood_messages import (
    Batch,
    Mark,
    Proof,
    Segments,
    Snapshot,
    Versions,
    first_chain,
    fold,
    signed_bytes,
)
from tests.unit.protocol.flood_fabric import RUN, machine, peer, sign_as, signed

OWN, NEIGHBOUR, ORIGIN = (peer(index) for index in range(3))
OWN_PROOF = Proof(*(signed(Batch(OWN, 0, 0, (value,)), first_chain(RUN, OWN)) for value in (1, 2)))


def linked(made: FloodMachine) -> list[FloodEffect]:
    events: tuple[FloodEvent, ...] = (
        PeersSeen((NEIGHBOUR, ORIGIN)),
        LinkUp(NEIGHBOUR),
        Received(NEIGHBOUR, Versions(())),
    )
    return [effect for event in events for effect in made.handle(event, 0.0)]


def marked(batch: Batch, **changes: int) -> Mark:
    chain = fold(first_chain(RUN, batch.origin), batch)
    signature = sign_as(batch.origin, signed_bytes(RUN, batch.origin, batch.end, batch.end_step, chain))
    return replace(Mark(batch.origin, batch.end, batch.end_step, chain, signature), **changes)


@pytest.mark.parametrize("by", ["its log", "a state"])
def test_a_node_that_was_cut_off_is_told_in_each_life(by: str) -> None:
    made = machine(OWN)
    if by == "its log":
        made.restore([OWN_PROOF])
    else:
        made.adopt(Snapshot((), (OWN_PROOF,)))
    assert linked(made).count(Exiled()) == 1
    assert not [effect for effect in made.handle(StepsDone(0, 0, (1, 2)), 1.0) if not isinstance(effect, Count)]


def test_steps_that_own_messages_of_an_earlier_life_overtook_are_taken_out_again() -> None:
    made = machine(OWN)
    linked(made)
    assert made.settled()
    step, sequence = made.next_step, made.next_sequence
    earlier = signed(Batch(OWN, 0, 0, (5, 6, 7)), first_chain(RUN, OWN))
    taken = [made.handle(Received(NEIGHBOUR, Segments((earlier,))), 1.0)]
    taken.append(made.handle(StepsDone(step, sequence, (1, 2)), 2.0))
    late = Batch(OWN, sequence, step, (1, 2))
    effects = [effect for each in taken for effect in each]
    assert Retract((late,)) in effects and Count("flood_own_overtaken", 2) in effects
    assert [effect.item for effect in effects if isinstance(effect, Keep)] == [earlier]
    assert [effect for effect in effects if isinstance(effect, Apply)] == [Apply((earlier.batch,))]
    assert (made.next_sequence, made.next_step) == (3, 3)
    effects = made.handle(StepsDone(3, 3, (1, 2)), 3.0)
    assert [effect.item.batch for effect in effects if isinstance(effect, Keep)] == [Batch(OWN, 3, 3, (1, 2))]  # type: ignore[union-attr]


def test_a_mark_s_step_is_the_origin_s_word() -> None:
    made = machine(OWN)
    batch = Batch(ORIGIN, 0, 4, (1, 2))
    assert made.check(Snapshot((marked(batch),)))
    assert not made.check(Snapshot((marked(batch, step=5000),)))
    made.adopt(Snapshot((marked(batch),)))
    made.handle(PeersSeen((ORIGIN,)), 0.0)
    assert made.next_step == 6


def test_a_state_that_has_less_of_this_node_than_it_signed_is_not_for_it() -> None:
    long, short = Batch(OWN, 0, 0, tuple(range(53))), Batch(OWN, 0, 0, tuple(range(5)))
    other = Batch(OWN, 0, 0, (9, 9))
    fresh = machine(OWN)
    assert not fresh.falls_short(Snapshot(()))
    fresh.adopt(Snapshot((marked(long),)))  # its log was lost: it begins at the mark
    assert fresh.falls_short(Snapshot(())) and fresh.falls_short(Snapshot((marked(short),)))
    assert not fresh.falls_short(Snapshot((marked(long),)))
    assert not fresh.falls_short(Snapshot((marked(replace(long, scalars=long.scalars + (1,))),)))
    whole = machine(OWN)
    whole.restore([signed(long, first_chain(RUN, OWN))])
    assert not whole.falls_short(Snapshot(())) and not whole.falls_short(Snapshot((marked(short),)))
    assert whole.falls_short(Snapshot((marked(other),)))  # another history, under its own key
