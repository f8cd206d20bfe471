"""What a neighbour may ask and repeat: endless asking is refused, counted, at last punished; honest repair never is."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from peerloom.protocol import flood_pace
from peerloom.protocol.effects import Count, ScorePeer
from peerloom.protocol.flood_events import (
    Apply,
    Drop,
    FloodEffect,
    LinkDown,
    LinkUp,
    PeersSeen,
    Question,
    Received,
    Send,
)
from peerloom.protocol.flood_messages import (
    Batch,
    FrameBody,
    HashQuery,
    HashReply,
    Proof,
    Segment,
    Segments,
    Versions,
    Want,
    Wants,
    first_chain,
    fold,
)
from peerloom.protocol.flood_pace import TALK_BURST, allowed
from tests.unit.protocol.flood_fabric import RUN, SPEC, Fabric, machine, peer, signed

OWN, NEIGHBOUR, ORIGIN = (peer(index) for index in range(3))
START = first_chain(RUN, ORIGIN)
LONG = Batch(ORIGIN, 0, 0, tuple(range(1000)))
LOW = replace(SPEC, rate_limit=100.0, rate_burst=5000)
PACED = ("wants", "repeats", "talk", "pace")


class Node:
    """A machine that holds 1,000 messages, and what came of all that its neighbour sent."""

    def __init__(self) -> None:
        self.machine = machine(OWN, LOW)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.dropped = self.scored = 0
        self.machine.handle(PeersSeen((NEIGHBOUR, ORIGIN, LIAR)), 0.0)
        self.machine.handle(LinkUp(NEIGHBOUR), 0.0)
        assert self.take(Segments((signed(LONG, START),)))

    def take(self, body: FrameBody) -> list[FloodEffect]:
        effects = self.machine.handle(Received(NEIGHBOUR, body), self.now)
        for effect in effects:
            if isinstance(effect, Count):
                self.counts[effect.metric.removeprefix("flood_refused_")] += int(effect.amount)
        self.dropped += Drop(NEIGHBOUR, "pace") in effects
        self.scored += ScorePeer(NEIGHBOUR, "flood_pace") in effects
        return effects

    def until_dropped(self, body: FrameBody, most: int) -> list[list[FloodEffect]]:
        """Sends one thing again and again."""
        found = []
        while not self.dropped:
            found.append(self.take(body))
            assert len(found) <= most
        return found


LIAR = peer(9)
PROOF = Proof(*(signed(Batch(LIAR, 0, 0, (value,)), first_chain(RUN, LIAR)) for value in (1, 2)))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (Wants((Want(ORIGIN, 0),)), "wants"),
        (Wants((Want(peer(7), 0),) * 256), "wants"),  # of nobody
        (Segments((signed(LONG, START),)), "repeats"),
        (Segments((signed(Batch(ORIGIN, 2000, 2000, (1,)), START),) * 64), "repeats"),  # a gap that never fills
        (PROOF, "repeats"),
        (HashReply(1, bytes(32)), "repeats"),
        (Versions(()), "talk"),
        (HashQuery(1, ()), "talk"),
    ],
)
def test_asking_or_repeating_without_end_is_refused_counted_and_at_last_punished(body: FrameBody, reason: str) -> None:
    node = Node()
    before = node.machine.total()
    effects = node.until_dropped(body, 10_000)
    assert node.counts[reason] >= 1 and node.counts["pace"] == 1 and node.scored == 1
    first = next(index for index, each in enumerate(effects) if Count(f"flood_refused_{reason}") in each)
    answers = (Apply, Question, Send) if reason != "talk" else (Apply, Question)
    for each in effects[first:]:
        assert not [effect for effect in each if isinstance(effect, answers)], "what is refused costs nothing more"
    assert node.machine.total() == before
    assert not node.take(body), "the link is gone"


def test_what_is_served_is_bounded_whatever_is_asked() -> None:
    node = Node()
    served = 0
    for effects in node.until_dropped(Wants((Want(ORIGIN, 0),)), 10_000):
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.body, Segments):
                served += sum(len(segment.batch.scalars) for segment in effect.body.segments)
    assert 5000 * flood_pace.LEAST_ORIGINS < served <= allowed(LOW, 1)[1] + 1000


def test_a_refused_neighbour_is_heard_again_once_its_bucket_fills() -> None:
    node = Node()
    for _ in range(TALK_BURST):
        node.take(Versions(()))
    assert node.counts["talk"] >= 1 and not node.dropped
    node.now += 10.0
    node.take(Versions(()))
    assert node.counts["talk"] == 1


def test_a_question_too_many_is_answered_with_nothing_so_that_nobody_waits() -> None:
    node = Node()
    asked = [node.take(HashQuery(number, ())) for number in range(TALK_BURST // flood_pace.HASH_COST + 1)]
    assert Question(NEIGHBOUR, HashQuery(0, ())) in asked[0]
    assert Send(NEIGHBOUR, HashReply(len(asked) - 1, b"")) in asked[-1]


def test_another_link_does_not_fill_the_buckets() -> None:
    node = Node()
    node.until_dropped(Versions(()), 1000)
    for _ in range(3):
        node.machine.handle(LinkDown(NEIGHBOUR), 1.0)
        effects = node.machine.handle(LinkUp(NEIGHBOUR), 1.0)
        assert Drop(NEIGHBOUR, "pace") in effects
        assert not [effect for effect in effects if isinstance(effect, Send)]


def test_strangers_that_come_and_go_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerloom.protocol.flood_repair.MAX_PACES", 10)
    node = Node()
    for index in range(10, 40):
        node.machine.handle(LinkUp(peer(index)), 0.0)
        node.machine.handle(LinkDown(peer(index)), 0.0)
    assert len(node.machine._paces) <= 10 and NEIGHBOUR in node.machine._paces


def test_the_messages_of_an_origin_that_was_cut_off_bring_its_proof_once() -> None:
    node = Node()
    node.take(PROOF)
    bad = signed(Batch(LIAR, 0, 0, (1,)), first_chain(RUN, LIAR))
    sent = [effect for effect in node.take(Segments((bad,) * 50)) if isinstance(effect, Send)]
    assert sent == [Send(NEIGHBOUR, PROOF)]


def test_new_messages_are_never_in_vain() -> None:
    """A neighbour through which all comes that there is pays nothing for it, however much."""
    node = Node()
    node.machine = machine(OWN, replace(LOW, rate_limit=1e6, rate_burst=5000))
    node.machine.handle(PeersSeen((NEIGHBOUR, ORIGIN)), 0.0)
    node.machine.handle(LinkUp(NEIGHBOUR), 0.0)
    chain, most = START, int(allowed(LOW, 16)[1] / 1000)
    for flush in range(2 * most):
        node.now += 1.0
        batch = Batch(ORIGIN, flush * 1000, min(flush * 1000, 99_000 + flush), (1,) * 1000)
        if batch.end_step > SPEC.max_steps or batch.sequence > batch.step:
            break
        node.take(Segments((Segment(batch, signed(batch, chain).signature),)))
        chain = fold(chain, batch)
    assert node.machine.total() == 100_000
    assert not any(node.counts[reason] for reason in PACED)


@pytest.mark.parametrize("seed", range(4))
def test_an_honest_swarm_under_repair_never_meets_the_budgets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves that were parted give each other all that a burst allows, at one moment, over links that lose and break.

    The floors are taken away: what is left is what the origins' own rates give.
    """
    monkeypatch.setattr(flood_pace, "LEAST_PAGES", 0)
    monkeypatch.setattr(flood_pace, "LEAST_ORIGINS", 1)
    rng = random.Random(seed)
    burst = 300
    fabric = Fabric(9, rng, replace(LOW, rate_burst=burst, flush_steps=5, period=5000))
    for half in ((0, 1, 2, 3), (4, 5, 6, 7)):
        for a in half:
            for b in half:
                if a < b:
                    fabric.link(a, b)
    for _ in range(burst // 5):
        for index in range(8):
            fabric.steps(index, 5)
        for pair in list(fabric.wires):
            fabric.deliver(pair, lose=0.1, repeat=0.1, reorder=rng.random() < 0.2)
    for _ in range(6):
        a, b = rng.randrange(4), rng.randrange(4, 8)
        fabric.link(a, b)
        fabric.link(8, rng.randrange(8))  # a newcomer that asks for everything
        for _ in range(40):
            for pair in list(fabric.wires):
                fabric.deliver(pair, lose=0.1)
        fabric.unlink(a, b)
    for a, b in ((0, 4), (1, 5), (8, 2), (8, 6)):
        fabric.link(a, b)
    fabric.settle()
    assert {member.state.digest() for member in fabric.members} == {fabric.central()}
    refused = {f"flood_refused_{reason}" for reason in PACED}
    assert not [member.counts for member in fabric.members if member.counts.keys() & refused]
