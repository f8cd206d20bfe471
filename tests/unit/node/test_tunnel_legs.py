"""The relay's own TCP port: who is let in, who is not, and by which way each leg of a tunnel goes."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import psutil
import pytest

from peerloom.node import tunnel, tunnel_leg_dial, tunnel_legs
from peerloom.node.config import NodeConfig
from peerloom.node.p2pd import Stream
from peerloom.node.reaching import listen_for_legs
from peerloom.node.seams import Clock
from peerloom.node.tunnel import Tunnels
from peerloom.node.tunnel_leg_dial import AGAIN_S, CROWDED_S, LegDialer
from peerloom.node.tunnel_legs import MAX_STRANGERS, LegPort
from peerloom.node.tunnel_pump import hang_up
from peerloom.protocol.errors import ConfigError, MalformedMessage, PeerError, PortInUse
from peerloom.protocol.services import EXCHANGE
from peerloom.protocol.tunnel import GREETING_BYTES, LEG_ACK, TUNNEL, Offer, OpenTo, encode_header
from peerloom.protocol.types import PeerId
from tests.unit.node.reach_swarm import ReachMember, ReachSwarm
from tests.unit.node.test_tunnel import WITHIN_S, echo, eventually, placed, through_relays_alone
from tests.unit.node.wire import Jumpable

HERE = ("127.0.0.1",)
RELAY = PeerId("relay")


class Port(LegPort):
    """That counts."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        super().__init__(lambda metric, amount: self.counted.update({metric: int(amount)}))


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    fds = psutil.Process().num_fds()
    made = Port()
    made.listen(HERE, 0)
    yield made
    await made.stop()
    await eventually(lambda: psutil.Process().num_fds() <= fds)


async def dialled(offer: Offer, clock: Clock | None = None) -> Stream | None:
    return await LegDialer(clock or Jumpable()).dial(RELAY, HERE, offer)


async def said(offer: Offer, greeting: bytes) -> bytes:
    """All that the port says to one who greets it so, and then waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", offer.port)
    writer.write(greeting)
    try:
        async with asyncio.timeout(WITHIN_S):
            return await reader.read()
    except ConnectionResetError:  # it was closed with bytes unread
        return b""
    finally:
        await hang_up(writer)


async def test_a_good_token_lets_one_connection_in_and_no_second(port: Port) -> None:
    with port.offered() as place:
        assert place is not None and place.take() is None
        leg = await dialled(place.offer)
        taken = place.take()
        assert leg is not None and taken is not None
        assert await dialled(place.offer) is None
        assert await said(place.offer, place.offer.greeting) == b""
        leg[1].write(b"there")
        taken[1].write(b"back")
        assert await taken[0].readexactly(5) == b"there" and await leg[0].readexactly(4) == b"back"
        for _, writer in (leg, taken):
            assert writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await hang_up(leg[1], taken[1])
    assert port.counted["tunnel_strangers"] == 2


async def test_what_was_let_in_and_is_not_taken_is_closed_with_the_setup(port: Port) -> None:
    with port.offered() as place:
        assert place is not None
        leg = await dialled(place.offer)
    assert leg is not None and await leg[0].read() == b""
    await hang_up(leg[1])
    assert await said(place.offer, place.offer.greeting) == b"", "late"


async def test_a_wrong_a_half_and_a_late_greeting_are_told_nothing(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    with port.offered() as place:
        assert place is not None
        assert await said(place.offer, bytes(GREETING_BYTES)) == b""
        assert await said(place.offer, place.offer.token + bytes(GREETING_BYTES)) == b""
        monkeypatch.setattr(tunnel_legs, "GREETING_S", 0.05)
        assert await said(place.offer, place.offer.greeting[:-1]) == b""
        assert await said(place.offer, b"") == b""
        assert port.counted["tunnel_strangers"] == 4
        monkeypatch.undo()
        leg = await dialled(place.offer)
        assert leg is not None, "the offer stood all the while"
        await hang_up(leg[1])


async def test_a_flood_of_strangers_is_bounded_and_shuts_nobody_out(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_legs, "GREETING_S", 600.0)
    flood = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(3 * MAX_STRANGERS)]
    await eventually(lambda: port.counted["tunnel_strangers"] == 2 * MAX_STRANGERS)
    assert len(port._strangers) == MAX_STRANGERS
    assert [await reader.read() for reader, _ in flood[: 2 * MAX_STRANGERS]] == [b""] * 2 * MAX_STRANGERS
    with port.offered() as place:
        assert place is not None
        leg = await dialled(place.offer)
        assert leg is not None
        await hang_up(leg[1])
    await hang_up(*(writer for _, writer in flood))
    await eventually(lambda: not port._strangers)


async def test_a_flood_turns_away_its_own_host(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_legs, "GREETING_S", 600.0)
    slow_reader, slow = await asyncio.open_connection("127.0.0.1", port.port)
    await eventually(lambda: len(port._strangers) == 1)
    count = 2 * MAX_STRANGERS
    flood = [await asyncio.open_connection("127.0.0.1", port.port, local_addr=("127.0.0.2", 0)) for _ in range(count)]
    await eventually(lambda: port.counted["tunnel_strangers"] == count + 1 - MAX_STRANGERS)
    with port.offered() as place:
        assert place is not None
        slow.write(place.offer.greeting)
        assert await slow_reader.readexactly(1) == LEG_ACK, "the oldest of all, and its host's only one"
    await hang_up(slow, *(writer for _, writer in flood))


def test_a_port_that_nobody_named_gives_way(tmp_path: Path) -> None:
    asked: list[int] = []

    class Listening:
        def listen(self, hosts: tuple[str, ...], port: int) -> int:
            asked.append(port)
            if port:
                raise PortInUse("taken since")
            return 4003

    tunnels, config = cast(Tunnels, Listening()), NodeConfig(home=tmp_path)
    assert listen_for_legs(tunnels, config, 4001) == 4003 and asked == [4001, 0]
    with pytest.raises(PortInUse):
        listen_for_legs(tunnels, NodeConfig(home=tmp_path, relay_port=4001), 4001)


async def test_a_crowded_relay_is_tried_again_soon() -> None:
    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server, clock = await asyncio.start_server(hangs_up, "127.0.0.1", 0), Jumpable()
    async with server:
        dialer = LegDialer(clock)
        assert await dialer.dial(RELAY, HERE, Offer(server.sockets[0].getsockname()[1], bytes(16))) is None
    assert dialer.left_alone(RELAY)
    clock.ahead_s += CROWDED_S + 1
    assert not dialer.left_alone(RELAY)


async def test_a_taken_port_is_said(port: Port) -> None:
    with pytest.raises(PortInUse, match=str(port.port)):
        Port().listen(HERE, port.port)
    with pytest.raises(ConfigError):
        Port().listen(("127.0.0.1", "192.0.2.1"), 0)
    twice = Port()
    assert twice.listen((*HERE, *HERE, "127.0.0.2"), 0) == twice.port
    await twice.stop()
    with twice.offered() as place:
        assert place is None


async def impostor(answer: bytes) -> asyncio.Server:
    """A port that is not the relay's."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


