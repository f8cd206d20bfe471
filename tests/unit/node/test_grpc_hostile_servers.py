"""Servers that lie, stall or talk nonsense, over real grpc: the caller finds each out, with the right error."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from peerloom.node import grpc_client, grpc_transport
from peerloom.node.clock import SystemClock
from peerloom.node.dialer import Endpoint, PlainDialer, PlainEndpoint
from peerloom.node.grpc_client import PeerLink
from peerloom.node.grpc_wire import (
    FETCH,
    HELLO,
    PROVE,
    SERVER_OPTIONS,
    STATUS,
    Channel,
    Context,
    aio,
    grpc,
)
from peerloom.node.identity import Identity
from peerloom.node.throttle import Traffic
from peerloom.node.tls import Certificate, fingerprint, make_certificate
from peerloom.protocol import codec, handshake, limits
from peerloom.protocol.errors import (
    AuthenticationError,
    LimitExceeded,
    LinkError,
    MalformedMessage,
    RunMismatch,
    VersionMismatch,
)
from peerloom.protocol.handshake import HelloReply
from peerloom.protocol.messages import FetchRequest
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.types import NodeStatus, PeerRecord, RunId

from .test_tls import of_another_version
from .wire import NOW, Handler, Swarm, claim_of, record_of


@pytest.fixture
def transport() -> str:
    return "grpc"


class FakeServer:
    """A server that answers each call as a test says, under a certificate of its own."""

    def __init__(self, certificate: Certificate, methods: dict[str, Callable[[bytes, Context], Awaitable[bytes]]]):
        self._server = aio.server(options=SERVER_OPTIONS)
        for path, method in methods.items():
            _, service, name = path.split("/")
            handler = {name: grpc.unary_unary_rpc_method_handler(method)}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handler),))
        credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.certificate_pem)])
        self.address = f"127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', credentials)}"

    async def __aenter__(self) -> FakeServer:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


def greeter(identity: Identity, certificate: Certificate, **changes: Any) -> Callable[..., Awaitable[bytes]]:
    """Answers Hello like a node, with parts of its claim or `signer` changed."""
    signer = changes.pop("signer", identity)
    claim = claim_of(identity, **changes)

    async def hello(data: bytes, _: Context) -> bytes:
        nonce = secrets.token_bytes(56)
        signed = handshake.greeting(codec.decode_hello(data), claim, nonce, fingerprint(certificate.der))
        reply = HelloReply(claim=claim, wall_s=NOW, nonce=nonce, signature=signer.sign(signed))
        return codec.encode_hello_reply(reply)

    return hello


async def never(data: bytes, context: Context) -> bytes:
    await asyncio.Event().wait()
    return b""


async def garbage(data: bytes, context: Context) -> bytes:
    return b"\xff\xff\xff"


async def big(data: bytes, context: Context) -> bytes:
    return bytes(limits.MAX_HELLO_BYTES + 1)


@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        ({"signer": Identity.generate()}, AuthenticationError, "not signed by"),
        ({"run_id": RunId("f" * 16)}, RunMismatch, "ffffffffffffffff"),
        ({"spec_hash": "00" * 32}, RunMismatch, "00" * 32),
        ({"protocol_min": 7, "protocol_max": 9}, VersionMismatch, "speaks 7 to 9"),
    ],
    ids=["signature", "run", "spec", "version"],
)
async def test_a_servers_hello_is_checked(
    swarm: Swarm, changes: dict[str, Any], expected: type[Exception], words: str
) -> None:
    identity, certificate = Identity.generate(), make_certificate(NOW)
    async with FakeServer(certificate, {HELLO: greeter(identity, certificate, **changes)}) as server:
        record = record_of(identity.peer_id, (server.address,), certificate.der)
        with pytest.raises(expected, match=words):
            await swarm.client().status(record)


async def test_a_record_with_anothers_certificate_and_address_is_found_out(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler())
    thief = Identity.generate().peer_id
    with pytest.raises(AuthenticationError, match=f"{record.peer_id} answers where {thief} should"):
        await swarm.client().status(record_of(thief, record.addresses, record.cert_der))


@pytest.mark.parametrize(("answer", "expected"), [(garbage, MalformedMessage), (big, LimitExceeded)])
async def test_a_server_that_answers_nonsense(
    swarm: Swarm, answer: Callable[..., Awaitable[bytes]], expected: type[Exception]
) -> None:
    identity, certificate = Identity.generate(), make_certificate(NOW)
    async with FakeServer(certificate, {HELLO: answer}) as server:
        record = record_of(identity.peer_id, (server.address,), certificate.der)
        with pytest.raises(expected):
            await swarm.client().status(record)


async def test_a_server_that_never_answers_a_hello(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_client, "DIAL_S", 0.2)
    identity, certificate = Identity.generate(), make_certificate(NOW)
    async with FakeServer(certificate, {HELLO: never}) as server:
        record = record_of(identity.peer_id, (server.address,), certificate.der)
        with pytest.raises(LinkError, match="deadline exceeded"):
            await swarm.client().status(record)


@pytest.mark.parametrize("call", ["status", "exchange", "fetch"])
async def test_a_server_that_never_answers_a_call(swarm: Swarm, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(grpc_transport, "CALL_S", 0.2)
    monkeypatch.setattr(grpc_transport, "SETUP_S", 0.2)
    identity, certificate = Identity.generate(), make_certificate(NOW)

    async def token(data: bytes, _: Context) -> bytes:
        return codec.encode_token(bytes(32))

    methods = {HELLO: greeter(identity, certificate), PROVE: token, STATUS: never, EXCHANGE.path: never, FETCH: never}
    async with FakeServer(certificate, {STATUS: never} | methods) as server:
        record = record_of(identity.peer_id, (server.address,), certificate.der)
        client = swarm.client()
        with pytest.raises(LinkError, match=r"deadline exceeded|has not taken the call"):
            if call == "status":
                await client.status(record)
            elif call == "exchange":
                await client.open(record, EXCHANGE)
            else:
                await anext(client.fetch(record, FetchRequest("ab")))


async def test_a_port_that_takes_connections_and_says_nothing(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_client, "DIAL_S", 0.2)
    ended = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()
        ended.set()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    record = record_of(Identity.generate().peer_id, (f"127.0.0.1:{port}",), make_certificate(NOW).der)
    with pytest.raises(LinkError, match="deadline exceeded"):
        await swarm.client().status(record)
    await asyncio.wait_for(ended.wait(), 10)
    listener.close()
    await listener.wait_closed()


async def test_an_address_that_takes_and_says_nothing_holds_nobody_up(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_client, "DIAL_S", 600.0)
    monkeypatch.setattr(grpc_client, "CONNECT_S", 600.0)
    _, record = await swarm.server(Handler())
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = f"127.0.0.1:{mute.getsockname()[1]}"
        async with asyncio.timeout(30.0):
            await swarm.client().status(record_of(record.peer_id, (silent, *record.addresses), record.cert_der))


async def test_addresses_are_tried_in_order(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler())
    _, stranger = await swarm.server(Handler())
    dead = "127.0.0.1:1"
    several = record_of(record.peer_id, (dead, *stranger.addresses, *record.addresses), record.cert_der)
    client = swarm.client()
    assert (await client.status(several)).record == record


@pytest.mark.parametrize(
    ("addresses", "cert", "expected", "words"),
    [
        ((), None, LinkError, "gives no address"),
        (("unix:/run/x:1",), None, MalformedMessage, "names no host"),
        (("127.0.0.1:1",), b"no certificate", MalformedMessage, "certificate does not parse"),
    ],
    ids=["no address", "bad address", "bad certificate"],
)
async def test_a_record_that_cannot_be_dialled(
    swarm: Swarm, addresses: tuple[str, ...], cert: bytes | None, expected: type[Exception], words: str
) -> None:
    record = record_of(Identity.generate().peer_id, addresses, cert or make_certificate(NOW).der)
    with pytest.raises(expected, match=words):
        await swarm.client().status(record)


async def test_a_node_that_answers_with_anothers_state_is_malformed(swarm: Swarm) -> None:
    handler = Handler()
    _, record = await swarm.server(handler)
    handler.own = NodeStatus(record=record_of(Identity.generate().peer_id, record.addresses, record.cert_der))
    with pytest.raises(MalformedMessage, match=f"{record.peer_id} answers with the state of"):
        await swarm.client().status(record)


class Counting(PlainDialer):
    """Counts the endpoints that are let go."""

    released = 0

    async def endpoint(self, peer: PeerRecord, route: str) -> Endpoint:
        made = PlainEndpoint(route)
        made.release = self._release  # type: ignore[method-assign]
        return made

    def _release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("cert", [b"no certificate", of_another_version(make_certificate(NOW).der)])
async def test_a_certificate_that_is_none_ends_the_call_and_lets_the_endpoint_go(swarm: Swarm, cert: bytes) -> None:
    record, dialer = record_of(Identity.generate().peer_id, ("127.0.0.1:1", "127.0.0.1:2"), cert), Counting()
    with pytest.raises(MalformedMessage, match="certificate does not parse"):
        await swarm.client(dialer=dialer).status(record)
    assert dialer.released == 2


async def test_the_clock_offset_is_measured(swarm: Swarm) -> None:
    identity, certificate = Identity.generate(), make_certificate(NOW)
    async with FakeServer(certificate, {HELLO: greeter(identity, certificate), PROVE: _token}) as server:
        record = record_of(identity.peer_id, (server.address,), certificate.der)
        background: set[asyncio.Task[None]] = set()
        me = Identity.generate()
        link = PeerLink(record, me, claim_of(me), _At(NOW - 5.0), random.Random(0), Traffic(SystemClock()), background)
        await link.call(_nothing)
        await link.close()
    assert link.clock_offset_s == 5.0


async def _token(data: bytes, _: Context) -> bytes:
    return codec.encode_token(bytes(32))


async def _nothing(channel: Channel, metadata: object) -> None:
    return None


class _At(SystemClock):
    def __init__(self, wall_s: float) -> None:
        self._wall_s = wall_s

    def wall(self) -> float:
        return self._wall_s
