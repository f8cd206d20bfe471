"""Whom and what a Transport refuses, and how it bears a peer that is gone, on grpc and in memory alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from peerloom.node.identity import Identity
from peerloom.node.tls import make_certificate
from peerloom.protocol import limits
from peerloom.protocol.errors import (
    AuthenticationError,
    LimitExceeded,
    LinkError,
    RunMismatch,
    VersionMismatch,
)
from peerloom.protocol.messages import (
    Chunk,
)
from peerloom.protocol.services import EXCHANGE, STAGE

from .wire import NOW, Handler, Swarm, record_of

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize(
    ("changes", "expected", "values"),
    [
        ({"run_id": "f" * 16}, RunMismatch, ["f" * 16, "0123456789abcdef"]),
        ({"spec_hash": "ee" * 32}, RunMismatch, ["ee" * 32, "ab" * 32]),
        ({"protocol_range": (2, 3)}, VersionMismatch, ["2 to 3", "1 to 1"]),
    ],
    ids=["run", "spec", "version"],
)
@pytest.mark.parametrize("stranger", ["client", "server"])
async def test_a_mismatch_is_refused_with_both_sides_values(
    swarm: Swarm, stranger: str, changes: dict[str, Any], expected: type[Exception], values: list[str]
) -> None:
    handler = Handler()
    _, record = await swarm.server(handler, **(changes if stranger == "server" else {}))
    status, stage = (swarm.client(**(changes if stranger == "client" else {})) for _ in range(2))
    with pytest.raises(expected) as caught:
        await status.status(record)
    assert all(value in str(caught.value) for value in values)
    with pytest.raises(expected):
        await (await stage.open(record, STAGE)).receive()
    assert handler.ended.empty(), "a stage's stream of another run reaches no stage"


async def test_a_shared_version_is_enough(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler(), protocol_range=(1, 4))
    client = swarm.client(protocol_range=(3, 9))
    assert (await client.status(record)).record == record


async def test_an_allowlist_lets_in_whom_it_names(swarm: Swarm) -> None:
    friend = Identity.generate()
    _, record = await swarm.server(Handler(), allow=lambda peer: peer == friend.peer_id)
    assert (await swarm.client(friend).status(record)).record == record
    with pytest.raises(AuthenticationError, match="not allowed"):
        await swarm.client().status(record)


async def test_another_certificate_than_the_pinned_one_is_not_talked_to(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler())
    pinned = record_of(record.peer_id, record.addresses, make_certificate(NOW).der)
    with pytest.raises(LinkError, match="certificate"):
        await swarm.client().status(pinned)


async def test_a_peer_that_cannot_be_reached_is_left_alone_for_a_while(swarm: Swarm) -> None:
    handler = Handler()
    identity, certificate = Identity.generate(), make_certificate(NOW)
    server, record = await swarm.server(handler, identity, certificate)
    await server.stop()
    client = swarm.client()
    with pytest.raises(LinkError, match="cannot talk to"):
        await client.status(record)
    _, again = await swarm.server(handler, identity, certificate)
    with pytest.raises(LinkError, match="left alone"):
        await client.status(again)
    swarm.clock.ahead_s += 1.0
    assert (await client.status(again)).record == again


async def test_a_restarted_server_is_reached_without_a_word(swarm: Swarm) -> None:
    identity, certificate = Identity.generate(), make_certificate(NOW)
    server, record = await swarm.server(Handler(), identity, certificate)
    client = swarm.client()
    await client.status(record)
    await server.stop()
    port = int(record.addresses[0].rpartition(":")[2])
    _, again = await swarm.server(Handler(), identity, certificate, listen=("127.0.0.1", port))
    assert again.addresses == record.addresses
    assert (await client.status(again)).record == again
    stream = await client.open(again, EXCHANGE)
    await stream.close()


async def test_streams_of_one_peer_are_limited(swarm: Swarm) -> None:
    handler = Handler()
    _, record = await swarm.server(handler)
    client = swarm.client()
    streams = [await client.open(record, EXCHANGE) for _ in range(limits.MAX_STREAMS_PER_PEER)]
    with pytest.raises(LimitExceeded, match="streams at once"):
        await client.open(record, EXCHANGE)
    await streams[0].close()
    await handler.ended.get()
    while True:  # the slot is free a moment after the handler's end
        try:
            streams.append(await client.open(record, EXCHANGE))
            break
        except LimitExceeded:
            await asyncio.sleep(0.01)
    for stream in streams:
        await stream.close()


async def test_an_oversize_chunk_is_not_even_sent(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler())
    stream = await swarm.client().open(record, EXCHANGE)
    with pytest.raises(LimitExceeded, match="1048577 bytes"):
        await stream.send(Chunk(0, bytes(limits.CHUNK_BYTES + 1)))
    await stream.close()


async def test_a_stopped_transport_calls_nobody(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler())
    client = swarm.client()
    await client.stop()
    await client.stop()
    with pytest.raises(LinkError, match="stopping"):
        await client.status(record)


async def test_a_node_has_a_peer_dial_it_back(swarm: Swarm) -> None:
    _, helper = await swarm.server(Handler())
    node, record = await swarm.server(Handler())
    assert node.addresses() == record.addresses
    assert await node.dial_back(helper, (*record.addresses, "127.0.0.1:9")) == record.addresses
    assert swarm.client().addresses() == ()
