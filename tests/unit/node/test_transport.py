"""What every Transport promises, shown on grpc and in memory alike."""

from __future__ import annotations

import asyncio
import logging

import pytest

from peerloom.node.identity import Identity
from peerloom.node.seams import ExchangeStream
from peerloom.protocol import limits
from peerloom.protocol.errors import (
    AuthenticationError,
    BadPayload,
    DigestMismatch,
    LimitExceeded,
    LinkError,
    MalformedMessage,
    NoDonor,
    PeerloomError,
)
from peerloom.protocol.messages import (
    Accept,
    Ack,
    Chunk,
    Commit,
    Decline,
    ExchangeMessage,
    FetchRequest,
    Hold,
    Offer,
    PayloadEnd,
    StateManifest,
    StatePiece,
    Withdraw,
)
from peerloom.protocol.services import EXCHANGE

from .wire import Handler, Swarm

pytestmark = pytest.mark.usefixtures("no_leaks")
OFFER = Offer("0f" * 16, 7, "cd" * 32, "fp32", 12)


async def test_every_message_crosses_both_ways_in_order(swarm: Swarm) -> None:
    script: list[ExchangeMessage] = [
        OFFER,
        Hold(),
        Accept(8),
        Decline("busy", "with another"),
        Chunk(4, b"data"),
        PayloadEnd(b"d" * 16),
        Commit(),
        Ack(),
        Withdraw("changed my mind"),
    ]
    seen: list[ExchangeMessage] = []

    async def echo(stream: ExchangeStream) -> None:
        while (message := await stream.receive()) is not None:
            seen.append(message)
            await stream.send(message)

    handler = Handler(echo)
    _, record = await swarm.server(handler)
    stream = await swarm.client().open(record, EXCHANGE)
    back = []
    for message in script:
        await stream.send(message)
        back.append(await stream.receive())
    await stream.close()
    assert await handler.ended.get() is None
    assert seen == back == script


async def test_the_server_knows_who_calls(swarm: Swarm) -> None:
    callers: asyncio.Queue[str] = asyncio.Queue()

    async def note(stream: ExchangeStream) -> None:
        callers.put_nowait(stream.peer)

    _, record = await swarm.server(Handler(note))
    me = Identity.generate()
    stream = await swarm.client(me).open(record, EXCHANGE)
    assert await callers.get() == me.peer_id
    assert stream.peer == record.peer_id
    assert await stream.receive() is None
    await stream.close()


async def test_a_finished_handler_ends_the_stream_clean_after_its_last_message(swarm: Swarm) -> None:
    async def decline(stream: ExchangeStream) -> None:
        await stream.receive()
        await stream.send(Decline("busy"))

    _, record = await swarm.server(Handler(decline))
    stream = await swarm.client().open(record, EXCHANGE)
    await stream.send(OFFER)
    assert await stream.receive() == Decline("busy")
    assert await stream.receive() is None
    assert await stream.receive() is None
    with pytest.raises(LinkError):
        await stream.send(Commit())
    await stream.close()
    await stream.close()
    with pytest.raises(LinkError):
        await stream.send(Commit())


async def test_what_was_sent_before_close_arrives(swarm: Swarm) -> None:
    got: list[ExchangeMessage] = []

    async def take(stream: ExchangeStream) -> None:
        while (message := await stream.receive()) is not None:
            got.append(message)

    handler = Handler(take)
    _, record = await swarm.server(handler)
    stream = await swarm.client().open(record, EXCHANGE)
    await stream.send(OFFER)
    await stream.send(Withdraw("no"))
    await stream.close()
    assert await handler.ended.get() is None
    assert got == [OFFER, Withdraw("no")]


