"""Discovery: one conformance suite for the DHT and for memory, then what only the DHT has."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from peerloom.node import dht_member
from peerloom.node.backoff import CAP_S
from peerloom.node.dht_records import PEER_LIFE_S
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.identity import Identity
from peerloom.node.ports import hold_port
from peerloom.node.specs import sign_spec
from peerloom.protocol.errors import ConfigError, PortInUse
from peerloom.protocol.types import PeerId
from tests.unit.node.discovery_swarm import RUN, SPEC, DhtSwarm, MemorySwarm, has_ipv6

Swarm = DhtSwarm | MemorySwarm
needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.fixture(params=["memory", "dht"])
async def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Swarm]:
    made: Swarm = MemorySwarm() if request.param == "memory" else DhtSwarm(tmp_path)
    yield made
    await made.stop()


@pytest.fixture
async def dht(tmp_path: Path) -> AsyncIterator[DhtSwarm]:
    made = DhtSwarm(tmp_path)
    yield made
    await made.stop()


# -- both implementations ------------------------------------------------------------------------------------------


async def test_a_record_reaches_the_others_and_not_its_owner(swarm: Swarm) -> None:
    a, b, c = [await swarm.join() for _ in range(3)]
    record = a.record()
    assert await a.discovery.publish(record)
    assert await b.discovery.peers() == [record]
    assert await c.discovery.peers() == [record]
    assert await a.discovery.peers() == []


async def test_a_lone_node_publishes_to_itself(swarm: Swarm) -> None:
    a = await swarm.join()
    assert await a.discovery.publish(a.record())
    assert await a.discovery.peers() == []


async def test_the_newest_record_wins(swarm: Swarm) -> None:
    a, b = [await swarm.join() for _ in range(2)]
    for round_ in range(3):
        assert await a.discovery.publish(a.record(round=round_))
        assert [record.round for record in await b.discovery.peers()] == [round_]


async def test_a_record_expires(swarm: Swarm) -> None:
    a, b = [await swarm.join() for _ in range(2)]
    await a.discovery.publish(a.record())
    swarm.clock.shift += PEER_LIFE_S / 2
    assert len(await b.discovery.peers()) == 1
    swarm.clock.shift += PEER_LIFE_S / 2 + 1
    assert await b.discovery.peers() == []
    assert await a.discovery.publish(a.record(round=9))
    assert [record.round for record in await b.discovery.peers()] == [9]


async def test_a_tombstone_outranks_the_record_and_a_new_record_the_tombstone(swarm: Swarm) -> None:
    a, b = [await swarm.join() for _ in range(2)]
    await a.discovery.withdraw()  # nothing to take away
    await a.discovery.publish(a.record())
    assert len(await b.discovery.peers()) == 1
    await a.discovery.withdraw()
    assert await b.discovery.peers() == []
    swarm.clock.shift += 0.01
    await a.discovery.publish(a.record(round=1))
    assert [record.round for record in await b.discovery.peers()] == [1]


async def test_a_spec_is_found_by_its_run(swarm: Swarm) -> None:
    a, b = [await swarm.join() for _ in range(2)]
    assert await b.discovery.runs() == {}
    spec = sign_spec(SPEC, a.identity)
    assert await a.discovery.publish_spec(spec)
    assert await b.discovery.runs() == {RUN: spec}
    assert await b.discovery.publish_spec(spec)  # whoever holds it renews it


async def test_a_spec_with_a_wrong_signature_is_refused(swarm: Swarm) -> None:
    a = await swarm.join()
    spec = sign_spec(SPEC, Identity.generate())
    with pytest.raises(ValueError, match="not signed by"):
        await a.discovery.publish_spec(replace(spec, owner=a.identity.peer_id))


async def test_only_ones_own_record_within_its_ranges(swarm: Swarm) -> None:
    a, b = [await swarm.join() for _ in range(2)]
    with pytest.raises(ValueError, match="cannot publish the record of"):
        await a.discovery.publish(b.record())
    for bad in ({"round": -1}, {"addresses": ("no port",)}, {"instance": "x" * 999}, {"started_at": float("nan")}):
        with pytest.raises(ValueError):
            await a.discovery.publish(a.record(**bad))
    assert await b.discovery.peers() == []


async def test_free_text_is_made_fit_and_a_bad_loss_left_out(swarm: Swarm) -> None:
    a, b = [await swarm.join() for _ in range(2)]
    assert await a.discovery.publish(a.record(reason="out of\nmemory " + "x" * 999, loss=float("nan")))
    [found] = await b.discovery.peers()
    assert found.reason.startswith("out of memory xxx") and len(found.reason) == 512
    assert found.loss is None


async def test_stopping_twice(swarm: Swarm) -> None:
    a = await swarm.join()
    await a.discovery.stop()
    await a.discovery.stop()


# -- the DHT -------------------------------------------------------------------------------------------------------


async def test_nodes_go_on_without_the_seed_they_joined_by(dht: DhtSwarm) -> None:
    a, b, c = [await dht.join() for _ in range(3)]
    await a.discovery.publish_spec(sign_spec(SPEC, a.identity))
    await b.discovery.publish(b.record(round=1))
    await a.discovery.stop()
    assert [record.peer_id for record in await c.discovery.peers()] == [b.identity.peer_id]
    assert await b.discovery.publish(b.record(round=2))
    assert [record.round for record in await c.discovery.peers()] == [2]
    assert list(await c.discovery.runs()) == [RUN]


async def test_a_bare_invite_leads_to_the_run(dht: DhtSwarm) -> None:
    a = await dht.join()
    await a.discovery.publish_spec(sign_spec(SPEC, a.identity))
    await a.discovery.publish(a.record())
    bare = [replace(invite, run_id=None) for invite in await a.invites()]
    b = await dht.join(bare, run_id=None)
    with pytest.raises(ValueError, match="join_run"):
        await b.discovery.peers()
    [run_id] = await b.discovery.runs()
    b.dht().join_run(run_id)
    assert [record.peer_id for record in await b.discovery.peers()] == [a.identity.peer_id]


@needs_ipv6
async def test_ipv6(dht: DhtSwarm) -> None:
    a = await dht.join(host="::1")
    assert [invite.host for invite in await a.invites()] == ["::1"]
    b = await dht.join(host="::1")
    assert await b.discovery.publish(b.record())
    assert await a.discovery.peers() != []


async def test_a_client_reads_and_listens_on_nothing(dht: DhtSwarm) -> None:
    a = await dht.join()
    await a.discovery.publish(a.record())
    watcher = await dht.join(client_only=True)
    assert watcher.dht().port == 0
    assert await watcher.dht().invites() == []
    assert [record.peer_id for record in await watcher.discovery.peers()] == [a.identity.peer_id]


async def test_invites_name_port_peer_and_run(dht: DhtSwarm) -> None:
    a = await dht.join()
    [invite] = await a.invites()
    assert (invite.host, invite.port, invite.peer_id, invite.run_id) == (
        "127.0.0.1",
        a.dht().port,
        a.identity.peer_id,
        RUN,
    )


async def test_announced_addresses_are_what_is_given_out(dht: DhtSwarm) -> None:
    announced = await DhtDiscovery.create(
        identity=Identity.generate(),
        identity_path=None,
        clock=dht.clock,
        host="127.0.0.1",
        announce=["/dns4/seed.example.org", "/ip4/203.0.113.5/tcp/9"],
        run_id=RUN,
    )
    try:
        lines = await announced.invites()
    finally:
        await announced.stop()
    assert sorted(line.partition("/p2p/")[0] for line in lines) == [
        f"/dns4/seed.example.org/tcp/{announced.port}",
        "/ip4/203.0.113.5/tcp/9",
    ]


async def test_a_taken_port_and_a_bad_announcement_leave_nothing_behind(dht: DhtSwarm) -> None:
    before = psutil.Process().children()
    with hold_port("127.0.0.1", 0) as held:
        for changes, error in (({"port": held.port}, PortInUse), ({"announce": ["nonsense"]}, ConfigError)):
            with pytest.raises(error):
                await DhtDiscovery.create(
                    identity=Identity.generate(), identity_path=None, clock=dht.clock, host="127.0.0.1", **changes
                )
    assert psutil.Process().children() == before


async def test_a_store_with_nobody_left_says_so(dht: DhtSwarm) -> None:
    a, b = [await dht.join() for _ in range(2)]
    pid = a.dht().p2pd_pid
    assert pid is not None
    await a.discovery.stop()
    assert not await b.discovery.publish(b.record())
    assert await b.discovery.peers() == []


async def test_a_seed_that_hangs_does_not_hold_up_a_store(dht: DhtSwarm) -> None:
    a, b = [await dht.join() for _ in range(2)]
    pid = a.dht().p2pd_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):  # the store's own deadline is 6 s; this only ends a test that hangs
            assert not await b.discovery.publish(b.record())
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_p2pd_that_dies_comes_back_as_the_same_peer(dht: DhtSwarm) -> None:
    a, b = [await dht.join() for _ in range(2)]
    await a.discovery.publish_spec(sign_spec(SPEC, a.identity))
    await a.discovery.publish(a.record(round=5))
    invites, pid = await a.invites(), a.dht().p2pd_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await a.dht().restarted.wait()
    assert a.dht().p2pd_pid not in (None, pid)
    assert await a.invites() == invites
    assert list(await a.discovery.runs()) == [RUN]
    c = await dht.join(invites)
    assert [record.round for record in await c.discovery.peers()] == [5]
    assert (a.dht().restarts, b.dht().restarts) == (1, 0)
    assert not a.dht().closed.is_set()


async def test_p2pd_is_out_of_reach_of_ctrl_c(dht: DhtSwarm) -> None:
    a = await dht.join()
    pid = a.dht().p2pd_pid
    assert pid is not None
    assert os.getpgid(pid) != os.getpgid(0)


async def test_stop_ends_p2pd_and_frees_the_port(dht: DhtSwarm) -> None:
    a = await dht.join()
    pid, port = a.dht().p2pd_pid, a.dht().port
    assert pid is not None
    await a.discovery.stop()
    assert not psutil.pid_exists(pid)
    assert a.dht().closed.is_set()
    with hold_port("127.0.0.1", port):
        pass


CHILD = """
import asyncio, os, signal, sys, time
from pathlib import Path
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.identity import load_or_create
class Clock:
    wall, monotonic = staticmethod(time.time), staticmethod(time.monotonic)
