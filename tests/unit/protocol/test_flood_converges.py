"""All nodes end with one state, equal to a central run over the same messages, whatever happens on the way."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from peerloom.protocol.flood_events import LinkDown, LinkUp, Received
from peerloom.protocol.flood_messages import Batch, Segments, first_chain, fold
from tests.unit.protocol.flood_fabric import RUN, Fabric, peer, signed

PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def connect(fabric: Fabric, rng: random.Random, members: list[int]) -> None:
    """A random connected graph."""
    for place, index in enumerate(members[1:], 1):
        fabric.link(index, rng.choice(members[:place]))
    for _ in range(len(members) // 2):
        a, b = rng.sample(members, 2)
        fabric.link(a, b)


@PROPERTY
@given(st.integers(0, 2**32), st.integers(2, 9))
def test_any_graph_any_order_with_loss_repeats_partitions_joins_and_leaves(seed: int, count: int) -> None:
    rng = random.Random(seed)
    fabric = Fabric(count, rng)
    there = list(range(max(2, count - 2)))  # the others join later
    connect(fabric, rng, there)
    for _ in range(150):
        match rng.randrange(12):
            case 0 | 1 | 2:
                fabric.steps(rng.choice(there), rng.choice([1, 5, 5, 13]))
            case 3:
                for pair in list(fabric.wires):  # a partition: half of the links go
                    if rng.random() < 0.5:
                        fabric.unlink(*pair)
            case 4:
                connect(fabric, rng, there)
            case 5:
                newcomers = [index for index in range(count) if index not in there]
                if newcomers:
                    there.append(rng.choice(newcomers))
                    fabric.link(there[-1], rng.choice(there[:-1]))
            case 6:
                fabric.restart(rng.choice(there))
            case _:
                for pair in list(fabric.wires):
                    fabric.deliver(pair, lose=0.1, repeat=0.2, reorder=rng.random() < 0.3)
    connect(fabric, rng, list(range(count)))
    fabric.settle()
    digests = {member.state.digest() for member in fabric.members}
    assert digests == {fabric.central()}
    assert not any(member.machine.cut for member in fabric.members)
    assert not any("forged" in metric for member in fabric.members for metric in member.counts)


@PROPERTY
@given(st.integers(0, 2**32), st.integers(3, 8))
@example(13037358, 3)  # equal messages after a fork, without the chain: nobody is to be blamed for their signature
def test_a_liar_is_cut_off_by_all_and_all_end_without_it(seed: int, count: int) -> None:
    """The last node tells others other histories, that part somewhere; it may stop, go on, or cut batches anew."""
    rng = random.Random(seed)
    fabric = Fabric(count, rng)
    honest, liar = list(range(count - 1)), count - 1
    connect(fabric, rng, honest)
    victims = rng.sample(honest, min(len(honest), rng.choice([2, 2, 3])))
    same = tuple(rng.randint(-9, 9) for _ in range(rng.randrange(8)))
    for index, victim in enumerate(victims):
        fabric.feed(victim, LinkUp(peer(liar)))
        scalars = (*same, index + 1, *(rng.randint(-9, 9) for _ in range(rng.randrange(5))))
        chain, at = first_chain(RUN, peer(liar)), 0
        while at < len(scalars):
            segment = signed(Batch(peer(liar), at, at, scalars[at : at + rng.randint(1, 4)]), chain)
            fabric.feed(victim, Received(peer(liar), Segments((segment,))))
            chain, at = fold(chain, segment.batch), segment.batch.end
        fabric.feed(victim, LinkDown(peer(liar)))
    for _ in range(60):
        fabric.steps(rng.choice(honest), 5)
        for pair in list(fabric.wires):
            fabric.deliver(pair, lose=0.1)
    fabric.settle()
    for index in honest:
        assert fabric.members[index].machine.cut == {peer(liar)}
    assert {fabric.members[index].state.digest() for index in honest} == {fabric.central()}
    blamed = ("flood_refused_forged", "flood_refused_false_proof")
    assert not any(fabric.members[index].counts[metric] for index in honest for metric in blamed)


def test_a_newcomer_pulls_page_after_page_without_waiting_for_the_next_comparison() -> None:
    fabric = Fabric(13, random.Random(5))
    for index in range(11):
        fabric.link(index, index + 1)
    for _ in range(30):
        for index in range(12):
            fabric.steps(index, 40)
        fabric.settle(rounds=1)
    at = fabric.now
    fabric.link(12, 4)
    fabric.link(12, 7)
    fabric.settle(rounds=1)
    assert fabric.now == at
    assert fabric.members[12].machine.total() == 12 * 30 * 40
    assert fabric.members[12].state.digest() == fabric.central()
    assert fabric.members[12].counts["flood_duplicates"] < 12 * 30 * 40 / 10
