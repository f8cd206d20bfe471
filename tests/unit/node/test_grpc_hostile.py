"""Callers that lie, flood, stall or talk nonsense, over real grpc: each is refused with the right error, no more."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from peerloom.node import grpc_server, grpc_stream
from peerloom.node.clock import SystemClock
from peerloom.node.grpc_client import ask, open_channel
from peerloom.node.grpc_session import HelloBudget, Sessions, host_of
from peerloom.node.grpc_wire import (
    FETCH,
    HELLO,
    PROVE,
    STATUS,
    TOKEN_KEY,
    Channel,
    UnknownSession,
    aio,
    grpc,
)
from peerloom.node.identity import Identity
from peerloom.node.seams import ExchangeStream
from peerloom.node.throttle import Traffic
from peerloom.node.tls import TARGET_NAME, fingerprint, make_certificate, pinned_pem
from peerloom.protocol import codec, handshake, limits
from peerloom.protocol.errors import (
    AuthenticationError,
    LimitExceeded,
    LinkError,
    MalformedMessage,
)
from peerloom.protocol.handshake import Hello, HelloReply, Prove
from peerloom.protocol.messages import Chunk, Hold, StreamEnd
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.types import PeerRecord

from .wire import NOW, RUN, Handler, Jumpable, Swarm, claim_of


@pytest.fixture
def transport() -> str:
    return "grpc"


class Raw:
    """A client that speaks the wire by hand."""

    def __init__(self, record: PeerRecord) -> None:
        self.record = record
        self.identity = Identity.generate()
        self.channel: Channel = open_channel(record.addresses[0], record.cert_der)

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def ask(self, path: str, data: bytes, token: bytes | None = None) -> bytes:
        metadata = () if token is None else ((TOKEN_KEY, token),)
        return await ask(self.channel, path, data, metadata, 10.0, Traffic(SystemClock()))

    async def hello(self) -> HelloReply:
        hello = Hello(claim=claim_of(self.identity), wall_s=NOW, challenge=bytes(32))
        return codec.decode_hello_reply(await self.ask(HELLO, codec.encode_hello(hello)))

    async def prove(self, **changes: Any) -> bytes:
        nonce = (await self.hello()).nonce
        signed = handshake.proof(self.identity.peer_id, RUN, nonce, fingerprint(self.record.cert_der))
        fields = {"peer_id": self.identity.peer_id, "nonce": nonce, "signature": self.identity.sign(signed)} | changes
        return codec.decode_token(await self.ask(PROVE, codec.encode_prove(Prove(**fields))))

    async def exchange(self) -> Any:
        token = await self.prove()
        return self.channel.stream_stream(EXCHANGE.path)(metadata=((TOKEN_KEY, token),))


async def status_of(call: Any) -> tuple[Any, str]:
    """How a raw call ended; grpc holds the status back until all messages are read."""
    with contextlib.suppress(aio.AioRpcError):
        while await call.read() is not aio.EOF:
            pass
    return await call.code(), await call.details()


async def test_garbage_in_an_exchange_is_malformed(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "DRAIN_S", 0.05)
    handler = Handler()
    _, record = await swarm.server(handler)
    async with Raw(record) as raw:
        call = await raw.exchange()
        await call.write(b"\xff\xff garbage")
        assert isinstance(await handler.ended.get(), MalformedMessage)
        code, details = await status_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "no ExchangeEnvelope" in details


@pytest.mark.parametrize("path", [HELLO, PROVE])
async def test_garbage_to_an_unproven_call_is_malformed(swarm: Swarm, path: str) -> None:
    _, record = await swarm.server(Handler())
    async with Raw(record) as raw:
        with pytest.raises(MalformedMessage):
            await raw.ask(path, b"\xff\xff\xff")
        with pytest.raises(LimitExceeded):
            await raw.ask(path, bytes(limits.MAX_HELLO_BYTES + 1))


@pytest.mark.parametrize("path", [STATUS, FETCH])
async def test_garbage_to_a_proven_call_is_malformed(swarm: Swarm, path: str) -> None:
    _, record = await swarm.server(Handler())
    async with Raw(record) as raw:
        token = await raw.prove()
        with pytest.raises(MalformedMessage):
            await raw.ask(path, b"\xff\xff\xff", token)


async def test_an_oversize_message_is_refused_unread(swarm: Swarm) -> None:
    handler = Handler()
    _, record = await swarm.server(handler)
    credentials = grpc.ssl_channel_credentials(root_certificates=pinned_pem(record.cert_der))
    options = (("grpc.ssl_target_name_override", TARGET_NAME), ("grpc.max_send_message_length", -1))
    async with Raw(record) as raw:
        await raw.channel.close()
        raw.channel = aio.secure_channel(record.addresses[0], credentials, options=options)
        call = await raw.exchange()
        await call.write(bytes(8 * limits.CHUNK_BYTES))
        assert isinstance(await handler.ended.get(), LinkError)
        code, _ = await status_of(call)
    assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


async def test_an_endless_stream_ends_soon_after_the_handlers_patience(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_stream, "DRAIN_S", 0.05)
    taken = 0

    async def take_three(stream: ExchangeStream) -> None:
        nonlocal taken
        while isinstance(await stream.receive(), Chunk):
            taken += 1
            if taken > 3:
                raise LimitExceeded("more than was offered")

    _, record = await swarm.server(Handler(take_three))
    async with Raw(record) as raw:
        call = await raw.exchange()
        chunk = codec.encode_exchange(Chunk(0, bytes(limits.CHUNK_BYTES)))

        async def write() -> None:
            while True:
                await call.write(chunk)

        writing = asyncio.create_task(write())
        end = codec.decode_exchange(await call.read())
        assert end == StreamEnd("LimitExceeded", "more than was offered")
        with pytest.raises((aio.AioRpcError, asyncio.InvalidStateError)):
            await writing
    assert taken == 4


async def test_a_half_close_without_end_is_a_broken_stream(swarm: Swarm) -> None:
    handler = Handler()
    _, record = await swarm.server(handler)
    async with Raw(record) as raw:
        call = await raw.exchange()
        await call.write(codec.encode_exchange(Hold()))
        await call.done_writing()
        assert isinstance(await handler.ended.get(), LinkError)


@pytest.mark.parametrize("token", [None, b"", b"x" * 32, b"x" * 5000], ids=["none", "empty", "forged", "long"])
@pytest.mark.parametrize("path", [STATUS, EXCHANGE.path, FETCH])
async def test_no_call_without_a_session(swarm: Swarm, path: str, token: bytes | None) -> None:
    _, record = await swarm.server(Handler())
    async with Raw(record) as raw:
        with pytest.raises(UnknownSession):
            await raw.ask(path, b"", token)


async def test_a_call_nobody_serves_is_malformed(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler())
    async with Raw(record) as raw:
        with pytest.raises(MalformedMessage, match="does not know this call"):
            await raw.ask("/peerloom.v1.Peer/Shutdown", b"")


async def test_a_proof_must_be_signed_by_the_peer_for_this_very_nonce(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler())
    async with Raw(record) as raw:
        with pytest.raises(AuthenticationError, match="signature is not by"):
            await raw.prove(signature=bytes(64))
        with pytest.raises(AuthenticationError, match="signature is not by"):
            await raw.prove(signature=Identity.generate().sign(b"anything"))
        with pytest.raises(AuthenticationError, match="nonce"):
            await raw.prove(peer_id=Identity.generate().peer_id)
        with pytest.raises(AuthenticationError, match="nonce"):
            await raw.prove(nonce=bytes(56))
        with pytest.raises(AuthenticationError, match="nonce"):
            await raw.prove(nonce=b"x")
        assert len(await raw.prove()) == limits.TOKEN_BYTES


async def test_a_proof_for_another_server_is_worth_nothing_here(swarm: Swarm) -> None:
    """A server in the middle passes a victim's nonce on: the signature then names the wrong certificate."""
    _, record = await swarm.server(Handler())
    async with Raw(record) as raw:
        nonce = (await raw.hello()).nonce
        elsewhere = fingerprint(make_certificate(NOW).der)
        signature = raw.identity.sign(handshake.proof(raw.identity.peer_id, RUN, nonce, elsewhere))
        prove = Prove(peer_id=raw.identity.peer_id, nonce=nonce, signature=signature)
        with pytest.raises(AuthenticationError, match="signature is not by"):
            await raw.ask(PROVE, codec.encode_prove(prove))


