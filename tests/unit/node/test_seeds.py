"""Probing seeds: each way a seed can fail is told apart; the clock is compared with theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from peerloom.node.identity import Identity
from peerloom.node.p2pd import P2pDaemon, P2pdOptions
from peerloom.node.seeds import PROBE, ProbeReply, SeedReport, check_clock, probe_seeds, serve_probe
from peerloom.protocol.errors import ClockSkew, PeerloomError, RunMismatch, SeedUnreachable, VersionMismatch
from peerloom.protocol.invite import Invite
from peerloom.protocol.types import PeerId, RunId
from tests.unit.node.discovery_swarm import RUN, DhtSwarm, ShiftedClock

NOBODY = Identity.generate().peer_id
OTHER_RUN = RunId("0" * 16)


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[DhtSwarm]:
    made = DhtSwarm(tmp_path)
    yield made
    await made.stop()


@pytest.fixture
async def prober() -> AsyncIterator[P2pDaemon]:
    daemon = await P2pDaemon.start(P2pdOptions())
    yield daemon
    await daemon.stop()


@pytest.fixture
async def bare() -> AsyncIterator[P2pDaemon]:
    """A libp2p node that is no peerloom node, until a test makes it one."""
    daemon = await P2pDaemon.start(P2pdOptions(listen=("/ip4/127.0.0.1/tcp/0",)))
    yield daemon
    await daemon.stop()


async def invite_to(daemon: P2pDaemon, run_id: RunId | None = None) -> Invite:
    [address] = await daemon.addresses()
    return Invite(address, PeerId(str(daemon.p2p.peer_id)), run_id)


def reply(**changes: Any) -> ProbeReply:
    fields = {"wall": ShiftedClock().wall(), "version": "1", "protocol_min": 1, "protocol_max": 1, "run_id": RUN}
    return ProbeReply(**fields | changes)


async def probe(
    prober: P2pDaemon, *seeds: Invite, run_id: RunId | None = None, timeout_s: float = 5
) -> list[SeedReport]:
    return await probe_seeds(prober, seeds, ShiftedClock(), run_id, timeout_s)


async def test_a_seed_that_answers(prober: P2pDaemon, bare: P2pDaemon) -> None:
    await serve_probe(bare.p2p, reply)
    invite = await invite_to(bare, RUN)
    [report] = await probe(prober, invite, run_id=RUN)
    assert report.invite == invite
    assert report.reply.run_id == RUN
    assert check_clock([report]) is None


async def test_nothing_listens(prober: P2pDaemon) -> None:
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(
        SeedUnreachable, match=f"tcp/{port}/p2p/{NOBODY} refused the connection.*ask for a fresh invite"
    ):
        await probe(prober, Invite(f"/ip4/127.0.0.1/tcp/{port}", NOBODY))


async def test_a_name_that_does_not_resolve(prober: P2pDaemon) -> None:
    with pytest.raises(SeedUnreachable, match="name that does not resolve|did not answer"):
        await probe(prober, Invite("/dns4/nowhere.invalid/tcp/4001", NOBODY))


async def test_a_name_that_resolves(prober: P2pDaemon, bare: P2pDaemon) -> None:
    await serve_probe(bare.p2p, reply)
    invite = await invite_to(bare)
    [report] = await probe(prober, Invite(f"/dns4/localhost/tcp/{invite.port}", invite.peer_id))
    assert report.invite.host == "localhost"


@pytest.mark.parametrize(
    ("banner", "says"), [(b"", "did not answer within 1 s"), (b"HTTP/1.1 400 Bad\r\n\r\n" * 9, "")]
)
async def test_something_else_listens(prober: P2pDaemon, banner: bytes, says: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(banner)
        try:
            while await reader.read(1024):
                pass
        except ConnectionError:
            pass  # the far end gives up as it likes
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SeedUnreachable, match=says or "no libp2p node that answers|did not answer"):
            await probe(prober, Invite(f"/ip4/127.0.0.1/tcp/{port}", NOBODY), timeout_s=1)


async def test_another_peer_id(prober: P2pDaemon, bare: P2pDaemon) -> None:
    invite = await invite_to(bare)
    with pytest.raises(SeedUnreachable, match="is another node: its peer id is not the invite's"):
        await probe(prober, Invite(invite.host_multiaddr, NOBODY))


async def test_a_libp2p_node_that_is_not_peerloom(prober: P2pDaemon, bare: P2pDaemon) -> None:
    with pytest.raises(SeedUnreachable, match="not a peerloom one"):
        await probe(prober, await invite_to(bare))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "what is no answer"),
        (b"\x00garbage", "what is no answer"),
        (b"[" * 4000, "what is no answer"),
        (b'{"wall": 1e400}', "what is no answer"),
        (b"x" * 5000, "5000 bytes; the limit is 4096"),
    ],
)
async def test_garbage_for_an_answer(prober: P2pDaemon, bare: P2pDaemon, answer: bytes, says: str) -> None:
    from google.protobuf.wrappers_pb2 import BytesValue

    async def handle(_request: object, _context: object) -> BytesValue:
        return BytesValue(value=answer)

    await bare.p2p.add_protobuf_handler(PROBE, handle, BytesValue)
    with pytest.raises(SeedUnreachable, match=says):
        await probe(prober, await invite_to(bare))


async def test_a_seed_that_never_answers(prober: P2pDaemon, bare: P2pDaemon) -> None:
    from google.protobuf.wrappers_pb2 import BytesValue

    over = asyncio.Event()

    async def handle(_request: object, _context: object) -> BytesValue:
        await over.wait()
        return BytesValue()

    await bare.p2p.add_protobuf_handler(PROBE, handle, BytesValue)
    try:
        with pytest.raises(SeedUnreachable, match="did not answer within 0.5 s"):
            await probe(prober, await invite_to(bare), timeout_s=0.5)
    finally:
        over.set()


async def test_another_protocol_version(prober: P2pDaemon, bare: P2pDaemon) -> None:
    await serve_probe(bare.p2p, lambda: reply(protocol_min=7, protocol_max=9, version="9.9"))
    with pytest.raises(VersionMismatch, match=r"speaks protocol 7 to 9 \(peerloom 9.9\), and this node 1 to 1"):
        await probe(prober, await invite_to(bare))


@pytest.mark.parametrize(("invited", "own"), [(OTHER_RUN, None), (None, OTHER_RUN)])
async def test_another_run(prober: P2pDaemon, bare: P2pDaemon, invited: RunId | None, own: RunId | None) -> None:
    await serve_probe(bare.p2p, reply)
    with pytest.raises(RunMismatch, match=f"serves run {RUN}, and .* is for run {OTHER_RUN}"):
        await probe(prober, await invite_to(bare, invited), run_id=own)


async def test_one_good_seed_is_enough_and_bad_ones_are_all_named(swarm: DhtSwarm) -> None:
    a = await swarm.join()
    good = await a.invites()
    dead = Invite("/ip4/127.0.0.1/tcp/1", NOBODY)
    b = await swarm.join([dead, *good])
    assert await b.discovery.publish(b.record())
    assert len(await a.discovery.peers()) == 1
    with pytest.raises(SeedUnreachable) as caught:
        await swarm.join([dead, Invite("/ip4/127.0.0.1/tcp/2", NOBODY)])
    assert "tcp/1/" in str(caught.value) and "tcp/2/" in str(caught.value)


async def test_a_seed_may_find_itself_among_its_seeds(swarm: DhtSwarm) -> None:
    from peerloom.node.identity import load_or_create

    own = load_or_create(swarm.folder / "0.key").peer_id
    a = await swarm.join([Invite("/ip4/127.0.0.1/tcp/4001", own)])
    assert await a.discovery.publish(a.record())


@pytest.mark.parametrize("shift", [-5.0, 5.0])
async def test_a_clock_too_far_off_is_refused(swarm: DhtSwarm, shift: float) -> None:
    await swarm.join()
    side = "ahead of" if shift > 0 else "behind"
    with pytest.raises(ClockSkew, match=rf"clock is [45]\.\d s {side} the swarm's.*set-ntp true"):
        await swarm.join(clock=ShiftedClock(shift))


async def test_a_clock_somewhat_off_is_a_warning(swarm: DhtSwarm) -> None:
    await swarm.join()
    b = await swarm.join(clock=ShiftedClock(2.5))
    assert len(b.dht().warnings) == 1 and "ahead of the swarm's" in b.dht().warnings[0]


@pytest.mark.parametrize(
    ("offsets", "says"),
    [([], None), ([1.9], None), ([-1.9], None), ([2.1], "2.1 s behind"), ([-2.1], "2.1 s ahead"), ([0, 0, 900], None)],
)
def test_the_clock_is_compared_with_the_median(offsets: list[float], says: str | None) -> None:
    warning = check_clock([report_with(offset) for offset in offsets])
    assert warning is None if says is None else says in str(warning)


@pytest.mark.parametrize("offsets", [[3.1], [-3.1], [900, 900, 0]])
def test_beyond_the_limit_the_clock_is_an_error(offsets: list[float]) -> None:
    with pytest.raises(ClockSkew) as caught:
        check_clock([report_with(offset) for offset in offsets])
    assert isinstance(caught.value, PeerloomError) and caught.value.exit_code == 18


def report_with(offset: float) -> SeedReport:
    return SeedReport(invite=Invite("/ip4/127.0.0.1/tcp/1", NOBODY), reply=reply(), offset_s=offset, round_trip_s=0.01)
