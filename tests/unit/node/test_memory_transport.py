"""The in-memory hub: latency, bandwidth and faults in virtual time, the same on every run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from peerloom.node.memory_transport import SILENCE_S, UNREACHABLE_S, MemoryHub, MemoryTransport
from peerloom.node.seams import ExchangeStream
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.protocol.errors import LinkError
from peerloom.protocol.messages import Chunk, FetchRequest, Hold
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

from .wire import Handler, record_of

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")
Body = Callable[[MemoryHub], Awaitable[None]]


def in_virtual_time(body: Body, latency_s: float = 0.0, bandwidth: float | None = None) -> None:
    async def run() -> None:
        await body(MemoryHub(VirtualClock(), random.Random(0), latency_s=latency_s, bandwidth=bandwidth))

    run_virtual(run)


async def serve(hub: MemoryHub, peer: PeerId, handler: Handler) -> tuple[MemoryTransport, PeerRecord]:
    transport = hub.transport(peer)
    record = record_of(peer, await transport.start(handler), b"memory")
    handler.own = NodeStatus(record=record)
    return transport, record


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    async def body(hub: MemoryHub) -> None:
        arrivals: list[float] = []

        async def note(stream: ExchangeStream) -> None:
            while await stream.receive() is not None:
                arrivals.append(hub.clock.monotonic())

        handler = Handler(note)
        _, record = await serve(hub, B, handler)
        stream = await hub.transport(A).open(record, EXCHANGE)
        start = hub.clock.monotonic()
        assert start == pytest.approx(1.0)  # there and back
        for _ in range(3):
            await stream.send(Chunk(0, bytes(10_000)))
        await stream.close()
        await handler.ended.get()
        first, second, third = (at - start for at in arrivals)
        assert first == pytest.approx(0.5 + 1.0, rel=0.01)
        assert second == pytest.approx(0.5 + 2.0, rel=0.01)
        assert third == pytest.approx(0.5 + 3.0, rel=0.01)

    in_virtual_time(body, latency_s=0.5, bandwidth=10_000.0)


def test_a_link_of_its_own() -> None:
    async def body(hub: MemoryHub) -> None:
        _, record = await serve(hub, B, Handler())
        hub.set_link(A, B, latency_s=2.0)
        await hub.transport(A).status(record)
        assert hub.clock.monotonic() == pytest.approx(6.0)  # dial, there and back, and the answer
        await hub.transport(C).status(record)
        assert hub.clock.monotonic() == pytest.approx(6.0)

    in_virtual_time(body)


def test_a_killed_peer_resets_its_streams_and_answers_nobody() -> None:
    async def body(hub: MemoryHub) -> None:
        handler = Handler()
        _, record = await serve(hub, B, handler)
        caller = hub.transport(A)
        stream = await caller.open(record, EXCHANGE)
        fetching = caller.fetch(record, FetchRequest("ab"))
        await anext(fetching)
        hub.kill(B)
        for waiting in (stream.receive(), stream.send(Hold()), anext(fetching), hub.transport(C).status(record)):
            with pytest.raises(LinkError):
                await waiting
        assert isinstance(await handler.ended.get(), asyncio.CancelledError)
        await stream.close()
        _, again = await serve(hub, B, Handler())
        assert (await hub.transport(C).status(again)).record == again

    in_virtual_time(body)


def test_the_callers_death_breaks_the_servers_stream() -> None:
    async def body(hub: MemoryHub) -> None:
        handler = Handler()
        _, record = await serve(hub, B, handler)
        await hub.transport(A).open(record, EXCHANGE)
        await asyncio.sleep(0)
        hub.kill(A)
        assert isinstance(await handler.ended.get(), LinkError)

    in_virtual_time(body)


def test_a_partition_is_silence_first_and_then_an_error() -> None:
    async def body(hub: MemoryHub) -> None:
        handler = Handler()
        _, record = await serve(hub, B, handler)
        caller = hub.transport(A)
        stream = await caller.open(record, EXCHANGE)
        hub.partition(A, B)
        start = hub.clock.monotonic()
        await stream.send(Hold())
        with pytest.raises(LinkError, match="no sign of life"):
            await stream.receive()
        assert hub.clock.monotonic() == pytest.approx(start + SILENCE_S)
        assert isinstance(await handler.ended.get(), LinkError)
        start = hub.clock.monotonic()
        with pytest.raises(LinkError, match="no answer"):
            await caller.status(record)
        assert hub.clock.monotonic() == pytest.approx(start + UNREACHABLE_S)
        assert (await hub.transport(C).status(record)).record == record
        hub.heal(A, B)
        await asyncio.sleep(1.0)  # the back-off after one failure
        assert (await caller.status(record)).record == record

    in_virtual_time(body)


def test_the_same_seed_gives_the_same_history() -> None:
    def history() -> list[tuple[float, str, str]]:
        log: list[tuple[float, str, str]] = []

        async def body(hub: MemoryHub) -> None:
            async def note(stream: ExchangeStream) -> None:
                while await stream.receive() is not None:
                    log.append((hub.clock.monotonic(), "got", stream.peer))

            served = [await serve(hub, PeerId(f"N{n}"), Handler(note)) for n in range(8)]
            rng = random.Random(3)

            async def gossip(transport: MemoryTransport) -> None:
                for _ in range(5):
                    _, record = served[rng.randrange(8)]
                    await asyncio.sleep(rng.random())
                    try:
                        stream = await transport.open(record, EXCHANGE)
                        await stream.send(Chunk(0, bytes(rng.randrange(1, 5000))))
                        await stream.close()
                    except LinkError as error:
                        log.append((hub.clock.monotonic(), str(error), transport.peer_id))

            asyncio.get_running_loop().call_later(1.0, hub.kill, PeerId("N3"))
            await asyncio.gather(*(gossip(transport) for transport, _ in served))
            for transport, _ in served:
                await transport.stop()

        in_virtual_time(body, latency_s=0.05, bandwidth=1e4)
        return log

    first = history()
    assert len(first) > 20
    assert history() == first