async def main():
    path = Path(sys.argv[1])
    identity = load_or_create(path)
    found = await DhtDiscovery.create(identity=identity, identity_path=path, clock=Clock(), host="127.0.0.1")
    print(found.p2pd_pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_p2pd_ends_when_its_node_is_killed_and_nothing_is_written_to_the_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "key")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stderr == ""
    try:
        psutil.Process(int(done.stdout)).wait(timeout=60)
    except psutil.NoSuchProcess:
        pass  # it was faster


async def test_another_node_with_this_identity_is_seen(dht: DhtSwarm) -> None:
    a, b = [await dht.join() for _ in range(2)]
    await a.discovery.publish(a.record(instance="11"))
    assert await a.discovery.peers() == [] and a.dht().rival is None
    # The second node's record, as it would arrive: signed by the same key, later.
    from peerloom.node import dht_records as records

    twin = a.record(instance="22")
    expires_at = a.clock.wall() + 31
    value = records.encode_peer(a.identity, RUN, twin, expires_at)
    await b.dht()._store(records.peers_key(RUN), a.identity.peer_id, value, expires_at)
    await a.discovery.peers()
    assert a.dht().rival == twin


async def test_a_lost_seed_is_dialled_for_ever_with_backoff_and_found_again(
    dht: DhtSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour of the node's clock without its seed, which then comes back at its place.

    p2pd, which would leave the address alone for minutes in the end, is not asked meanwhile.
    """
    a, b = [await dht.join() for _ in range(2)]
    port = a.dht().port
    await a.discovery.stop()
    monkeypatch.setattr(dht_member, "TEND_S", 0.01)
    stack = b.dht()._stack
    assert stack is not None
    greet, lost, connect = stack.greet, stack.lost, stack.daemon.connect
    tried, looked = asyncio.Semaphore(0), asyncio.Semaphore(0)
    asked: list[PeerId] = []

    async def greets(peer: PeerId, multiaddr: str) -> None:
        try:
            await greet(peer, multiaddr)
        finally:
            tried.release()

    async def connects(peer: PeerId, *rest: Any) -> None:
        asked.append(peer)
        await connect(peer, *rest)

    async def looks(peers: Mapping[PeerId, str]) -> dict[PeerId, str]:
        looked.release()
        return await lost(peers)

    monkeypatch.setattr(stack, "greet", greets)
    monkeypatch.setattr(stack.daemon, "connect", connects)
    monkeypatch.setattr(stack, "lost", looks)
    async with asyncio.timeout(120):
        for failures in range(1, 61):
            await tried.acquire()
            while looked._value:
                await looked.acquire()
            if failures > 10:  # the delay is no longer what a busy machine takes for a look
                for _ in range(3):
                    await looked.acquire()
                assert not tried._value, f"dialled again at once after {failures} failures"
            dht.clock.shift += CAP_S
        assert not asked
        again = await DhtDiscovery.create(
            identity=a.identity,
            identity_path=dht.folder / "0.key",
            clock=dht.clock,
            host="127.0.0.1",
            port=port,
            run_id=RUN,
        )
        try:
            dht.clock.shift += CAP_S
            while not await b.discovery.publish(b.record()):
                dht.clock.shift += 1.0
            assert [record.peer_id for record in await again.peers()] == [b.identity.peer_id]
        finally:
            await again.stop()
