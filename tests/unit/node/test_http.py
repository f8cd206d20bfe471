"""The page's server: files, feed, health, metrics, and whom it lets ask."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from peerloom.node import http_connections
from peerloom.node.http_connections import ASK_WITHIN_S, BEHIND_S, MAX_CONNECTIONS
from peerloom.node.http_endpoint import DEFAULT, Endpoint, parse_endpoint
from peerloom.node.http_feed import MAX_BEHIND, MAX_LISTENERS
from peerloom.node.http_history import MEETING_S, Meetings
from peerloom.node.http_server import FILES, HttpServer
from peerloom.node.status import row_of
from peerloom.protocol.errors import ConfigError, PortInUse
from peerloom.protocol.types import NodeStatus, PeerId
from tests.unit.node.page_swarm import NOW, FakeSwarm, served


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def next_event(stream: aiohttp.StreamReader) -> tuple[str, Any]:
    kind = (await stream.readline()).decode().strip().removeprefix("event: ")
    data = (await stream.readuntil(b"\n\n")).decode().strip().removeprefix("data: ")
    return kind, json.loads(data)


async def test_every_file_of_the_page_is_served_and_names_no_other_host(client: aiohttp.ClientSession) -> None:
    async with served(FakeSwarm(3)) as server:
        for path, (_, content_type) in FILES.items():
            async with client.get(server.url + path.lstrip("/")) as answer:
                text = await answer.text()
                assert answer.status == 200 and answer.content_type == content_type
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert not [word for word in text.split() if "//" in word and "://" in word and "w3.org" not in word]


async def test_a_listener_gets_all_once_and_then_what_changed(client: aiohttp.ClientSession) -> None:
    swarm = FakeSwarm(4)
    swarm.step()
    async with served(swarm) as server, client.get(server.url + "events") as answer:
        kind, first = await next_event(answer.content)
        assert kind == "snapshot" and first["this"] == swarm.own.peer_id
        assert {row["name"] for row in first["changed"]} == {"organizer", *(f"node-00{n}" for n in range(1, 5))}
        assert (first["health"], len(first["met"])) == ("healthy", 2)
        assert all(len(points) == 1 for points in first["curves"].values())
        swarm.frozen.add(swarm.peer("node-001"))
        swarm.step()
        swarm.change("node-002", state="stalled", reason="no step for 90 s")
        swarm.leave("node-003")
        left = next(peer for peer in swarm.gone)
        swarm.feed.look()
        kind, news = await next_event(answer.content)
        assert kind == "update" and news["gone"] == [left]
        assert {row["name"] for row in news["changed"]} == {"organizer", "node-002", "node-004"}
        assert (news["health"], news["problems"]) == ("degraded", ["node-002 is stalled: no step for 90 s"])
        assert {(event["name"], event["what"]) for event in news["events"]} == {
            ("node-003", "has left"), ("node-002", "stalled: no step for 90 s")
        }  # fmt: skip
        swarm.step(8.0)
        swarm.feed.look()
        _, news = await next_event(answer.content)
        assert [row["silent"] for row in news["changed"] if row["name"] == "node-001"] == [True]
        assert ("node-001", "silent") in {(event["name"], event["what"]) for event in news["events"]}


async def test_status_json_is_the_documented_object(client: aiohttp.ClientSession) -> None:
    async with served(FakeSwarm(2)) as server, client.get(server.url + "status.json") as answer:
        told = await answer.json()
    assert told["schema"] == 1 and told["totals"]["nodes"] == 3
    assert [row["role"] for row in told["nodes"]] == ["trainer", "trainer", "bootstrap"]


@pytest.mark.parametrize(
    ("state", "alive", "ready"),
    [("serving", 200, 200), ("starting", 200, 503), ("stalled", 503, 503), ("restarting", 503, 503)],
)
async def test_health_and_readiness(client: aiohttp.ClientSession, state: Any, alive: int, ready: int) -> None:
    swarm = FakeSwarm(1)
    swarm.own = replace(swarm.own, state=state, reason="because")
    async with served(swarm) as server:
        for path, code in (("healthz", alive), ("readyz", ready)):
            async with client.get(server.url + path) as answer:
                assert (answer.status, await answer.text()) == (code, f"{state}: because\n")


async def test_metrics_are_served_in_both_formats(client: aiohttp.ClientSession) -> None:
    async with served(FakeSwarm(2)) as server:
        async with client.get(server.url + "metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with client.get(server.url + "metrics", headers=accept) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            families = {family.name for family in text_string_to_metric_families(await answer.text())}
    assert {"peerloom_node", "peerloom_swarm_nodes", "process_resident_memory_bytes"} <= families


async def test_other_paths_methods_and_hosts_are_refused(client: aiohttp.ClientSession) -> None:
    async with served(FakeSwarm(1)) as server:
        async with client.get(server.url + "etc/passwd") as answer:
            assert answer.status == 404
        async with client.post(server.url + "events") as answer:
            assert answer.status == 405
        async with client.get(server.url + "status.json", headers={"Host": "evil.example:80"}) as answer:
            assert answer.status == 403


@pytest.mark.parametrize(
    "sent",
    [
        b"\x8b" * 300_000,
        b"GET / HTTP/1.1\r\nHost" + b"\0" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"zz" * 9000,
    ],
    ids=["noise", "bad header", "long header", "bad body"],
)
async def test_garbage_is_refused_and_not_written_to_the_log(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with served(FakeSwarm(1), Endpoint("127.0.0.1", 0, moves=False)) as server:
        with caplog.at_level(logging.DEBUG):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rstrip("/").rsplit(":", 1)[1]))
            writer.write(sent)
            answer = await asyncio.wait_for(reader.readline(), 10)
            writer.close()
        assert not answer or answer.startswith(b"HTTP/1.")
        told = [record for record in caplog.records if record.name.startswith(("peerloom", "aiohttp"))]
        assert not [record for record in told if record.levelno > logging.DEBUG or len(record.getMessage()) > 200]


async def test_a_reader_that_does_not_read_is_dropped_and_pages_are_limited() -> None:
    swarm = FakeSwarm(2)
    queue = swarm.feed.listen()
    for _ in range(MAX_BEHIND + 2):
        swarm.step()
        swarm.feed.look()
    assert queue.qsize() == MAX_BEHIND + 1  # the last one ends it
    while (data := queue.get_nowait()) is not None:
        assert data.startswith(b"event: ")
    queues = [swarm.feed.listen() for _ in range(MAX_LISTENERS)]
    async with served(swarm) as server, aiohttp.ClientSession() as client:
        async with client.get(server.url + "events") as answer:
            assert answer.status == 503
        swarm.feed.leave(queues[0])
        async with client.get(server.url + "events") as answer:
            assert answer.status == 200


async def asking(server: HttpServer, path: str, *, reads: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection with a small window, which has asked for `path` and got the head of an answer."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    address = server.url.removeprefix("http://").strip("/").split(":")
    await asyncio.get_running_loop().sock_connect(made, (address[0], int(address[1])))
    reader, writer = await asyncio.open_connection(sock=made, limit=4096)
    if path:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
    if not reads:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
    return reader, writer


def unsent(server: HttpServer, client: asyncio.StreamWriter) -> int:
    """Bytes that the server holds for a client."""
    made = server._runner.server
    assert made is not None
    port = client.get_extra_info("sockname")[1]
    (own,) = [each.transport for each in made.connections if each.transport.get_extra_info("peername")[1] == port]
    return int(own.get_write_buffer_size())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  the other end of a socket
            await asyncio.sleep(0.01)


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not look at its connections by itself."""
    monkeypatch.setattr(http_connections, "LOOK_S", 1e6)


