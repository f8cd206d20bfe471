"""Tunnels over real libp2p daemons on loopback: every service, each refusal, relays that die, crooked ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peerloom.node import grpc_client, tunnel, tunnel_dialer, tunnel_keep
from peerloom.node.p2pd import Stream
from peerloom.node.seams import MessageStream
from peerloom.node.tunnel_pump import hang_up
from peerloom.protocol.codec_flood import FloodFrame
from peerloom.protocol.dial_order import relay_address, relay_of
from peerloom.protocol.errors import LinkError, PeerError
from peerloom.protocol.messages import Chunk, FetchRequest, StateManifest
from peerloom.protocol.relay_choice import FAULT_WEIGHTS
from peerloom.protocol.relay_desk import DeskLimits, Pair
from peerloom.protocol.services import EXCHANGE, FLOOD, STAGE
from peerloom.protocol.stage_messages import StageOpen
from peerloom.protocol.tunnel import TUNNEL, Keep, OpenTo, TunnelRefused, decode_answer
from peerloom.protocol.types import PeerId, PeerRecord
from tests.unit.node.reach_swarm import ReachMember, ReachSwarm

NOWHERE = ("127.0.0.1:9",)
WITHIN_S = 30.0


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[ReachSwarm]:
    async with ReachSwarm(tmp_path) as made:
        yield made


@asynccontextmanager
async def placed(swarm: ReachSwarm, node: ReachMember, *relays: ReachMember) -> AsyncIterator[PeerRecord]:
    """The record of a node that only these relays reach, while it holds places at them."""
    jobs, standing = [], []
    for relay in relays:
        stands = asyncio.Event()
        kept = tunnel_keep.keep(
            node.reaching.tunnels, relay.peer_id, swarm.clock, lambda *_, stands=stands: stands.set(), place=True
        )
        jobs.append(asyncio.create_task(kept))
        standing.append(stands.wait())
        node.relays.add(relay.peer_id)
    try:
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*standing)
        via = tuple(relay.peer_id for relay in relays)
        yield replace(node.record, addresses=NOWHERE, reach="via", via=via, libp2p=())
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


def through_relays_alone(caller: ReachMember, monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p has connected all on loopback: the caller shall not know."""

    async def routes(peer: PeerRecord) -> tuple[str, ...]:
        relays = caller.reaching.book.order(peer.via, caller.reaching.clock.monotonic())
        last = caller.reaching.dialer._last.get(peer.peer_id)
        ways = [relay_address(relay) for relay in relays]
        return tuple(sorted(ways, key=lambda way: way != last))

    monkeypatch.setattr(caller.reaching.dialer, "routes", routes)


def way_to(caller: ReachMember, record: PeerRecord) -> PeerId | None:
    return relay_of(caller.reaching.dialer._last.get(record.peer_id, ""))


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110  what a counter says has no event
            await asyncio.sleep(0.01)


