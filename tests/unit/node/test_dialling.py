"""Dialling real sockets by RFC 8305: the families by turns, a silent address costs a moment and not the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from peerloom.node.dialer import Endpoint, PlainDialer
from peerloom.protocol.messages import Chunk, FetchRequest, StateManifest
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.types import PeerRecord
from tests.unit.node.discovery_swarm import has_ipv6
from tests.unit.node.wire import Handler, Swarm

pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm("grpc")
    yield made
    await made.stop()


class Told(PlainDialer):
    """Says what it dialled."""

    def __init__(self) -> None:
        self.dialled: list[str] = []

    async def endpoint(self, peer: PeerRecord, route: str) -> Endpoint:
        self.dialled.append(route)
        return await super().endpoint(peer, route)


class Mute:
    """Takes connections and says nothing."""

    async def start(self, host: str) -> str:
        self._open: list[asyncio.StreamWriter] = []
        self._server = await asyncio.start_server(self._take, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.append(writer)

    async def stop(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_every_call_works_between_two_nodes_on_ipv6(swarm: Swarm) -> None:
    async def echo(stream: object) -> None:
        while (message := await stream.receive()) is not None:  # type: ignore[attr-defined]
            await stream.send(message)  # type: ignore[attr-defined]

    _, record = await swarm.server(Handler(on_exchange=echo), listen=("::1", 0))
    caller, mine = await swarm.server(Handler(), listen=("::1", 0))
    assert all(address.startswith("[::1]:") for address in (*record.addresses, *mine.addresses))
    assert (await caller.status(record)).record.peer_id == record.peer_id
    stream = await caller.open(record, EXCHANGE)
    await stream.send(Chunk(0, b"over six"))
    answer = await stream.receive()
    assert isinstance(answer, Chunk) and bytes(answer.data) == b"over six"
    await stream.close()
    fetched = [message async for message in caller.fetch(record, FetchRequest("ab"))]
    assert isinstance(fetched[0], StateManifest)
    assert await caller.dial_back(record, (*mine.addresses, "[::1]:9")) == mine.addresses


@pytest.mark.parametrize(("silent", "good"), [("::1", "127.0.0.1"), ("127.0.0.1", "::1")], ids=["4 wins", "6 wins"])
async def test_a_silent_family_does_not_hold_up_the_other(swarm: Swarm, silent: str, good: str) -> None:
    """First silent, second silent and of the same family, third good: the third is tried second."""
    _, record = await swarm.server(Handler(), listen=(good, 0))
    first, second, told = Mute(), Mute(), Told()
    addresses = (await first.start(silent), await second.start(silent), *record.addresses)
    try:
        client = swarm.client(dialer=told)
        async with asyncio.timeout(60.0):
            assert (await client.status(replace(record, addresses=addresses))).record.peer_id == record.peer_id
        assert told.dialled[:2] == [addresses[0], addresses[2]]
    finally:
        await first.stop()
        await second.stop()