@pytest.mark.usefixtures("unwatched")
async def test_who_does_not_read_or_asks_nothing_loses_its_socket_and_a_reader_keeps_it() -> None:
    swarm = FakeSwarm(200)
    async with served(swarm) as server:
        reader, good = await asking(server, "/events", reads=True)
        draining = asyncio.create_task(reader.read())
        _, sleeper = await asking(server, "/events", reads=False)
        mute, dumb = await asking(server, "", reads=True)
        await until(lambda: len(server.connections) == 3)
        for _ in range(MAX_BEHIND):
            swarm.step()
            swarm.feed.look()
        await until(lambda: unsent(server, sleeper) > 0 and unsent(server, good) == 0)
        now = 1000.0
        server.connections.look(now)
        assert len(server.connections) == 3, "nobody is judged by one look"
        server.connections.look(now + ASK_WITHIN_S + 1)
        assert await mute.read() == b""
        await until(lambda: len(server.connections) == 2)
        server.connections.look(now + BEHIND_S + 1)
        await until(lambda: len(server.connections) == 1)
        await until(lambda: len(swarm.feed._listeners) == 1)
        assert not draining.done()
        for writer in (good, sleeper, dumb):
            writer.transport.abort()
        await draining
        await until(lambda: len(server.connections) == 0)