async def test_both_sides_send_megabytes_at_once(swarm: Swarm) -> None:
    count = 24
    data = bytes(range(256)) * (limits.CHUNK_BYTES // 256)

    async def pump(stream: ExchangeStream) -> int:
        async def write() -> None:
            for index in range(count):
                await stream.send(Chunk(index * len(data), data))

        writing = asyncio.create_task(write())
        received = 0
        for index in range(count):
            message = await stream.receive()
            assert isinstance(message, Chunk)
            assert message.offset == index * len(data)
            assert message.data == data
            received += len(message.data)
        await writing
        return received

    async def serve(stream: ExchangeStream) -> None:
        await pump(stream)
        await stream.receive()

    handler = Handler(serve)
    server, record = await swarm.server(handler)
    client = swarm.client()
    stream = await client.open(record, EXCHANGE)
    assert await pump(stream) == count * len(data)
    await stream.close()
    assert await handler.ended.get() is None
    for sent, received in (client.bytes_moved(), server.bytes_moved()):
        assert count * len(data) < sent < count * (len(data) + 1024)
        assert count * len(data) < received < count * (len(data) + 1024)


@pytest.mark.parametrize("error", [None, DigestMismatch("other bytes")], ids=["clean", "error"])
async def test_the_last_word_reaches_a_caller_that_is_still_sending(swarm: Swarm, error: PeerloomError | None) -> None:
    async def withdraw(stream: ExchangeStream) -> None:
        await stream.receive()
        await stream.send(Withdraw("going"))
        if error is not None:
            raise error

    handler = Handler(withdraw)
    _, record = await swarm.server(handler)
    stream = await swarm.client().open(record, EXCHANGE)

    async def flood() -> None:
        while True:
            await stream.send(Chunk(0, bytes(limits.CHUNK_BYTES)))

    flooding = asyncio.create_task(flood())
    await handler.ended.get()
    assert await stream.receive() == Withdraw("going")
    if error is None:
        assert await stream.receive() is None
    else:
        with pytest.raises(DigestMismatch, match="other bytes"):
            await stream.receive()
    with pytest.raises(LinkError):
        await flooding
    await stream.close()


async def test_a_peer_that_does_not_read_holds_the_sender_back(swarm: Swarm) -> None:
    stop = asyncio.Event()

    async def never_read(stream: ExchangeStream) -> None:
        await stop.wait()

    _, record = await swarm.server(Handler(never_read))
    stream = await swarm.client().open(record, EXCHANGE)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while True:
            await stream.send(Chunk(0, bytes(limits.CHUNK_BYTES)))
            sent += 1

    flooding = asyncio.create_task(flood())
    done, _ = await asyncio.wait((flooding,), timeout=1.0)
    assert not done
    assert sent < 32
    flooding.cancel()
    await asyncio.wait((flooding,))
    stop.set()
    await stream.close()


async def test_a_cancelled_receive_loses_nothing(swarm: Swarm) -> None:
    go = asyncio.Event()

    async def later(stream: ExchangeStream) -> None:
        await go.wait()
        await stream.send(Hold())

    _, record = await swarm.server(Handler(later))
    stream = await swarm.client().open(record, EXCHANGE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await stream.receive()
    go.set()
    assert await stream.receive() == Hold()
    assert await stream.receive() is None
    await stream.close()


async def test_the_callers_end_breaks_the_servers_stream(swarm: Swarm) -> None:
    handler = Handler()
    _, record = await swarm.server(handler)
    client = swarm.client()
    stream = await client.open(record, EXCHANGE)
    await stream.send(OFFER)
    await client.stop()
    assert isinstance(await handler.ended.get(), LinkError)
    with pytest.raises(LinkError):
        await stream.receive()
    await stream.close()


async def test_the_servers_end_breaks_the_callers_stream(swarm: Swarm) -> None:
    server, record = await swarm.server(Handler())
    stream = await swarm.client().open(record, EXCHANGE)
    waiting = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    await server.stop()
    with pytest.raises(LinkError):
        await waiting
    with pytest.raises(LinkError):
        await stream.send(OFFER)
    await stream.close()


@pytest.mark.parametrize(
    "error",
    [
        MalformedMessage("a second offer"),
        LimitExceeded("too much"),
        DigestMismatch("other bytes"),
        BadPayload("NaN"),
        AuthenticationError("who?"),
        LinkError("busy"),
        NoDonor("no state yet: größer"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_handlers_error_is_raised_at_the_caller(swarm: Swarm, error: PeerloomError) -> None:
    async def fail(stream: ExchangeStream) -> None:
        await stream.receive()
        raise error

    handler = Handler(fail, fetch_error=error)
    _, record = await swarm.server(handler)
    client = swarm.client()
    stream = await client.open(record, EXCHANGE)
    await stream.send(OFFER)
    with pytest.raises(type(error), match=str(error)) as caught:
        await stream.receive()
    assert type(caught.value) is type(error)
    await stream.close()
    with pytest.raises(type(error), match=str(error)):
        async for _ in client.fetch(record, FetchRequest("ab")):
            pass


async def test_a_bug_in_a_handler_is_logged_and_not_told(swarm: Swarm, caplog: pytest.LogCaptureFixture) -> None:
    async def bug(stream: ExchangeStream) -> None:
        raise ZeroDivisionError("a secret path")

    _, record = await swarm.server(Handler(bug))
    stream = await swarm.client().open(record, EXCHANGE)
    with caplog.at_level(logging.ERROR), pytest.raises(LinkError, match="internal") as caught:
        await stream.receive()
    await stream.close()
    assert "secret" not in str(caught.value)
    assert "ZeroDivisionError" in caplog.text


async def test_status(swarm: Swarm) -> None:
    handler = Handler()
    _, record = await swarm.server(handler)
    assert await swarm.client().status(record) == handler.own


async def test_fetch_from_the_start_and_from_a_piece_on(swarm: Swarm) -> None:
    _, record = await swarm.server(Handler())
    client = swarm.client()
    manifest = StateManifest("snap", 3, 60, "ab", 6, 4, (b"\1" * 32,) * 2, 2.5)
    assert [m async for m in client.fetch(record, FetchRequest("ab"))] == [
        manifest,
        StatePiece(0, b"abcd"),
        StatePiece(1, b"ef"),
    ]
    resumed = [m async for m in client.fetch(record, FetchRequest("ab", "snap", 1))]
    assert resumed == [manifest, StatePiece(1, b"ef")]


async def test_leaving_a_fetch_stops_the_donor(swarm: Swarm) -> None:
    handler = Handler(pieces=(bytes(limits.CHUNK_BYTES),) * 200)
    _, record = await swarm.server(handler)
    fetching = swarm.client().fetch(record, FetchRequest("ab"))
    assert isinstance(await anext(fetching), StateManifest)
    await fetching.aclose()
    async with asyncio.timeout(20):
        await handler.left.wait()
