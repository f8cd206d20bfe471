"""One exchange over a stream that a test plays: a peer's faults end the exchange, never this node's round."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest
from xxhash import xxh3_128

from peerloom.node.gossip_driver import GossipDriver
from peerloom.node.repeats import Repeats
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.protocol.errors import BadPayload, MalformedMessage, NoDonor, PeerloomError, RunMismatch, VersionMismatch
from peerloom.protocol.events import PeersChanged, PeerSeen, RoundStarted
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import Chunk, Commit, ExchangeMessage, Offer, PayloadEnd
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId, Span

SELF, PEER = PeerId("self"), PeerId("peer")
LAYOUT = "ab" * 32


class Boxes:
    """A worker of two numbers; `own` is what it proposes."""

    def __init__(self) -> None:
        self.own = bytearray(8)
        self._inbox = bytearray(8)

    def inbox(self, pieces: Span = (0, 1)) -> memoryview:
        return memoryview(self._inbox)

    def outbox(self, pieces: Span = (0, 1)) -> memoryview:
        return memoryview(self.own).toreadonly()

    async def interrupt(self) -> None:
        """Trains nothing."""


class Stream:
    """The peer says what a test puts into `says`; an error there is one that it names."""

    peer, chunk_bytes = PEER, 1 << 20

    def __init__(self) -> None:
        self.says: asyncio.Queue[ExchangeMessage | PeerloomError] = asyncio.Queue()
        self.heard: asyncio.Queue[ExchangeMessage] = asyncio.Queue()

    async def receive(self) -> ExchangeMessage:
        said = await self.says.get()
        if isinstance(said, PeerloomError):
            raise said
        return said

    async def send(self, message: ExchangeMessage) -> None:
        self.heard.put_nowait(message)

    async def close(self) -> None:
        """Nothing to end."""


class Bench:
    """A driver, its worker, and the faults it scored."""

    def __init__(self, transport: Any = None) -> None:
        self.boxes, self.scored = Boxes(), list[tuple[PeerId, str]]()
        machine = GossipMachine(SELF, GaslocSpec(), 7, random.Random(1), LAYOUT, 8)
        self.driver = GossipDriver(
            machine, transport, self.boxes, VirtualClock(), layout=LAYOUT, encoding="fp32",
            records=lambda peer: transport, count=lambda metric, amount: None,
            score=lambda peer, fault: self.scored.append((peer, fault)), repeats=Repeats(),
        )  # fmt: skip
        self.driver.feed(PeersChanged((PeerSeen(PEER, 0),)))

    async def serve(self, round: int, *messages: ExchangeMessage) -> tuple[PeerId | None, Exception | None]:
        """A round in which the peer offers, then says these; whom it was finished with, and how the stream ended."""
        stream: Any = Stream()
        self.driver.feed(RoundStarted(round))
        stream.says.put_nowait(Offer(f"{round:032x}", round, LAYOUT, "fp32", 8))
        serving = asyncio.create_task(self.driver.serve(stream))
        await asyncio.sleep(0.1)
        ending = asyncio.create_task(self.driver.exchange_round(round))
        while not isinstance(await stream.heard.get(), PayloadEnd):
            pass
        for message in messages:
            stream.says.put_nowait(message)
        ended = await ending
        _, pending = await asyncio.wait((serving,), timeout=1.0)
        for task in pending:
            task.cancel()
        (error,) = await asyncio.gather(serving, return_exceptions=True)
        return ended.partner, error if isinstance(error, Exception) else None


def payload(data: bytes = bytes(8)) -> tuple[Chunk, PayloadEnd]:
    return Chunk(0, data), PayloadEnd(xxh3_128(data).digest())


def test_a_second_end_of_a_payload_breaks_the_exchange_and_no_more() -> None:
    async def scenario() -> None:
        bench, (chunk, end) = Bench(), payload()
        partner, error = await bench.serve(0, chunk, end, end)
        assert partner is None and isinstance(error, MalformedMessage)
        assert bench.scored == [(PEER, "bad_exchange")]
        await bench.driver.close()

    run_virtual(scenario)


@pytest.mark.parametrize("moves", [True, False])
def test_bytes_that_repeat_are_held_against_a_peer_only_where_this_nodes_own_move(moves: bool) -> None:
    async def scenario() -> None:
        bench = Bench()
        for round in range(2):
            if moves:
                bench.boxes.own[:] = bytes([round + 1]) * 8
            partner, error = await bench.serve(round, *payload(), Commit())
            repeated = moves and round == 1
            assert partner == (None if repeated else PEER)
            assert isinstance(error, BadPayload) is repeated
        assert bench.scored == ([(PEER, "bad_exchange")] if moves else [])
        await bench.driver.close()

    run_virtual(scenario)


@pytest.mark.parametrize("kind", [RunMismatch, VersionMismatch, NoDonor])
def test_an_error_that_a_peer_names_is_not_this_nodes_own(
    kind: type[PeerloomError], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        stream: Any = Stream()

        class Transport:
            async def open(self, record: object, service: object) -> Stream:
                return stream  # type: ignore[no-any-return]

        bench = Bench(Transport())
        stream.says.put_nowait(kind("as told"))
        bench.driver.feed(RoundStarted(0))
        ended = await bench.driver.exchange_round(0)
        await asyncio.sleep(1.0)
        assert ended.partner is None and not bench.scored
        await bench.driver.close()

    with caplog.at_level(logging.ERROR):
        run_virtual(scenario)
    assert not caplog.records