@pytest.mark.parametrize("answer", [b"", b"+OK\r\n"])
async def test_a_port_that_is_not_the_relays_is_left_alone_for_a_while(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_leg_dial, "DIRECT_S", 0.1)
    monkeypatch.setattr(tunnel_leg_dial, "MAX_REMEMBERED", 2)
    server, clock = await impostor(answer), Jumpable()
    async with server:
        dialer, offer = LegDialer(clock), Offer(server.sockets[0].getsockname()[1], bytes(16))
        assert await dialer.dial(RELAY, HERE, offer) is None
        assert dialer.left_alone(RELAY) and not dialer.left_alone(PeerId("another"))
        clock.ahead_s += AGAIN_S + 1
        assert not dialer.left_alone(RELAY)
        for name in ("one", "two"):
            await dialer.dial(PeerId(name), HERE, offer)
        assert list(dialer._failed) == ["one", "two"]


async def test_the_second_host_is_tried_when_the_first_has_no_such_port(port: Port) -> None:
    with port.offered() as place:
        assert place is not None
        leg = await LegDialer(Jumpable()).dial(RELAY, ("127.0.0.3", *HERE), place.offer)
        assert leg is not None
        await hang_up(leg[1])


# whole tunnels, over libp2p daemons


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[ReachSwarm]:
    async with ReachSwarm(tmp_path) as made:
        yield made


Spoil = Callable[[ReachMember], None]


def legs(member: ReachMember) -> tuple[float, float]:
    return member.counted.get("tunnel_legs_tcp", 0), member.counted.get("tunnel_legs_libp2p", 0)


async def nobody(*_: object) -> None:
    """A relay's port that is not reached."""


async def call_through(swarm: ReachSwarm, relay: ReachMember, node: ReachMember, caller: ReachMember) -> None:
    """A call, and the way back to no tunnel at all."""
    async with placed(swarm, node, relay) as record:
        assert (await caller.transport.status(record)).record.peer_id == node.peer_id
        await caller.transport._links.pop(node.peer_id).close()
        await eventually(lambda: relay.reaching.tunnels.desk.counts()["tunnels_relayed_now"] == 0)
        await eventually(lambda: node.reaching.tunnels.desk.counts()["tunnels_delivered_now"] == 0)


