"""A peer of the same run that lies over real gRPC: the node refuses, scores, counts, and goes on training."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peerloom.node.clock import SystemClock
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.grpc_stream import ClientStream
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import load_or_create
from peerloom.node.seams import ExchangeStream
from peerloom.node.tls import make_certificate
from peerloom.protocol.errors import (
    BadPayload,
    DigestMismatch,
    LinkError,
    MalformedMessage,
    PeerError,
    ProtocolError,
    VersionMismatch,
)
from peerloom.protocol.invite import parse_invite
from peerloom.protocol.limits import CHUNK_BYTES, LEAST_CHUNK_BYTES
from peerloom.protocol.messages import (
    Accept,
    Chunk,
    Decline,
    FetchRequest,
    Hold,
    Offer,
    PayloadEnd,
    StateManifest,
    StateMessage,
)
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord
from tests.helpers import PATIENCE_S, Node, Swarm
from tests.unit.node.wire import record_of

pytestmark = pytest.mark.slow

MOST_OFFENCES = 6  # before it must be left alone
REFUSALS = 5  # in as many rounds: a single fault is held against a peer for its round only


class Aloof:
    """What the hostile peer serves: it declines all offers and has no model."""

    def __init__(self, record: PeerRecord) -> None:
        self._record = record

    async def serve(self, service: Any, stream: Any) -> None:
        await stream.receive()
        await stream.send(Decline("busy"))

    async def status(self) -> NodeStatus:
        return NodeStatus(record=self._record)

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        if request.layout:
            raise LinkError("no model here")
        yield StateManifest("", 0, 0, "", 0, 1, (), None)


class Hostile:
    """A peer with an identity, a record in the DHT and a transport of its own, against one victim."""

    def __init__(
        self, discovery: DhtDiscovery, transport: GrpcTransport, own: PeerRecord, victim: PeerRecord, total_bytes: int
    ) -> None:
        self.transport, self.victim, self.total_bytes = transport, victim, total_bytes
        self._discovery, self._own = discovery, own

    async def counters(self) -> dict[str, float]:
        return (await self.transport.status(self.victim)).counters

    async def offer(self) -> tuple[int, ExchangeStream, Accept | Decline]:
        """Opens one exchange of the victim's own round; returns the round and the victim's answer."""
        round = (await self.transport.status(self.victim)).record.round
        stream = await self.transport.open(self.victim, EXCHANGE)
        await stream.send(Offer(secrets.token_hex(16), round, self.victim.layout_digest, "fp32", self.total_bytes))
        while isinstance(answer := await stream.receive(), Hold):
            pass
        assert isinstance(answer, (Accept, Decline)), answer
        return round, stream, answer

    async def engage(self, seen: bool) -> ExchangeStream | None:
        """Offers until the victim accepts; None when it, having `seen` this peer, refuses in round after round."""
        await self._discovery.publish(replace(self._own, issued_at=SystemClock().wall()))
        refusals: set[int] = set()
        async with asyncio.timeout(PATIENCE_S):
            while len(refusals) < REFUSALS:
                round, stream, answer = await self.offer()
                if isinstance(answer, Accept):
                    return stream
                await stream.close()
                if answer.reason == "refused" and seen:
                    refusals.add(round)
                await asyncio.sleep(0.05)
        return None


@pytest.fixture
async def hostile(swarm: Swarm, tmp_path: Path) -> AsyncIterator[Hostile]:
    """Seen by the trainer `a`, which is alone with it."""
    swarm.rest("seed", "a")
    node = swarm.trainers("a")[0]
    spec, clock, file = RunSpec.from_toml(swarm.run_file.read_text()), SystemClock(), tmp_path / "identity.key"
    identity, certificate = load_or_create(file), make_certificate(clock.wall())
    async with AsyncExitStack() as stack:
        discovery = await DhtDiscovery.create(
            identity=identity,
            identity_path=file,
            seeds=[parse_invite(swarm.invite)],
            host="127.0.0.1",
            clock=clock,
            run_id=spec.run_id,
        )
        stack.push_async_callback(discovery.stop)
        stack.push_async_callback(discovery.withdraw)
        transport = GrpcTransport(
            identity=identity,
            certificate=certificate,
            run_id=spec.run_id,
            spec_hash=spec.spec_hash(),
            clock=clock,
            rng=random.Random(0),
        )
        stack.push_async_callback(transport.stop)
        victim = await record_called(discovery, node.name)
        own = replace(
            record_of(identity.peer_id, (), certificate.der),
            name="hostile",
            started_at=clock.wall(),
            issued_at=clock.wall(),
            state="training",
            layout_digest=victim.layout_digest,
            init_digest=victim.init_digest,
        )
        own = replace(own, addresses=await transport.start(Aloof(own)))
        async for message in transport.fetch(victim, FetchRequest(victim.layout_digest)):
            assert isinstance(message, StateManifest)
            total_bytes = message.total_bytes
            break
        yield Hostile(discovery, transport, own, victim, total_bytes)


async def record_called(discovery: DhtDiscovery, name: str) -> PeerRecord:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for record in await discovery.peers():
                if record.name == name and record.layout_digest and record.addresses and record.round:
                    return record
            await asyncio.sleep(0.5)


async def not_a_number(peer: Hostile, stream: ExchangeStream) -> None:
    await stream.send(Chunk(0, struct.pack("<f", math.nan) * (min(peer.total_bytes, LEAST_CHUNK_BYTES) // 4)))


async def wrong_digest(peer: Hostile, stream: ExchangeStream) -> None:
    for start in range(0, peer.total_bytes, CHUNK_BYTES):
        await stream.send(Chunk(start, bytes(min(CHUNK_BYTES, peer.total_bytes - start))))
    await stream.send(PayloadEnd(bytes(16)))


async def without_end(peer: Hostile, stream: ExchangeStream) -> None:
    for start in range(0, 1 << 40, 4096):
        await stream.send(Chunk(start, bytes(4096)))


async def garbage(peer: Hostile, stream: ExchangeStream) -> None:
    assert isinstance(stream, ClientStream)
    await stream._call.write(b"\xff\xff garbage")


Offence = Callable[[Hostile, ExchangeStream], Coroutine[None, None, None]]
Told = type[PeerError] | tuple[type[PeerError], ...]


@pytest.mark.parametrize(
    ("offence", "error"),
    [
        (not_a_number, BadPayload),
        (wrong_digest, DigestMismatch),
        (without_end, (ProtocolError, LinkError)),  # who does not stop to listen may be cut off before it hears why
        (garbage, MalformedMessage),
    ],
    ids=["NaN", "wrong digest", "endless", "garbage"],
)
async def test_an_offender_is_refused_scored_and_left_alone(
    swarm: Swarm, hostile: Hostile, offence: Offence, error: Told
) -> None:
    node, before = swarm.nodes["a"], await hostile.counters()
    offences = 0
    while (stream := await hostile.engage(seen=offences > 0)) is not None:
        offences += 1
        assert offences <= MOST_OFFENCES, "it is not left alone"
        await offend(hostile, stream, offence, error)
    assert offences >= 2
    after = await hostile.counters()
    assert after["peer_faults"] >= before.get("peer_faults", 0) + offences
    await asyncio.to_thread(goes_on_training, node)
    after = await hostile.counters()
    assert after.get("worker_deaths", 0) == before.get("worker_deaths", 0)


async def offend(hostile: Hostile, stream: ExchangeStream, offence: Offence, error: Told) -> None:
    """Misbehaves on an accepted exchange, and expects to be told so."""
    misbehaving = asyncio.create_task(offence(hostile, stream))
    try:
        with pytest.raises(error):
            async with asyncio.timeout(PATIENCE_S):
                while await stream.receive() is not None:
                    pass
    finally:
        misbehaving.cancel()
        await asyncio.gather(misbehaving, return_exceptions=True)
        await stream.close()


def goes_on_training(node: Node) -> None:
    rounds = node.wait_for_rounds(3)
    assert all(math.isfinite(event["held_out_loss"]) and event["held_out_loss"] < 5.5 for event in rounds)


async def test_a_peer_of_another_protocol_version_is_turned_away(swarm: Swarm, hostile: Hostile) -> None:
    spec, clock = RunSpec.from_toml(swarm.run_file.read_text()), SystemClock()
    identity, certificate = load_or_create(swarm.folder / "future.key"), make_certificate(clock.wall())
    future = GrpcTransport(
        identity=identity,
        certificate=certificate,
        run_id=spec.run_id,
        spec_hash=spec.spec_hash(),
        clock=clock,
        rng=random.Random(0),
        protocol_range=(2, 3),
    )
    try:
        with pytest.raises(VersionMismatch) as caught:
            await future.status(hostile.victim)
    finally:
        await future.stop()
    assert "1" in str(caught.value) and "2" in str(caught.value)
    await asyncio.to_thread(goes_on_training, swarm.nodes["a"])