async def test_a_page_that_vanishes_leaves_no_socket_and_no_listener() -> None:
    swarm = FakeSwarm(3)
    async with served(swarm) as server:
        open_before = psutil.Process().num_fds()
        for _ in range(20):
            _, writer = await asking(server, "/events", reads=True)
            writer.transport.abort()  # a reset, in place of the goodbye of a page that is closed
        swarm.step()
        for _ in range(3):
            swarm.feed.look()
        await until(lambda: len(server.connections) == 0 and not swarm.feed._listeners)
        assert psutil.Process().num_fds() <= open_before


@pytest.mark.usefixtures("unwatched")
async def test_there_are_only_so_many_connections() -> None:
    async with served(FakeSwarm(1)) as server:
        many = [await asking(server, "", reads=True) for _ in range(MAX_CONNECTIONS)]
        await until(lambda: len(server.connections) == MAX_CONNECTIONS)
        reader, writer = await asking(server, "", reads=True)
        assert await reader.read() == b"", "one too many is closed at once"
        assert len(server.connections) == MAX_CONNECTIONS
        for _, each in [*many, (reader, writer)]:
            each.transport.abort()
        await until(lambda: len(server.connections) == 0)


async def test_stopping_ends_open_pages_at_once(client: aiohttp.ClientSession) -> None:
    async with served(FakeSwarm(1)) as server:
        answer = await client.get(server.url + "events")
        await next_event(answer.content)
        await server.stop()
        await answer.content.read()  # comes back: the stream has ended
        assert answer.content.at_eof()
        answer.close()


async def test_a_taken_port_is_said_and_the_default_moves_on() -> None:
    async with served(FakeSwarm(1)) as first:
        port = int(first.url.split(":")[-1].strip("/"))
        with pytest.raises(PortInUse, match=str(port)):
            async with served(FakeSwarm(1), Endpoint("127.0.0.1", port, moves=False)):
                raise AssertionError("both listen on one port")
        async with served(FakeSwarm(1), Endpoint("127.0.0.1", port, moves=True)) as second:
            assert second.url != first.url
    with pytest.raises(ConfigError, match="192.0.2.1"):
        async with served(FakeSwarm(1), Endpoint("192.0.2.1", 0, moves=False)):
            raise AssertionError("not this machine's address")


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("none", None),
        (DEFAULT, Endpoint("127.0.0.1", 9464, moves=True)),
        ("127.0.0.1:9464", Endpoint("127.0.0.1", 9464, moves=False)),  # who names it means it
        ("0.0.0.0:80", Endpoint("0.0.0.0", 80, moves=False)),
        ("[::1]:0", Endpoint("::1", 0, moves=False)),
    ],
)
def test_endpoints(text: str, endpoint: Endpoint | None) -> None:
    assert parse_endpoint(text) == endpoint


async def test_the_feed_stays_bounded_over_a_day() -> None:
    swarm = FakeSwarm(5)
    for step in range(8640):
        swarm.step()
        if step % 50 == 0:  # somebody comes and goes
            name = f"guest-{step}"
            guest = swarm._record(step + 10, name, "trainer", "training")
            swarm.records[guest.peer_id] = guest
            swarm.frozen.add(guest.peer_id)
        if step % 50 == 3:
            swarm.records = {peer: record for peer, record in swarm.records.items() if record.name.startswith("node")}
        swarm.feed.look()
    await asyncio.sleep(0)
    queue = swarm.feed.listen()
    data = queue.get_nowait()
    assert data is not None
    first = json.loads(data.decode().split("data: ", 1)[1])
    assert len(first["changed"]) <= 10 and set(first["curves"]) <= {row["peer_id"] for row in first["changed"]}
    assert max(len(points) for points in first["curves"].values()) <= 240
    whole = first["curves"][swarm.peer("node-001")]
    assert whole[-1][0] - whole[0][0] > 80_000 and len(whole) > 100  # coarser, not shorter
    assert len(first["events"]) == 300


def test_meetings_are_forgotten_where_no_page_is_open() -> None:
    meetings = Meetings()
    own = FakeSwarm(1).own
    for number in range(5000):
        now, peer = NOW + number, PeerId(f"peer-{number}")
        record = replace(own, peer_id=peer, last_partner=f"other-{number}", issued_at=now, last_met_at=now - 1)
        meetings.note(row_of(NodeStatus(record=record), now), now)
    assert len(meetings._known) <= 2 * MEETING_S + 2 and len(meetings._told) <= 2 * MEETING_S + 2