async def test_a_hello_flood_is_cut_off_and_costs_no_memory(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELLO_BURST", 20)
    monkeypatch.setattr(limits, "HELLO_PER_S", 1e-9)
    server, record = await swarm.server(Handler())
    client = swarm.client()
    assert (await client.status(record)).record == record  # two of the twenty
    async with Raw(record) as raw:
        for _ in range(18):
            await raw.hello()
        for _ in range(5):
            with pytest.raises(LimitExceeded, match="Hellos a second"):
                await raw.hello()
    assert (await client.status(record)).record == record  # a proven peer does not feel it


def test_the_hello_budget_refills_by_host_in_a_bounded_table() -> None:
    clock = Jumpable()
    budget = HelloBudget(clock)
    for _ in range(limits.HELLO_BURST):
        budget.spend("ipv4:10.0.0.1:1000")
    with pytest.raises(LimitExceeded):
        budget.spend("ipv4:10.0.0.1:2000")
    budget.spend("ipv4:10.0.0.2:1000")
    clock.ahead_s += 1.0
    budget.spend("ipv4:10.0.0.1:3000")
    for index in range(limits.MAX_HELLO_HOSTS + 10):
        budget.spend(f"ipv4:10.{index >> 16}.{index >> 8 & 255}.{index & 255}:1")
    assert len(budget._buckets) == limits.MAX_HELLO_HOSTS


def test_the_host_of_an_ipv6_peer_is_its_network() -> None:
    assert host_of("ipv4:1.2.3.4:5") == "1.2.3.4"
    assert host_of("ipv6:%5B2001:db8::1:2:3:4%5D:5") == host_of("ipv6:[2001:db8::5]:6") == "2001:db8::/64"
    assert host_of("unix:") == "unix:"


def test_sessions_are_bounded_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SESSIONS", 10)
    monkeypatch.setattr(limits, "MAX_SESSIONS_PER_PEER", 3)
    clock, server = Jumpable(), Identity.generate()
    sessions = Sessions(server, claim_of(server), bytes(32), clock)

    def prove(identity: Identity) -> bytes:
        hello = Hello(claim=claim_of(identity), wall_s=NOW, challenge=bytes(32))
        nonce = sessions.hello(hello).nonce
        signed = handshake.proof(identity.peer_id, RUN, nonce, bytes(32))
        return sessions.prove(Prove(peer_id=identity.peer_id, nonce=nonce, signature=identity.sign(signed)))

    greedy = Identity.generate()
    tokens = [prove(greedy) for _ in range(5)]
    assert len(sessions) == 3
    with pytest.raises(UnknownSession):
        sessions.peer(tokens[1])
    assert sessions.peer(tokens[2]) == greedy.peer_id
    others = [prove(Identity.generate()) for _ in range(20)]
    assert len(sessions) == 10
    clock.ahead_s += limits.SESSION_IDLE_S + 1.0
    with pytest.raises(UnknownSession):
        sessions.peer(others[-1])


def test_a_nonce_expires() -> None:
    clock, server, client = Jumpable(), Identity.generate(), Identity.generate()
    sessions = Sessions(server, claim_of(server), bytes(32), clock)
    nonce = sessions.hello(Hello(claim=claim_of(client), wall_s=NOW, challenge=bytes(32))).nonce
    signature = client.sign(handshake.proof(client.peer_id, RUN, nonce, bytes(32)))
    clock.ahead_s += limits.NONCE_LIFE_S + 0.1
    with pytest.raises(AuthenticationError, match="older than 10 s"):
        sessions.prove(Prove(peer_id=client.peer_id, nonce=nonce, signature=signature))


async def test_a_client_that_sends_no_request_is_cut_off(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "REQUEST_S", 0.05)
    _, record = await swarm.server(Handler())
    async with Raw(record) as raw:
        call = raw.channel.stream_stream(HELLO)()
        code, details = await status_of(call)
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "no request within 0 s")
