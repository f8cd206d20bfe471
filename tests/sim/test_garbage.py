"""A peer that breaks the protocol is refused, scored and left; the round of the node it meets ends in time."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator

import pytest
from xxhash import xxh3_128

from peerloom.node.memory_discovery import MemoryDiscovery
from peerloom.node.seams import ExchangeStream
from peerloom.protocol.errors import PeerloomError
from peerloom.protocol.messages import Accept, Chunk, Commit, Decline, ExchangeMessage, Hold, Offer, PayloadEnd
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.types import PeerRecord
from tests.sim.swarm import TIMEOUT_S, Plan, Swarm, identity, play
from tests.sim.test_swarm import SLACK_S

GOOD = struct.pack("<64f", *([0.5] * 64))
NAN = struct.pack("<64f", *([math.nan] * 64))


async def after_accept(kind: str, offer: Offer) -> AsyncIterator[ExchangeMessage]:
    """What the fake sends once its offer is taken."""
    match kind:
        case "wrong digest":
            yield Chunk(0, GOOD)
            yield PayloadEnd(bytes(16))
        case "nan":
            yield Chunk(0, NAN)
            yield PayloadEnd(xxh3_128(NAN).digest())
        case "out of order":
            yield Chunk(128, GOOD[128:])
            yield Chunk(0, GOOD[:128])
        case "crumbs":
            for offset in range(0, len(GOOD), 4):
                yield Chunk(offset, GOOD[offset : offset + 4])
                await asyncio.sleep(0.2 * TIMEOUT_S)
        case "endless":
            for offset in range(0, 1 << 20, len(GOOD)):
                yield Chunk(offset, GOOD)
        case "second offer":
            yield offer
        case "early commit":
            yield Commit()
        case "holds":
            yield Hold()


async def misbehave(swarm: Swarm, kind: str, record: PeerRecord) -> list[ExchangeMessage]:
    """Offers until it is accepted once, then plays its trick; returns what came back."""
    fake = swarm.hub.transport(identity(99), run_id=swarm.plan.spec.run_id, spec_hash=swarm.plan.spec.spec_hash())
    offer = Offer("ab" * 16, record.round, record.layout_digest, "fp32", len(GOOD))
    stream: ExchangeStream = await fake.open(record, EXCHANGE)
    answers: list[ExchangeMessage] = []
    try:
        await stream.send(offer)
        while (message := await stream.receive()) is not None:
            answers.append(message)
            if isinstance(message, Decline):
                break
            if isinstance(message, Accept):
                async for trick in after_accept(kind, offer):
                    await stream.send(trick)
    except PeerloomError:
        return answers  # cut off, as it deserves
    finally:
        await stream.close()
        await fake.stop()
    return answers


@pytest.mark.parametrize(
    "kind",
    ["wrong digest", "nan", "out of order", "endless", "crumbs", "second offer", "early commit", "holds", "silence"],
)
def test_garbage_is_refused_and_the_round_ends(kind: str) -> None:
    async def scenario(swarm: Swarm) -> None:
        member = swarm.start(0)
        await swarm.until_round(1)
        own = member.facts.record()
        discovery = MemoryDiscovery(swarm.registry, identity(99), swarm.plan.spec.run_id)
        changes = {"peer_id": identity(99), "instance": "ff", "name": "fake", "state": "training"}
        await discovery.publish(PeerRecord(**{name: getattr(own, name) for name in own.__slots__} | changes))
        await member.context.view.refresh()
        answers = await misbehave(swarm, kind, own)
        assert any(isinstance(answer, Accept) for answer in answers), "the offer was not taken"
        rounds = member.facts.round
        await asyncio.sleep(30)
        assert member.facts.round > rounds + 3
        assert all(line["partner"] is None for line in member.rounds)
        assert member.count("gossip_broken") >= 1
        assert (member.count("peer_faults") >= 1) or kind == "silence"
        await swarm.drain()

    swarm = play(Plan(count=1), scenario)
    assert swarm.longest_wait() <= TIMEOUT_S + SLACK_S
