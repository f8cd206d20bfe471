"""Segments that follow on each other are judged by the last signature, and come to what they would one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerloom.protocol.flood_events import Apply, FloodEffect, Keep, LinkUp, PeersSeen, Received, Retract, Send
from peerloom.protocol.flood_links import in_rows, joined
from peerloom.protocol.flood_messages import Batch, Segment, Segments, first_chain, fold
from peerloom.protocol.flood_pace import allowed, cost_of
from peerloom.protocol.limits import MAX_SEGMENT
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.types import PeerId
from tests.unit.protocol.flood_fabric import RUN, SPEC, State, machine, peer, signed

OWN, NEIGHBOUR, ORIGIN, OTHER, NEXT = (peer(index) for index in range(5))
FLUSHES = 12


def flushes(origin: PeerId, count: int = FLUSHES, scalars: tuple[int, ...] = (5, -3)) -> list[Segment]:
    """A row of signed segments; only the first says what comes before it."""
    chain, made = first_chain(RUN, origin), []
    for at in range(count):
        batch = Batch(origin, at * len(scalars), at * len(scalars), scalars)
        made.append(replace(signed(batch, chain), prev=chain if not at else b""))
        chain = fold(chain, batch)
    return made


class Node:
    """A machine with two neighbours, which counts the signatures that it checks."""

    def __init__(self, spec: SeedflowSpec = SPEC) -> None:
        self.machine = machine(OWN, spec)
        self.checked = 0
        inner = self.machine._verify

        def counting(peer: PeerId, data: bytes, signature: bytes) -> bool:
            self.checked += 1
            return inner(peer, data, signature)

        self.machine._verify = counting
        self.machine.handle(PeersSeen((NEIGHBOUR, ORIGIN, OTHER, NEXT)), 0.0)
        for neighbour in (NEIGHBOUR, NEXT):
            self.machine.handle(LinkUp(neighbour), 0.0)

    def take(self, *segments: Segment) -> list[FloodEffect]:
        return self.machine.handle(Received(NEIGHBOUR, Segments(segments)), 0.0)

    def held(self, origin: PeerId = ORIGIN) -> int:
        return self.machine._held(origin)


def passed_on(effects: list[FloodEffect]) -> list[Segment]:
    return [
        segment
        for each in effects
        if isinstance(each, Send) and each.peer == NEXT and isinstance(each.body, Segments)
        for segment in each.body.segments
    ]


def test_a_row_costs_one_check_and_goes_on_under_its_last_signature() -> None:
    node, row = Node(), flushes(ORIGIN)
    node.take(row[0])
    node.checked = 0
    effects = node.take(*row[1:])
    whole = joined(row[1:])
    assert node.checked == 1 and node.held() == 2 * FLUSHES
    assert [each.item for each in effects if isinstance(each, Keep)] == [replace(whole, prev=fold_to(row, 1))]
    assert [each.batches for each in effects if isinstance(each, Apply)] == [(whole.batch,)]
    assert passed_on(effects) == [whole]


def fold_to(row: list[Segment], count: int) -> bytes:
    chain = first_chain(RUN, row[0].batch.origin)
    for segment in row[:count]:
        chain = fold(chain, segment.batch)
    return chain


def test_rows_of_several_origins_lie_among_each_other() -> None:
    node, mine, theirs = Node(), flushes(ORIGIN), flushes(OTHER)
    node.take(mine[0], theirs[0])
    node.checked = 0
    node.take(*(segment for pair in zip(mine[1:], theirs[1:], strict=True) for segment in pair))
    assert node.checked == 2 and node.held() == node.held(OTHER) == 2 * FLUSHES


def test_what_a_relay_put_in_place_of_a_signature_within_a_row_is_not_passed_on() -> None:
    """The last signature covers it; with the garbage it would be this node that its neighbour blames."""
    node, row = Node(), flushes(ORIGIN)
    row[4] = replace(row[4], signature=bytes(64))
    node.take(row[0])
    (went,) = passed_on(node.take(*row[1:]))
    assert node.held() == 2 * FLUSHES and went.signature == row[-1].signature


def test_a_row_whose_last_signature_is_forged_counts_up_to_it() -> None:
    node, row = Node(), flushes(ORIGIN)
    node.take(row[0])
    effects = node.take(*row[1:-1], replace(row[-1], signature=bytes(64)))
    assert node.held() == 2 * (FLUSHES - 1)
    assert "flood_refused_forged" in {getattr(effect, "metric", "") for effect in effects}


def test_a_row_that_ends_with_what_no_spec_allows_counts_up_to_it() -> None:
    node, row = Node(), flushes(ORIGIN)
    chain = fold_to(row, FLUSHES)
    bad = signed(Batch(ORIGIN, 2 * FLUSHES, 2 * FLUSHES, (SPEC.scalar_limit() + 1,)), chain)
    node.take(row[0])
    node.take(*row[1:], replace(bad, prev=b""))
    assert node.held() == 2 * FLUSHES


@pytest.mark.parametrize("known", [0, 1])
def test_a_row_longer_than_its_origins_rate_counts_as_far_as_that_goes(known: int) -> None:
    node, row = Node(replace(SPEC, rate_limit=1.0, rate_burst=9)), flushes(ORIGIN)
    node.take(*row[:known])
    node.take(*row[known:])
    assert node.held() == 8
    assert len(row) * 2 > 9


def test_a_row_of_steps_far_ahead_costs_no_check() -> None:
    node = Node()
    node.take(flushes(ORIGIN)[0])
    node.checked = 0
    far = SPEC.period * (SPEC.max_periods_ahead + 2)
    chain, rows = fold_to(flushes(ORIGIN), 1), []
    for at in range(3):
        batch = Batch(ORIGIN, 2 + 2 * at, far + 2 * at, (1, 2))
        rows.append(replace(signed(batch, chain), prev=b""))
        chain = fold(chain, batch)
    effects = node.take(*rows)
    assert node.checked == 0 and node.held() == 2
    assert "flood_refused_future" in {getattr(effect, "metric", "") for effect in effects}


def test_two_histories_in_one_frame_are_in_the_state_before_they_are_taken_out() -> None:
    node, other = Node(), signed(Batch(ORIGIN, 0, 0, (5, 4)), first_chain(RUN, ORIGIN))
    state = State()
    effects = node.take(*flushes(OTHER, 1), *flushes(ORIGIN, 1), other, *flushes(NEXT, 1))
    for effect in effects:
        match effect:
            case Apply(batches):
                state.add(batches)
            case Retract(batches):
                state.add(batches, -1)
    assert node.machine.cut == {ORIGIN} and {origin for origin, _ in state.held} == {OTHER, NEXT}


def test_a_row_that_is_known_in_part_or_in_whole_is_no_doubt() -> None:
    node, row = Node(), flushes(ORIGIN)
    node.take(*row[:5])
    node.checked = 0
    node.take(*row[3:9])
    assert node.held() == 18 and node.checked == 1
    assert not passed_on(node.take(*row[2:8])) and node.held() == 18 and node.checked == 1


def test_a_row_of_another_history_is_proof_as_its_segments_are() -> None:
    node, row = Node(), flushes(ORIGIN)
    node.take(*row[:6])
    node.take(*flushes(ORIGIN, scalars=(5, 4)))
    assert node.machine.cut == {ORIGIN}


@pytest.mark.parametrize("known", [0, 4])
def test_new_rows_are_free_and_copies_in_them_are_paid_for(known: int) -> None:
    node, row = Node(), flushes(ORIGIN)
    node.take(*row[: known + 1])
    pace = node.machine._links[NEIGHBOUR].pace.repeats
    full = allowed(SPEC, 1)[1]
    pace.left = full - 1000
    node.take(*row[1:])
    assert pace.left == full - 1000 - sum(cost_of(segment.batch) for segment in row[1 : known + 1])


def test_rows_are_no_longer_than_a_segment_and_begin_anew_where_a_chain_is_named() -> None:
    long = flushes(ORIGIN, 5, tuple(range(300)))
    assert [len(row) for row in in_rows(long)] == [3, 2] and 3 * 300 <= MAX_SEGMENT < 4 * 300
    named = [*long[:2], replace(long[2], prev=b"x" * 16)]
    assert [len(row) for row in in_rows(named)] == [2, 1]
    gap = [long[0], long[2]]
    assert [len(row) for row in in_rows(gap)] == [1, 1]


@given(
    cuts=st.lists(st.integers(0, 2 * FLUSHES), max_size=6),
    order=st.permutations(list(range(FLUSHES))),
    forged=st.sets(st.integers(0, FLUSHES - 1), max_size=2),
    sorted_=st.booleans(),
)
def test_frames_of_any_size_come_to_no_less_than_segments_alone(
    cuts: list[int], order: list[int], forged: set[int], sorted_: bool
) -> None:
    """No less: where a later signature covers a forged one, the messages count."""
    row = flushes(ORIGIN)
    row = [replace(each, signature=bytes(64)) if at in forged else each for at, each in enumerate(row)]
    sent = [row[at] for at in (sorted(order) if sorted_ else order)]
    alone, framed = Node(), Node()
    for segment in sent:
        alone.take(segment)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
    for first, last in zip(bounds, bounds[1:], strict=False):
        if NEIGHBOUR in framed.machine._links:
            framed.take(*sent[first:last])
    assert framed.held() >= alone.held()
    history = framed.machine._sources.get(ORIGIN)
    if history is not None and framed.held():
        assert history.history.chain == fold_to(row, framed.held() // 2)
