"""Offers that wait take no memory for what they announce: that of an exchange does not grow with those who ask."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from xxhash import xxh3_128

from peerloom.node.gossip_driver import GossipDriver
from peerloom.node.memory_transport import MemoryHub, MemoryTransport
from peerloom.node.payload import Pace, outgoing
from peerloom.node.seams import ExchangeStream
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.protocol.effects import FinishRound
from peerloom.protocol.events import PeersChanged, PeerSeen, RoundStarted
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.gossip_parts import MAX_PARKED
from peerloom.protocol.messages import Accept, Ack, Chunk, Commit, Decline, Offer, PayloadEnd
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId, PeerRecord, Span

from .wire import Handler, record_of

MODEL_BYTES = 8 << 20
LAYOUT = "ab" * 32
SELF = PeerId("self")


class Boxes:
    """A worker's outbox and inbox, and how often the inbox was asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self._boxes = [memoryview(bytearray(MODEL_BYTES)) for _ in range(2)]

    def inbox(self, pieces: Span = (0, 1)) -> memoryview:
        self.asked += 1
        return self._boxes[0]

    def outbox(self, pieces: Span = (0, 1)) -> memoryview:
        return self._boxes[1].toreadonly()

    async def interrupt(self) -> None:
        """Trains nothing."""


async def offer(transport: MemoryTransport, record: PeerRecord, number: int, heard: Counter[str]) -> None:
    """A peer's whole side: its offer, and the exchange if it is taken."""
    stream: Any = await transport.open(record, EXCHANGE)
    await stream.send(Offer(f"{number:032x}", 0, LAYOUT, "fp32", MODEL_BYTES))
    while (message := await stream.receive()) is not None:
        heard[type(message).__name__] += not isinstance(message, Chunk)
        if isinstance(message, Accept):
            await _swap(stream)
        elif isinstance(message, (Decline, Ack)):
            break
    await stream.close()


async def _swap(stream: ExchangeStream) -> None:
    async def send() -> None:
        for message in outgoing(memoryview(bytes(MODEL_BYTES)), Pace(stream.chunk_bytes)):
            await stream.send(message)

    sending, digest = asyncio.create_task(send()), xxh3_128()
    while not isinstance(message := await stream.receive(), PayloadEnd):
        assert isinstance(message, Chunk)
        digest.update(message.data)
    assert message.digest == digest.digest()
    await sending
    await stream.send(Commit())


def peaks(count: int) -> tuple[int, int, Counter[str], Boxes]:
    """With so many peers that ask while this node trains: peak bytes until then, and of the exchange after it."""
    found: list[int] = []
    heard: Counter[str] = Counter()
    boxes = Boxes()

    async def body() -> None:
        clock = VirtualClock()
        hub = MemoryHub(clock, random.Random(0), latency_s=0.01)
        peers = [PeerId(f"peer{i}") for i in range(count)]
        transport = hub.transport(SELF)
        machine = GossipMachine(SELF, GaslocSpec(), 7, random.Random(1), LAYOUT, MODEL_BYTES)
        driver = GossipDriver(
            machine, transport, boxes, clock, layout=LAYOUT, encoding="fp32",
            records=lambda peer: None, count=lambda metric, amount: None, score=_fail,
        )  # fmt: skip
        record = record_of(SELF, await transport.start(Handler(driver.serve)), b"memory")
        driver.feed(PeersChanged(tuple(PeerSeen(peer, 0) for peer in peers)))
        driver.feed(RoundStarted(0))
        transports = [hub.transport(peer) for peer in peers]
        gc.collect()
        tracemalloc.start()
        asking = [asyncio.create_task(offer(each, record, i, heard)) for i, each in enumerate(transports)]
        await asyncio.sleep(1.0)
        found.append(tracemalloc.get_traced_memory()[1])
        assert boxes.asked == 0
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        ended: FinishRound = await driver.exchange_round(0)
        found.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
        assert ended.partner in peers
        await asyncio.sleep(1.0)  # the acknowledgement is on its way
        await driver.close()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await transport.stop()

    try:
        run_virtual(body)
    finally:
        tracemalloc.stop()
    return found[0], found[1], heard, boxes


def _fail(peer: PeerId, fault: str) -> None:
    pytest.fail(f"{peer} was scored for {fault}")


def test_offers_that_wait_take_no_memory_and_one_exchange_takes_what_it_takes_alone() -> None:
    waiting_alone, alone, _, _ = peaks(1)
    waiting, together, heard, boxes = peaks(MAX_PARKED + 4)
    assert heard["Hold"] == MAX_PARKED and heard["Decline"] >= 4 and heard["Accept"] == heard["Ack"] == 1
    assert boxes.asked == 1
    assert waiting - waiting_alone < MODEL_BYTES / 32
    assert together - alone < MODEL_BYTES / 32