async def until_reached(caller: ReachMember, record: PeerRecord) -> None:
    """libp2p leaves a peer alone for seconds once a dial has failed, as that of a DHT's look while it was down."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await caller.transport.status(record)
            except LinkError:
                await asyncio.sleep(0.1)
            else:
                return


async def echo(stream: MessageStream[Any]) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


async def test_all_services_go_through_a_relay(swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, node, caller = [await swarm.join() for _ in range(3)]
    node.handler.on_exchange = echo
    through_relays_alone(caller, monkeypatch)
    async with placed(swarm, node, relay) as record:
        assert (await caller.transport.status(record)).record.peer_id == node.peer_id
        assert way_to(caller, record) == relay.peer_id
        stream = await caller.transport.open(record, EXCHANGE)
        for index in range(8):
            await stream.send(Chunk(index << 20, bytes([index]) * (1 << 20)))
            answer = await stream.receive()
            assert isinstance(answer, Chunk) and bytes(answer.data) == bytes([index]) * (1 << 20)
        await stream.close()
        for service, message in ((FLOOD, FloodFrame(b"a frame")), (STAGE, StageOpen("run", 1))):
            other = await caller.transport.open(record, service)
            await other.send(message)
            assert await other.receive() == message, service.path
            await other.close()
        fetched = [message async for message in caller.transport.fetch(record, FetchRequest("ab"))]
        assert isinstance(fetched[0], StateManifest) and len(fetched) == 3
        assert relay.counted["tunnels_relayed"] == 1
        assert relay.counted["relayed_bytes"] > 2 * (8 << 20)
        assert node.counted["tunnels_delivered"] == 1
    await caller.transport.stop()
    await eventually(lambda: relay.reaching.tunnels.desk.counts()["tunnels_relayed_now"] == 0)
    await eventually(lambda: node.reaching.tunnels.desk.counts()["tunnels_delivered_now"] == 0)


async def test_a_standing_libp2p_connection_needs_no_relay(swarm: ReachSwarm) -> None:
    seed, node = await swarm.join(), await swarm.join()
    record = replace(node.record, addresses=NOWHERE, reach="via")
    await until_reached(seed, record)
    assert way_to(seed, record) == node.peer_id
    assert not seed.counted.get("tunnels_relayed")


async def test_each_request_that_must_not_be_is_refused_and_counted(swarm: ReachSwarm) -> None:
    relay, node, caller = [await swarm.join(DeskLimits(tunnels_of_pair=1)) for _ in range(3)]
    mute = await swarm.join(DeskLimits(relays=False))
    tunnels = caller.reaching.tunnels

    async def refused(by: ReachMember, header: Any) -> str:
        with pytest.raises(TunnelRefused) as caught:
            await tunnels.open(by.peer_id, header)
        assert by.counted[f"tunnels_refused_{caught.value.refusal}"] >= 1
        return caught.value.refusal

    assert await refused(relay, OpenTo(node.peer_id)) == "unknown"
    assert await refused(relay, OpenTo(caller.peer_id)) == "own"
    assert await refused(mute, Keep(True)) == "unwilling"
    assert await refused(mute, OpenTo(node.peer_id)) == "unwilling"
    with pytest.raises(LinkError, match="own peer"):
        await caller.reaching.dialer.endpoint(caller.record, relay_address(relay.peer_id))
    relay.relays.add(caller.peer_id)
    assert await refused(relay, Keep(True)) == "loop"
    async with placed(swarm, node, relay):
        stream = await tunnels.open(relay.peer_id, OpenTo(node.peer_id))
        assert await refused(relay, OpenTo(node.peer_id)) == "greedy"
        node.relays.clear()  # a relay that the target has not chosen
        await hang_up(stream[1])
        await eventually(lambda: not relay.reaching.tunnels.desk.counts()["tunnels_relayed_now"])
        assert await refused(relay, OpenTo(node.peer_id)) == "unwilling"


async def test_headers_that_never_come_are_bounded_and_hinder_nobody_else(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "HEADER_S", 600.0)
    relay, node, caller, flooder = [await swarm.join() for _ in range(4)]
    stack = flooder.discovery._stack
    assert stack is not None
    desk = relay.reaching.tunnels.desk
    flood = [await stack.daemon.open_stream(relay.peer_id, TUNNEL, 5.0) for _ in range(200)]
    try:
        refused = 200 - desk.limits.half_open_of_peer
        await eventually(lambda: relay.counted.get("tunnels_refused_greedy", 0) == refused)
        assert desk.counts()["tunnels_half_open_now"] == desk.limits.half_open_of_peer
        through_relays_alone(caller, monkeypatch)
        async with placed(swarm, node, relay) as record:
            await caller.transport.status(record)
    finally:
        await hang_up(*(writer for _, writer in flood))
    await eventually(lambda: relay.counted.get("tunnels_refused_malformed", 0) == desk.limits.half_open_of_peer)
    await eventually(lambda: desk.counts()["tunnels_half_open_now"] == 0)


async def test_a_header_that_is_none_or_never_comes_is_refused(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "HEADER_S", 0.2)
    relay, other = await swarm.join(), await swarm.join()
    stack = other.discovery._stack
    assert stack is not None
    bad = [b"", b"\x00", b"\xff", b"\x35o", b"\x02k2"]
    for sent in bad:
        reader, writer = await stack.daemon.open_stream(relay.peer_id, TUNNEL, 5.0)
        writer.write(sent)
        async with asyncio.timeout(WITHIN_S):
            assert decode_answer(await reader.readexactly(1)) == "malformed", sent
            assert await reader.read() == b""
        await hang_up(writer)
    assert relay.counted["tunnels_refused_malformed"] == len(bad)


async def test_a_relay_that_never_answers_and_a_tunnel_that_nobody_takes_are_given_up(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, node, caller = [await swarm.join() for _ in range(3)]
    async with placed(swarm, node, relay) as record:
        monkeypatch.setattr(tunnel_dialer, "ACCEPT_S", 0.1)
        await caller.reaching.dialer.endpoint(record, relay_address(relay.peer_id))
        await eventually(lambda: relay.counted.get("tunnels_relayed") == 1)
        await eventually(lambda: not relay.reaching.tunnels.desk.counts()["tunnels_relayed_now"])
        await eventually(lambda: not caller.reaching.dialer._open)

        async def silent(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(relay.reaching.tunnels, "_serve", silent)
        monkeypatch.setattr(tunnel, "SETUP_S", 0.2)
        with pytest.raises(LinkError, match="no tunnel through"):
            await caller.reaching.dialer.endpoint(record, relay_address(relay.peer_id))
        assert caller.counted["relay_faults_gone"] == 1


async def test_when_one_relay_of_two_dies_the_call_takes_the_other(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, node, caller = [await swarm.join() for _ in range(4)]
    through_relays_alone(caller, monkeypatch)
    async with placed(swarm, node, first, second) as record:
        await caller.transport.status(record)
        used = next(each for each in (first, second) if each.peer_id == way_to(caller, record))
        await used.reaching.tunnels.stop()  # as its process's end would: every stream is gone at once
        monkeypatch.setattr(used.reaching.tunnels, "_take", None)
        await caller.transport.status(record)
        assert way_to(caller, record) == next(each for each in (first, second) if each is not used).peer_id


async def test_a_relay_that_vanishes_is_missed_and_its_tunnels_are_cut(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, node, caller = [await swarm.join() for _ in range(4)]
    monkeypatch.setattr(tunnel_keep, "PING_S", 0.1)
    monkeypatch.setattr(tunnel_keep, "PONG_S", 4.0)  # a busy machine is slow, and not gone
    node.handler.on_exchange = echo
    through_relays_alone(caller, monkeypatch)
    async with placed(swarm, node, first, second) as record:
        stream = await caller.transport.open(record, EXCHANGE)
        used = next(each for each in (first, second) if each.peer_id == way_to(caller, record))
        pid = used.discovery.p2pd_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it is there, and says nothing: grpc alone would wait for its keepalive
        try:
            with pytest.raises(PeerError):
                await asyncio.wait_for(stream.receive(), WITHIN_S)
            await stream.close()
            await caller.transport.status(record)
            assert way_to(caller, record) not in (None, used.peer_id)
        finally:
            os.kill(pid, signal.SIGCONT)


Crook = Callable[[Stream, Stream, Pair], Awaitable[None]]
HONEST_BYTES = 20_000  # past the handshakes


def crooked(spoil: Callable[[bytes], list[bytes]], honest: int) -> Crook:
    """A relay that spoils what it carries to the caller once `honest` bytes have passed."""

    async def carry(one: Stream, other: Stream, pair: Pair) -> None:
        passed = 0

        async def back() -> None:
            nonlocal passed
            while data := await other[0].read(1 << 14):
                passed += len(data)
                for part in spoil(data) if passed > honest else [data]:
                    one[1].write(part)
                await one[1].drain()

        async def there() -> None:
            while data := await one[0].read(1 << 14):
                other[1].write(data)
                await other[1].drain()

        jobs = [asyncio.create_task(back()), asyncio.create_task(there())]
        try:
            await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await hang_up(one[1], other[1])

    return carry


SPOILS: dict[str, Callable[[bytes], list[bytes]]] = {
    "alters": lambda data: [data[:-1] + bytes([data[-1] ^ 1])],
    "drops": lambda data: [data[: len(data) // 2]],
    "replays": lambda data: [data, data],
    "stalls": lambda _: [],
}


FAULTS = {f"relay_faults_{fault}" for fault, weight in FAULT_WEIGHTS.items() if weight > FAULT_WEIGHTS["refused"]}


CASES = [(does, honest) for does in SPOILS for honest in (0, HONEST_BYTES)]


async def expect_nothing_false(caller: ReachMember, record: PeerRecord) -> None:
    """Talks until the relay's doing ends it; what comes before that is what was sent."""
    async with asyncio.timeout(WITHIN_S):
        stream = await caller.transport.open(record, EXCHANGE)
        for index in range(64):
            sent = Chunk(index << 16, bytes(1 << 16))
            await stream.send(sent)
            got = await stream.receive()
            assert isinstance(got, Chunk) and bytes(got.data) == sent.data, "TLS let something through"