async def test_each_leg_goes_by_its_own_way(swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, node, caller = [await swarm.join() for _ in range(3)]
    through_relays_alone(caller, monkeypatch)
    await call_through(swarm, relay, node, caller)
    assert (legs(relay), legs(node), legs(caller)) == ((2, 0), (1, 0), (1, 0))
    with monkeypatch.context() as patch:
        patch.setattr(caller.reaching.tunnels._leg_dialer, "dial", nobody)
        await call_through(swarm, relay, node, caller)
    assert (legs(relay), legs(node), legs(caller)) == ((3, 1), (2, 0), (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(node.reaching.tunnels._leg_dialer, "dial", nobody)
        await call_through(swarm, relay, node, caller)
    assert (legs(relay), legs(node), legs(caller)) == ((4, 2), (2, 1), (2, 1))
    assert not relay.counted.get("tunnel_strangers")


async def test_without_a_port_all_goes_over_libp2p(swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, node, caller = [await swarm.join(leg_port=False) for _ in range(3)]
    through_relays_alone(caller, monkeypatch)
    await call_through(swarm, relay, node, caller)
    assert (legs(relay), legs(node), legs(caller)) == ((0, 2), (0, 1), (0, 1))


async def test_a_port_that_is_not_reached_costs_one_attempt_of_each_end(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, node, caller = [await swarm.join() for _ in range(3)]
    through_relays_alone(caller, monkeypatch)
    await relay.reaching.tunnels._leg_port.stop()
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it is connected to, and says nothing
        relay.reaching.tunnels._leg_port.port = mute.getsockname()[1]
        await call_through(swarm, relay, node, caller)
        assert (legs(relay), legs(node), legs(caller)) == ((0, 2), (0, 1), (0, 1))
        for end in (node, caller):
            assert end.reaching.tunnels._leg_dialer.left_alone(relay.peer_id)
            monkeypatch.setattr(end.reaching.tunnels._leg_dialer, "dial", None)
        await call_through(swarm, relay, node, caller)
    assert (legs(relay), legs(node), legs(caller)) == ((0, 4), (0, 2), (0, 2))


@pytest.mark.parametrize("liar", ["node", "caller"])
async def test_one_who_says_that_it_came_and_did_not_has_no_tunnel(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    relay, node, caller = [await swarm.join() for _ in range(3)]
    through_relays_alone(caller, monkeypatch)
    made: list[Stream] = []

    async def elsewhere(*_: object) -> Stream:
        near, far = socket.socketpair()
        made.append(await asyncio.open_connection(sock=far))
        return await asyncio.open_connection(sock=near)

    end = {"node": node, "caller": caller}[liar]
    monkeypatch.setattr(end.reaching.tunnels._leg_dialer, "dial", elsewhere)
    async with placed(swarm, node, relay):
        if liar == "node":
            with pytest.raises(PeerError, match="no longer answers"):
                await caller.reaching.tunnels.open(relay.peer_id, OpenTo(node.peer_id))
        else:
            stream = await caller.reaching.tunnels.open(relay.peer_id, OpenTo(node.peer_id))
            await hang_up(stream[1])
        await eventually(lambda: made != [] and relay.reaching.tunnels.desk.counts()["tunnels_relayed_now"] == 0)
        assert relay.reaching.tunnels.desk.counts()["tunnels_half_open_now"] == 0
        assert not relay.counted.get("tunnels_relayed") and not relay.reaching.tunnels._leg_port._places
        await hang_up(*(writer for _, writer in made))


async def test_one_who_does_not_say_by_which_way_has_no_tunnel(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "LEG_S", 0.2)
    relay, node, mute = [await swarm.join() for _ in range(3)]
    stack = mute.discovery._stack
    assert stack is not None
    async with placed(swarm, node, relay):
        reader, writer = await stack.daemon.open_stream(relay.peer_id, TUNNEL, 5.0)
        writer.write(encode_header(OpenTo(node.peer_id)))
        async with asyncio.timeout(WITHIN_S):
            assert len(await reader.read()) == 1 + 2 + 16
        await hang_up(writer)
        await eventually(lambda: relay.reaching.tunnels.desk.counts()["tunnels_relayed_now"] == 0)
        await eventually(lambda: node.reaching.tunnels.desk.counts()["tunnels_delivered_now"] == 0)


async def test_a_relay_that_dies_ends_its_tcp_legs_and_the_call_takes_the_other(
    swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, node, caller = [await swarm.join() for _ in range(4)]
    node.handler.on_exchange = echo
    through_relays_alone(caller, monkeypatch)
    async with placed(swarm, node, first, second) as record:
        stream = await caller.transport.open(record, EXCHANGE)
        used, other = sorted((first, second), key=legs, reverse=True)
        assert legs(used) == (2, 0) and legs(other) == (0, 0)
        await used.reaching.tunnels.stop()
        monkeypatch.setattr(used.reaching.tunnels, "_take", None)
        with pytest.raises(PeerError):
            await asyncio.wait_for(stream.receive(), WITHIN_S)
        await stream.close()
        await caller.transport.status(record)
        assert legs(other) == (2, 0)


async def test_an_offer_where_none_is_due_is_refused(swarm: ReachSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, other = await swarm.join(), await swarm.join()
    offer = b"\xff" + bytes([9, 9]) + bytes(16)

    async def answer(stream: Stream, *_: object) -> None:
        await stream[0].readexactly(3)
        stream[1].write(offer)
        await stream[0].read()

    monkeypatch.setattr(relay.reaching.tunnels, "_serve", answer)
    with pytest.raises(MalformedMessage, match="offers"):
        await other.reaching.tunnels.open(relay.peer_id, tunnel.Keep(place=False))
    assert len(LEG_ACK) == 1
