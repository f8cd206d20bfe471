"""The caps, over every kind of call: exact in virtual time, and on real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from xxhash import xxh3_128

from peerloom.node.donor import Donor, manifest_of, piece_size
from peerloom.node.identity import Identity
from peerloom.node.memory_transport import MemoryHub, MemoryTransport
from peerloom.node.payload import Pace, outgoing
from peerloom.node.seams import ExchangeStream
from peerloom.node.throttle import Caps
from peerloom.node.tls import make_certificate
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.protocol import limits
from peerloom.protocol.bucket import slice_bytes
from peerloom.protocol.messages import Accept, Chunk, FetchRequest, Offer, PayloadEnd, StateManifest, StatePiece
from peerloom.protocol.services import EXCHANGE, STAGE
from peerloom.protocol.stage_messages import StageOpen
from peerloom.protocol.types import NodeStatus, PeerId
from tests.benchmarks.delaying_proxy import DelayingProxy

from .wire import NOW, Handler, Swarm, record_of

RATE = 100_000
A, B, C = (PeerId(name) for name in "ABC")
PAYLOAD = random.Random(0).randbytes(2_000_000)
OFFER = Offer("0f" * 16, 0, "ab" * 32, "fp32", len(PAYLOAD))


async def swap(stream: ExchangeStream, payload: bytes = PAYLOAD) -> None:
    """The serving side of an exchange: both payloads at once, in the chunks agreed on."""
    await stream.receive()
    await stream.send(Accept(0))
    await move(stream, payload)


async def move(stream: ExchangeStream, payload: bytes) -> None:
    async def send() -> None:
        for message in outgoing(memoryview(payload), Pace(stream.chunk_bytes)):
            await stream.send(message)

    sending = asyncio.create_task(send())
    digest, largest = xxh3_128(), 0
    while not isinstance(message := await stream.receive(), PayloadEnd):
        assert isinstance(message, Chunk)
        digest.update(message.data)
        largest = max(largest, len(message.data))
    assert message.digest == digest.digest()
    assert largest <= 1 << 20
    await sending


async def exchange(transport: MemoryTransport, record: object) -> None:
    stream = await transport.open(record, EXCHANGE)  # type: ignore[arg-type]
    await stream.send(OFFER)
    assert isinstance(await stream.receive(), Accept)
    await move(stream, PAYLOAD)
    await stream.close()


def windows(samples: list[tuple[float, int]], seconds: float = 5.0) -> list[float]:
    """Bytes moved in each window that begins at a sample, by (time, cumulated bytes) samples."""
    found, last = [], samples[-1][0]
    for begin, before in samples:
        if begin + seconds > last:
            break
        found.append(next(count for at, count in reversed(samples) if at <= begin + seconds) - before)
    return found


@pytest.mark.parametrize(("capped", "index"), [("upload", 0), ("download", 1)], ids=["upload", "download"])
def test_every_five_seconds_of_two_exchanges_keep_to_the_cap(capped: str, index: int) -> None:
    """A moves 2 MB each way with both B and C; one direction of it is capped, the sum of both calls."""
    samples: list[tuple[float, int]] = []

    async def body() -> None:
        clock = VirtualClock()
        hub = MemoryHub(clock, random.Random(0), latency_s=0.01, bandwidth=10e6)
        records = []
        for peer in (B, C):
            transport = hub.transport(peer)
            records.append(record_of(peer, await transport.start(Handler(swap)), b"memory"))
        mine = hub.transport(A, caps=Caps(**{capped: RATE}))

        async def sample() -> None:
            while True:
                samples.append((clock.monotonic(), mine.bytes_moved()[index]))
                await asyncio.sleep(0.05)

        sampling = asyncio.create_task(sample())
        await asyncio.gather(*(exchange(mine, record) for record in records))
        sampling.cancel()
        moved = mine.bytes_moved()
        assert min(moved) > 2 * len(PAYLOAD)

    run_virtual(body)
    found = windows([sample for sample in samples if sample[1]])
    assert len(found) > 500
    assert 0.95 * 5 * RATE <= min(found) and max(found) <= 1.05 * 5 * RATE


def test_what_a_stage_sends_keeps_to_the_cap() -> None:
    async def take(stream: ExchangeStream) -> None:
        while not isinstance(await stream.receive(), PayloadEnd):
            pass

    async def body() -> None:
        clock = VirtualClock()
        hub = MemoryHub(clock, random.Random(0), latency_s=0.01, bandwidth=10e6)
        server = Handler(take)
        record = record_of(B, await hub.transport(B).start(server), b"memory")
        stream = await hub.transport(A, caps=Caps(upload=RATE)).open(record, STAGE)
        began = clock.monotonic()
        await stream.send(StageOpen("run", 1))
        for message in outgoing(memoryview(PAYLOAD), Pace(stream.chunk_bytes)):
            await stream.send(message)
        await server.ended.get()
        assert clock.monotonic() - began == pytest.approx(len(PAYLOAD) / RATE, rel=0.05)
        await stream.close()

    run_virtual(body)


def test_a_status_is_not_starved_behind_a_payload() -> None:
    async def body() -> None:
        clock = VirtualClock()
        hub = MemoryHub(clock, random.Random(0))
        server = hub.transport(B, caps=Caps(upload=RATE))
        handler = Handler(swap)
        record = record_of(B, await server.start(handler), b"memory")
        handler.own = NodeStatus(record=record)
        going = asyncio.create_task(exchange(hub.transport(A), record))
        await asyncio.sleep(3.0)
        asked = clock.monotonic()
        await hub.transport(C).status(record)
        assert clock.monotonic() - asked <= 2 * slice_bytes(RATE) / RATE  # the one on its way and the next
        await going

    run_virtual(body)


def test_a_fetch_comes_in_pieces_of_the_smaller_cap() -> None:
    async def body() -> None:
        clock = VirtualClock()
        hub = MemoryHub(clock, random.Random(0))
        layout, data = "ab" * 32, PAYLOAD

        async def take() -> tuple[StateManifest, bytes]:
            return manifest_of(data, round=1, step=1, layout=layout, held_out_loss=None), data

        donor = Donor(clock, layout, take)

        class Giver(Handler):
            def fetch(self, peer: PeerId, request: FetchRequest) -> object:  # type: ignore[override]
                return donor.serve(request, 1)

        server = hub.transport(B, caps=Caps(upload=2 * RATE))
        record = record_of(B, await server.start(Giver()), b"memory")
        for caps, seconds, size in (
            (Caps(), 10.0, slice_bytes(2 * RATE)),
            (Caps(download=RATE), 20.0, slice_bytes(RATE)),
        ):
            client, began, got = hub.transport(A, caps=caps), clock.monotonic(), bytearray()
            async for message in client.fetch(record, FetchRequest(layout)):
                if isinstance(message, StateManifest):
                    assert message.piece_bytes == size
                else:
                    assert isinstance(message, StatePiece)
                    got += message.data
            assert got == data
            assert clock.monotonic() - began == pytest.approx(seconds, rel=0.03)

    run_virtual(body)


def test_pieces_of_a_huge_state_are_no_smaller_than_their_number_allows() -> None:
    total = limits.MAX_PIECES * 100_000
    assert piece_size(0, total) == limits.CHUNK_BYTES
    assert piece_size(2_000, 10_000) == 2_000
    size = piece_size(2_000, total)
    assert size % 4 == 0 and limits.pieces_of(total, size) <= limits.MAX_PIECES


@pytest.fixture
async def grpc_swarm() -> AsyncIterator[Swarm]:
    swarm = Swarm("grpc")
    yield swarm
    await swarm.stop()


class CountingProxy(DelayingProxy):
    """What passes over the wire between a client and its server: TLS, HTTP/2, handshakes and all."""

    up = down = 0

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        rising = sink.get_extra_info("peername")[1] == self._target[1]
        read = source.read

        async def counted(size: int = -1) -> bytes:
            data = await read(size)
            self.up += len(data) * rising
            self.down += len(data) * (not rising)
            return data

        source.read = counted  # type: ignore[method-assign]
        await super()._forward(source, sink)


async def test_every_five_seconds_on_real_sockets_keep_to_the_caps(grpc_swarm: Swarm) -> None:
    """On the wire, framing and handshakes included, both ways; by as much more as this machine let a timer wait."""
    rate = 200_000
    payload = PAYLOAD[: 7 * rate]

    async def serve(stream: ExchangeStream) -> None:
        await swap(stream, payload)

    _, record = await grpc_swarm.server(Handler(serve))
    proxy = CountingProxy(record.addresses[0])
    await proxy.start()
    mine = grpc_swarm.client(Identity.generate(), make_certificate(NOW), caps=Caps(upload=rate, download=rate))
    loop, step_s = asyncio.get_running_loop(), 0.02
    samples: list[tuple[float, int, int]] = []

    async def sample() -> None:
        while True:
            samples.append((loop.time(), proxy.up, proxy.down))
            await asyncio.sleep(step_s)

    sampling = asyncio.create_task(sample())
    stream = await mine.open(replace(record, addresses=(proxy.address,)), EXCHANGE)
    await stream.send(replace(OFFER, total_bytes=len(payload)))
    await stream.receive()
    await move(stream, payload)
    sampling.cancel()
    await stream.close()
    await proxy.stop()
    late_s = max(after[0] - before[0] for before, after in zip(samples, samples[1:], strict=False)) - step_s
    for way, counted in ((1, mine.bytes_moved()[0]), (2, mine.bytes_moved()[1])):
        found = windows([(sample[0], sample[way]) for sample in samples if sample[way]])
        assert found and max(found) <= rate * (1.05 * 5 + late_s)
        assert len(payload) < counted < samples[-1][way] < 1.02 * counted  # framing is not counted, and is small
