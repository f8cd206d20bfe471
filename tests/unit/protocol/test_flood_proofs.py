"""Proofs against keys that somebody made up: none is kept, none costs more than its sender pays, none closes a link."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from peerloom.protocol import flood_held, flood_liars
from peerloom.protocol.effects import Count
from peerloom.protocol.flood import FloodMachine
from peerloom.protocol.flood_events import Drop, FloodEffect, Keep, LinkUp, PeersSeen, Received, Send
from peerloom.protocol.flood_messages import Batch, Proof, Segments, Snapshot, Versions, first_chain
from peerloom.protocol.flood_repair import MAX_TOLD
from tests.unit.protocol.flood_fabric import RUN, SPEC, machine, peer, signed

OWN, NEIGHBOUR, OTHER = (peer(index) for index in range(3))


def proof(index: int) -> Proof:
    origin = peer(index)
    return Proof(*(signed(Batch(origin, 0, 0, (value,)), first_chain(RUN, origin)) for value in (1, 2)))


def node(*known: int) -> FloodMachine:
    made = machine(OWN)
    made.handle(PeersSeen((NEIGHBOUR, OTHER, *map(peer, known))), 0.0)
    made.handle(LinkUp(NEIGHBOUR), 0.0)
    return made


def told(effects: list[FloodEffect]) -> list[Proof]:
    return [effect.body for effect in effects if isinstance(effect, Send) and isinstance(effect.body, Proof)]


def test_proofs_against_keys_that_nobody_knows_are_not_kept_and_at_last_punished() -> None:
    made = machine(OWN, replace(SPEC, rate_limit=100.0, rate_burst=5000))
    made.handle(PeersSeen((NEIGHBOUR, OTHER)), 0.0)
    made.handle(LinkUp(NEIGHBOUR), 0.0)
    counts: Counter[str] = Counter()
    for index in range(100, 10_100):
        for effect in made.handle(Received(NEIGHBOUR, proof(index)), 0.0):
            assert not isinstance(effect, Keep)
            counts[effect.metric if isinstance(effect, Count) else type(effect).__name__] += 1
        if counts["Drop"]:
            break
    assert counts["flood_refused_origin"] and counts["Drop"] == 1 and not made.cut


def test_a_proof_counts_once_its_origin_does() -> None:
    made = node()
    made.handle(Received(NEIGHBOUR, proof(7)), 0.0)
    assert not made.cut
    made.handle(PeersSeen((NEIGHBOUR, OTHER, peer(7))), 1.0)
    effects = made.handle(Received(NEIGHBOUR, proof(7)), 30.0)  # as the next comparison brings it
    assert made.cut == {peer(7)} and Keep(proof(7)) in effects


def test_proofs_are_told_a_few_at_a_time_and_in_turn() -> None:
    count = MAX_TOLD * 2 + 5
    made = machine(OWN)
    made.adopt(Snapshot((), tuple(proof(100 + index) for index in range(count))))
    made.handle(PeersSeen((NEIGHBOUR,)), 0.0)
    made.handle(LinkUp(NEIGHBOUR), 0.0)
    turns = [told(made.handle(Received(NEIGHBOUR, Versions(())), 30.0 * turn)) for turn in range(1, 5)]
    assert [len(turn) for turn in turns] == [MAX_TOLD, MAX_TOLD, 5, MAX_TOLD]
    assert len({each.origin for turn in turns[:3] for each in turn}) == count
    known = tuple(sorted(made.cut))[1:]
    assert len(told(made.handle(Received(NEIGHBOUR, Versions((), known)), 200.0))) == 1


def test_no_more_are_cut_off_than_a_version_vector_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flood_held, flood_liars):
        monkeypatch.setattr(module, "MAX_FLOOD_CUT", 2)
    made = node(3, 4, 5)
    for index in (3, 4):
        made.handle(Received(NEIGHBOUR, proof(index)), 0.0)
    one, two = proof(5).one, proof(5).other
    made.handle(Received(NEIGHBOUR, Segments((one,))), 0.0)
    effects = made.handle(Received(NEIGHBOUR, Segments((two,))), 0.0)
    assert Count("flood_refused_origins") in effects and len(made.versions().cut) == 2
    assert not [effect for effect in effects if isinstance(effect, Drop)]
    made.adopt(Snapshot((), (proof(6),)))
    assert len(made.cut) == 2