async def test_a_crooked_relay_is_noticed_scored_and_left(swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    crook, honest_one, node, caller = [await swarm.join() for _ in range(4)]
    monkeypatch.setattr(grpc_client, "DIAL_S", 1.0)
    monkeypatch.setattr(tunnel_dialer, "SILENT_S", 0.5)
    monkeypatch.setattr(grpc_client, "RELAYED_OPTIONS", (("grpc.http2.ping_timeout_ms", 1000),))
    node.handler.on_exchange = echo
    through_relays_alone(caller, monkeypatch)
    async with placed(swarm, node, crook, honest_one) as record:
        for does, honest in CASES:
            monkeypatch.setattr(crook.reaching.tunnels, "_carry", crooked(SPOILS[does], honest))
            caller.counted.clear()
            with pytest.raises(PeerError):
                await expect_nothing_false(caller, replace(record, via=(crook.peer_id,)))
            swarm.clock.ahead_s += 60.0  # past the link's own pause
            await caller.transport.status(record)
            assert way_to(caller, record) == honest_one.peer_id, f"a relay that {does} after {honest} bytes"
            faults = {name for name in caller.counted if name.startswith("relay_faults_")}
            assert faults & FAULTS, f"a relay that {does} after {honest} bytes has no fault: {faults}"
            ranked = caller.reaching.book.order((crook.peer_id, honest_one.peer_id), swarm.clock.monotonic())
            assert ranked == (honest_one.peer_id, crook.peer_id), "its faults put it last"
            await caller.transport._links.pop(node.peer_id).close()
            caller.reaching.dialer._last.clear()
            await eventually(lambda: not caller.reaching.dialer._watches)  # a ping under way would take 10,000 s
            swarm.clock.ahead_s += 10_000.0  # its faults are forgotten

        monkeypatch.setattr(crook.reaching.tunnels, "_carry", crooked(SPOILS["alters"], 0))
        caller.counted.clear()
        while not caller.counted.get("relays_left_alone"):  # it goes on: soon nobody asks it any more
            with pytest.raises(PeerError):
                await expect_nothing_false(caller, replace(record, via=(crook.peer_id,)))
            assert sum(caller.counted.get(each, 0.0) for each in FAULTS) <= 5, "left alone by then"
            swarm.clock.ahead_s += 30.0
        assert caller.reaching.book.left_alone(crook.peer_id, swarm.clock.monotonic())


async def test_a_new_life_of_p2pd_serves_tunnels_again(swarm: ReachSwarm) -> None:
    seed, node = await swarm.join(), await swarm.join()
    pid = node.discovery.p2pd_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(WITHIN_S):
        await node.discovery.restarted.wait()
    record = replace(node.record, addresses=NOWHERE, reach="via")
    await until_reached(seed, record)
    assert way_to(seed, record) == node.peer_id


async def test_a_tunnels_hellos_are_counted_by_its_origin(swarm: ReachSwarm) -> None:
    seed, node = await swarm.join(), await swarm.join()
    record = replace(node.record, addresses=NOWHERE, reach="via")
    await seed.transport.status(record)
    (said,) = node.reaching.tunnels._origins.values()
    assert said == f"{seed.peer_id} by {seed.peer_id}"
    server = node.transport._server
    assert server is not None
    assert list(server._budget._buckets) == [f"tunnel:{said}"]
