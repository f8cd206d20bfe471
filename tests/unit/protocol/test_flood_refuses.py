"""Bad input of every kind: a typed reason, counted, the state untouched."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from peerloom.protocol import flood_history
from peerloom.protocol.effects import Count, ScorePeer
from peerloom.protocol.flood import MAX_DOUBTS
from peerloom.protocol.flood_events import (
    Apply,
    Drop,
    Exiled,
    FloodEffect,
    Keep,
    LinkUp,
    PeersSeen,
    Received,
    Resync,
    Retract,
    Send,
    StepsDone,
)
from peerloom.protocol.flood_messages import (
    Batch,
    Head,
    Mark,
    Proof,
    Segment,
    Segments,
    Snapshot,
    Versions,
    Want,
    Wants,
    first_chain,
    fold,
    signed_bytes,
)
from tests.unit.protocol.flood_fabric import RUN, SPEC, Fabric, machine, peer, sign_as, signed

OWN, NEIGHBOUR, ORIGIN, STRANGER = (peer(index) for index in range(4))
START = first_chain(RUN, ORIGIN)
FIRST = Batch(ORIGIN, 0, 0, (5, -3, 7))
GOOD = signed(FIRST, START)
AFTER = fold(START, FIRST)


class Node:
    """A machine with one neighbour, and what came of the last message."""

    def __init__(self, **changes: object) -> None:
        self.machine = machine(OWN, replace(SPEC, **changes))  # type: ignore[arg-type]
        self.now = 0.0
        self.machine.handle(PeersSeen((NEIGHBOUR, ORIGIN)), 0.0)
        self.link()

    def link(self) -> None:
        self.machine.handle(LinkUp(NEIGHBOUR), self.now)

    def take(self, body: Segments | Segment | Versions | Wants | Proof) -> list[FloodEffect]:
        if isinstance(body, Segment):
            body = Segments((body,))
        return self.machine.handle(Received(NEIGHBOUR, body), self.now)

    def refused(self, body: Segments | Segment | Versions | Proof) -> str:
        """The reason for which a message was refused, nothing of the state being touched."""
        before = self.machine.versions()
        effects = self.take(body)
        assert self.machine.versions() == before
        assert not [effect for effect in effects if isinstance(effect, (Apply, Retract, Keep))]
        counted = [effect.metric for effect in effects if isinstance(effect, Count)]
        (reason,) = {metric.removeprefix("flood_refused_") for metric in counted if "refused" in metric}
        return reason


def scalars_of(effects: list[FloodEffect]) -> list[int]:
    return [scalar for each in effects if isinstance(each, Apply) for batch in each.batches for scalar in batch.scalars]


def test_a_good_batch_is_kept_applied_and_passed_on() -> None:
    node = Node()
    node.machine.handle(LinkUp(STRANGER), 0.0)
    effects = node.take(GOOD)
    assert [type(effect) for effect in effects if not isinstance(effect, Count)] == [Keep, Apply, Send]
    assert effects[0] == Keep(GOOD)
    assert effects[-1] == Send(STRANGER, Segments((GOOD,)))


def test_a_peer_that_asks_within_a_segment_again_and_again_costs_few_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    node, long = Node(), Batch(ORIGIN, 0, 0, tuple(range(1000)))
    node.take(signed(long, START))
    expected = {place: fold(START, replace(long, scalars=long.scalars[:place])) for place in range(1001)}
    history = node.machine._sources[ORIGIN].history
    for place in (999, 1, 31, 32, 33, 500, 1000, 0):
        assert history.chain_at(place) == expected[place]
    hashed = 0

    def counting(chain: bytes, batch: Batch) -> bytes:
        nonlocal hashed
        hashed += len(batch.scalars)
        return fold(chain, batch)

    monkeypatch.setattr(flood_history, "fold", counting)
    node.take(Segments(tuple(Segment(Batch(ORIGIN, 999, 999, (999,)), bytes(64)) for _ in range(100))))
    node.take(Wants(tuple(Want(ORIGIN, 990) for _ in range(100))))
    assert 0 < hashed <= 300 * flood_history.STRIDE  # a duplicate asks twice


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        (replace(GOOD, signature=bytes(64)), "forged"),
        (replace(GOOD, batch=replace(FIRST, scalars=(5, -3, 8))), "forged"),
        (replace(GOOD, batch=replace(FIRST, step=1)), "forged"),
        (replace(GOOD, batch=replace(FIRST, scalars=(5, -3))), "forged"),  # truncated
        (replace(GOOD, batch=replace(FIRST, scalars=(-3, 5, 7))), "forged"),  # reordered
        (signed(replace(FIRST, scalars=(1, SPEC.scalar_limit() + 1)), START), "bound"),
        (signed(replace(FIRST, scalars=(-SPEC.scalar_limit() - 1,)), START), "bound"),
        (signed(replace(FIRST, step=SPEC.max_steps - 2), START), "budget"),
        (signed(Batch(ORIGIN, 5, 4, (1,)), START), "budget"),  # more messages than steps
        (signed(replace(FIRST, step=101), START), "future"),
        (signed(Batch(ORIGIN, 3, 3, (1,)), AFTER), "gap"),
        (signed(Batch(STRANGER, 0, 0, (1,)), first_chain(RUN, STRANGER)), "origin"),
    ],
)
def test_a_bad_batch_is_refused_for_its_reason(segment: Segment, reason: str) -> None:
    node = Node()
    assert node.refused(segment) == reason


@pytest.mark.parametrize("reason", ["forged", "bound", "budget"])
def test_whoever_passes_on_what_no_honest_node_takes_is_scored_and_dropped(reason: str) -> None:
    bad = {
        "forged": replace(GOOD, signature=bytes(64)),
        "bound": signed(replace(FIRST, scalars=(2**31 - 1,)), START),
        "budget": signed(replace(FIRST, step=SPEC.max_steps), START),
    }[reason]
    effects = Node().take(bad)
    assert ScorePeer(NEIGHBOUR, f"flood_{reason}") in effects
    assert Drop(NEIGHBOUR, reason) in effects


def test_a_signature_of_another_run_is_forged_here() -> None:
    data = signed_bytes(type(RUN)("f" * 16), ORIGIN, FIRST.end, FIRST.end_step, AFTER)
    assert Node().refused(Segment(FIRST, sign_as(ORIGIN, data), START)) == "forged"


def test_a_replay_changes_nothing_and_is_nobodys_fault() -> None:
    node = Node()
    node.take(GOOD)
    effects = node.take(GOOD)
    assert effects == [Count("flood_duplicates", 3)]


def test_an_overlap_adds_what_is_new() -> None:
    node = Node()
    node.take(GOOD)
    longer = signed(replace(FIRST, scalars=(5, -3, 7, 9)), START)
    assert scalars_of(node.take(longer)) == [9]


def test_a_gap_is_asked_for_and_costs_nothing_however_often_it_comes() -> None:
    node = Node()
    ahead = signed(Batch(ORIGIN, 3, 3, (1,)), AFTER)
    effects = node.take(ahead)
    assert Send(NEIGHBOUR, Wants((Want(ORIGIN, 0),))) in effects
    for _ in range(100):
        assert node.take(ahead) == [Count("flood_refused_gap")]
    assert scalars_of(node.take(GOOD)) == [5, -3, 7]
    assert scalars_of(node.take(ahead)) == [1]


def test_what_was_refused_for_the_moment_is_taken_later() -> None:
    node = Node()
    far = signed(Batch(ORIGIN, 0, 101, (1,)), START)
    assert node.refused(far) == "future"
    node.machine.handle(StepsDone(0, 0, (1,) * 3), 0.0)
    assert scalars_of(node.take(far)) == [1]


def test_an_origin_that_sends_too_fast_waits_its_turn() -> None:
    node = Node(rate_limit=1.0, rate_burst=5)
    assert scalars_of(node.take(GOOD))
    more = signed(Batch(ORIGIN, 3, 3, (1, 1, 1)), AFTER)
    assert node.refused(more) == "rate"
    node.now = 2.0
    assert scalars_of(node.take(more)) == [1, 1, 1]


def test_a_forger_does_not_use_up_an_origins_rate() -> None:
    node = Node(rate_limit=0.001, rate_burst=5)
    node.refused(replace(GOOD, signature=bytes(64)))
    node.link()
    assert scalars_of(node.take(GOOD))


def test_an_unknown_origin_counts_once_enough_neighbours_hold_it() -> None:
    """Else who was away while an origin came and went would never be equal to the others again."""
    node = Node()
    node.machine.handle(LinkUp(peer(7)), 0.0)
    chain = first_chain(RUN, STRANGER)
    segment = signed(Batch(STRANGER, 0, 0, (4,)), chain)
    versions = Versions((Head(STRANGER, 1, fold(chain, segment.batch)),))
    node.take(versions)
    assert node.refused(segment) == "origin"
    effects = node.machine.handle(Received(peer(7), versions), 0.0)
    assert Send(peer(7), Wants((Want(STRANGER, 0),))) in effects
    assert scalars_of(node.take(segment)) == [4]


def test_two_histories_convict_their_origin_and_its_messages_are_taken_out() -> None:
    node = Node()
    node.machine.handle(LinkUp(STRANGER), 0.0)
    node.take(GOOD)
    other = signed(replace(FIRST, scalars=(5, 4)), START)
    effects = node.take(other)
    (kept,) = [effect.item for effect in effects if isinstance(effect, Keep)]
    assert isinstance(kept, Proof) and kept.origin == ORIGIN
    assert Retract((FIRST,)) in effects
    for neighbour in (NEIGHBOUR, STRANGER):
        assert Send(neighbour, kept) in effects
    assert node.machine.cut == {ORIGIN} and node.machine.total() == 0
    assert node.refused(GOOD) == "cut"
    witness = Node()
    witness.take(GOOD)
    assert Retract((FIRST,)) in witness.take(kept)
    assert Node().take(kept)[0] == Keep(kept)  # also before anything came of it


@pytest.mark.parametrize(
    "change",
    [
        lambda proof: replace(proof, other=proof.one),
        lambda proof: replace(proof, other=replace(proof.other, signature=bytes(64))),
        lambda proof: replace(proof, other=replace(proof.other, prev=bytes(16))),
        lambda proof: replace(proof, one=replace(proof.one, batch=replace(proof.one.batch, origin=NEIGHBOUR))),
    ],
)
def test_a_proof_that_proves_nothing_convicts_its_sender_alone(change: object) -> None:
    node = Node()
    proof = Proof(GOOD, signed(replace(FIRST, scalars=(5, 4)), START))
    node.take(GOOD)
    assert node.refused(change(proof)) == "false_proof"  # type: ignore[operator]
    assert not node.machine.cut


def test_an_honest_history_in_other_pieces_is_no_lie() -> None:
    node = Node()
    node.take(GOOD)
    rest = Batch(ORIGIN, 3, 3, (1, 2))
    node.take(signed(rest, AFTER))
    for first, last in ((0, 5), (1, 5), (2, 3), (4, 5)):
        scalars = (5, -3, 7, 1, 2)
        prev = fold(START, Batch(ORIGIN, 0, 0, scalars[:first]))
        node.take(signed(Batch(ORIGIN, first, first, scalars[first:last]), prev))
    assert not node.machine.cut and node.machine.total() == 5


def test_a_node_whose_own_key_lies_learns_that_it_is_out() -> None:
    node = Node()
    node.machine.handle(StepsDone(0, 0, (1, 2)), 0.0)
    chain = first_chain(RUN, OWN)
    effects = node.take(signed(Batch(OWN, 0, 0, (1, 3)), chain))
    assert Exiled() in effects
    assert node.machine.handle(StepsDone(2, 2, (1,)), 0.0) == []


def test_a_node_that_lost_its_log_takes_its_own_messages_back_before_it_goes_on() -> None:
    node = Node()
    chain = first_chain(RUN, OWN)
    own = signed(Batch(OWN, 0, 0, (1, 3)), chain)
    assert not node.machine.settled()
    node.take(Versions((Head(OWN, 2, fold(chain, own.batch)),)))
    assert not node.machine.settled()
    assert scalars_of(node.take(own)) == [1, 3]
    assert node.machine.settled() and node.machine.next_sequence == 2 and node.machine.next_step == 2


def test_a_link_that_only_ever_sends_what_cannot_be_checked_is_closed() -> None:
    node = Node()
    node.machine.handle(LinkUp(STRANGER), 0.0)
    node.machine.handle(Received(STRANGER, Segments((GOOD,))), 0.0)
    bad = replace(signed(Batch(ORIGIN, 3, 3, (1,)), AFTER, tell=False), signature=bytes(64))
    assert node.take(bad) == [Count("flood_refused_doubtful"), Send(NEIGHBOUR, Wants((Want(ORIGIN, 2),)))]
    for _ in range(MAX_DOUBTS):
        effects = node.take(bad)
    assert Drop(NEIGHBOUR, "forged") in effects


def test_wants_for_what_is_not_there_are_answered_with_nothing() -> None:
    node = Node()
    node.take(GOOD)
    assert node.take(Wants((Want(ORIGIN, 3), Want(ORIGIN, 99), Want(STRANGER, 0)))) == []
    rest = replace(GOOD, batch=FIRST.since(1), prev=fold(START, replace(FIRST, scalars=(5,))))
    assert node.take(Wants((Want(ORIGIN, 1),))) == [Send(NEIGHBOUR, Segments((rest,)))]


def test_a_liar_counted_in_an_adopted_state_makes_the_node_fetch_another() -> None:
    proof = Proof(GOOD, signed(replace(FIRST, scalars=(5, 4)), START))
    node = Node()
    mark = Mark(ORIGIN, 3, 3, AFTER, GOOD.signature)
    assert node.machine.check(Snapshot((mark,)))
    assert node.machine.adopt(Snapshot((mark,))) == []
    assert Resync(ORIGIN) in node.take(proof)


@pytest.mark.parametrize(
    "changes",
    [{"next": 2}, {"chain": bytes(16)}, {"signature": bytes(64)}, {"origin": STRANGER}, {"step": 2}, {"step": 10**9}],
)
def test_a_snapshot_that_no_origin_signed_does_not_check(changes: dict[str, object]) -> None:
    mark = replace(Mark(ORIGIN, 3, 3, AFTER, GOOD.signature), **changes)  # type: ignore[arg-type]
    assert not machine(OWN).check(Snapshot((mark,)))


def test_a_late_joiner_goes_on_from_a_snapshot_as_if_it_had_seen_all() -> None:
    fabric = Fabric(4, random.Random(3))
    for a, b in ((0, 1), (1, 2)):
        fabric.link(a, b)
    for _ in range(20):
        fabric.steps(fabric.rng.randrange(3), 5)
    fabric.settle()
    donor, late = fabric.members[0], fabric.members[3]
    snapshot = donor.machine.snapshot()
    assert late.machine.check(snapshot)
    late.state.sums.update(donor.state.sums)
    late.state.add(late.machine.adopt(snapshot))
    late.step = late.machine.next_step
    fabric.steps(3, 5)
    fabric.link(3, 1)
    fabric.steps(0, 5)
    fabric.settle()
    assert {member.state.digest() for member in fabric.members} == {fabric.central()}
    assert late.machine.beyond(()) is None  # it cannot go back before its snapshot, and says so
    heads = snapshot.marks
    beyond = donor.machine.beyond([Head(mark.origin, mark.next, mark.chain) for mark in heads])
    assert beyond is not None and sum(len(batch.scalars) for batch in beyond) == 10
