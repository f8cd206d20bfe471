"""A relay's bandwidth: what it carries is counted, held to its caps, and shared out among the pairs that use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from peerloom.node.seams import MessageStream
from peerloom.node.throttle import Caps
from peerloom.protocol.messages import Chunk
from peerloom.protocol.relay_desk import DeskLimits
from peerloom.protocol.services import EXCHANGE
from tests.unit.node.reach_swarm import ReachSwarm
from tests.unit.node.test_tunnel import echo, eventually, placed, through_relays_alone


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[ReachSwarm]:
    async with ReachSwarm(tmp_path) as made:
        yield made


@pytest.mark.parametrize("capped", ["upload", "download"])
async def test_what_is_relayed_is_counted_and_under_the_relays_caps(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch, capped: str
) -> None:
    """2 MB there and back at 2 MB/s: no faster than the cap allows, by the clock; no bound on a busy machine."""
    rate, chunk = 2_000_000, bytes(1 << 18)
    relay = await swarm.join(caps=Caps(**{capped: rate}))
    node, caller = [await swarm.join() for _ in range(2)]
    node.handler.on_exchange = echo
    through_relays_alone(caller, monkeypatch)
    async with placed(swarm, node, relay) as record:
        stream = await caller.transport.open(record, EXCHANGE)
        loop, before = asyncio.get_running_loop(), relay.transport.bytes_moved()
        began, moved = loop.time(), 0
        for index in range(8):
            await stream.send(Chunk(index << 18, chunk))
            assert await stream.receive() is not None
            moved += 2 * len(chunk)
        seconds = loop.time() - began
        after = relay.transport.bytes_moved()
        await stream.close()
        assert min(now - then for now, then in zip(after, before, strict=True)) >= moved
        assert moved <= rate * (seconds + 0.3), f"{moved} bytes in {seconds:.2f} s"


PIECE = bytes(1 << 16)


async def test_a_greedy_pair_leaves_another_its_half_of_a_relay(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one pair sends without a pause, another moves about as much as it."""
    rate, pieces = 1_000_000, 16
    relay = await swarm.join(DeskLimits(rate=rate))
    node, greedy, modest = [await swarm.join() for _ in range(3)]
    node.handler.on_exchange = echo
    for caller in (greedy, modest):
        through_relays_alone(caller, monkeypatch)
    async with placed(swarm, node, relay) as record:
        endless, short = [await each.transport.open(record, EXCHANGE) for each in (greedy, modest)]
        jobs = [asyncio.create_task(sends(endless, 1 << 20)), asyncio.create_task(hears(endless, 1 << 20))]
        try:
            await eventually(lambda: relay.counted.get("relayed_bytes", 0.0) > 3 * rate)
            before = relay.counted["relayed_bytes"]
            await asyncio.gather(sends(short, pieces), hears(short, pieces))
            own = 2 * pieces * len(PIECE)
            assert own / 2 < relay.counted["relayed_bytes"] - before - own < 2.5 * own
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await asyncio.gather(endless.close(), short.close(), return_exceptions=True)


async def sends(stream: MessageStream[Any], pieces: int) -> None:
    for _ in range(pieces):
        await stream.send(Chunk(0, PIECE))


async def hears(stream: MessageStream[Any], pieces: int) -> None:
    for _ in range(pieces):
        assert await stream.receive() is not None
