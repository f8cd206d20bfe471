"""SeedFlow's nodes as a swarm in virtual time: kills, late joins, partitions; one state hash in the end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import patch

from peerloom.protocol.errors import IdentityInUse
from peerloom.protocol.flood import FloodMachine
from peerloom.protocol.flood_links import Link
from peerloom.protocol.flood_messages import Versions
from tests.sim.flood_swarm import FloodSwarm, play, spec


def test_a_few_nodes_run_to_the_end_and_agree(tmp_path: Path) -> None:
    async def scenario(swarm: FloodSwarm) -> None:
        for member in swarm.members:
            member.start()
        await swarm.until("all end", lambda: all(member.running is None for member in swarm.members))

    swarm = play(lambda: FloodSwarm(tmp_path, 4, spec()), scenario)
    assert {member.facts.state for member in swarm.members} == {"done"}
    assert {member.facts.state_hash for member in swarm.members} == {swarm.central()}
    assert all(member.facts.messages == 4 * 200 for member in swarm.members)
    assert all(member.facts.accuracy == 0.5 for member in swarm.members)


def test_twelve_nodes_with_kills_joins_and_a_partition_end_with_one_state(tmp_path: Path) -> None:
    async def scenario(swarm: FloodSwarm) -> None:
        members = swarm.members
        for member in members[:9]:
            member.start()
        await swarm.until("some steps", lambda: members[0].facts.step >= 40)
        await members[3].kill()
        await members[7].kill()
        for a in members[:5]:
            for b in members[5:9]:
                swarm.hub.partition(a.peer_id, b.peer_id)
        await asyncio.sleep(20)
        members[3].start()
        members[9].start()
        await asyncio.sleep(30)
        for a in members[:5]:
            for b in members[5:9]:
                swarm.hub.heal(a.peer_id, b.peer_id)
        members[7].start()
        members[10].start()
        await members[1].kill()
        await asyncio.sleep(10)
        members[1].start()
        members[11].start()
        members[4].node.drain()
        await swarm.until("it has drained", lambda: members[4].running is None)
        await swarm.until("all end", lambda: all(member.running is None for member in members), within_s=2000)

    swarm = play(lambda: FloodSwarm(tmp_path, 12, spec(max_steps=400)), scenario)
    assert [member.failure for member in swarm.members] == [None] * 12
    stayed = [member for member in swarm.members if member.index != 4]
    assert {member.facts.state_hash for member in stayed} == {swarm.central()}
    assert len([line for line in swarm.members[11].journal if line[0] == "joined"]) == 1
    assert [said.rpartition("; ")[2] for said in swarm.members[11].said] == ["its hash was confirmed by 2 other peers"]
    assert not any(member.counters["flood_cut"] for member in swarm.members)


def test_a_partitioned_liar_is_cut_off_and_a_late_joiner_fetches_another_state(tmp_path: Path) -> None:
    """Its two lives, from two copies of one disk, run on either side of a partition: one key, two histories.

    A node that joined meanwhile adopted a state that counts the liar's messages, and holds none of them itself.
    """

    async def scenario(swarm: FloodSwarm) -> None:
        members = swarm.members
        for member in members[:5]:
            member.start()
        await swarm.until("some steps", lambda: members[0].facts.step >= 30)
        await members[4].kill()
        copy = (members[4].folder / "flood.log").read_bytes()
        for a in (0, 1, 5):
            for b in (2, 3):
                swarm.hub.partition(members[a].peer_id, members[b].peer_id)
        for there in (2, 3):
            swarm.hub.partition(members[4].peer_id, members[there].peer_id)
        members[4].start()
        await asyncio.sleep(15)
        members[5].start()  # joins the side where the liar's first history goes on
        await asyncio.sleep(15)
        await members[4].kill()
        (members[4].folder / "flood.log").write_bytes(copy)
        for index in range(6):
            swarm.hub.heal(members[4].peer_id, members[index].peer_id)
        for there in (0, 1, 5):
            swarm.hub.partition(members[4].peer_id, members[there].peer_id)
        members[4].start()
        await asyncio.sleep(15)
        await members[4].kill()
        for a in (0, 1, 5):
            for b in (2, 3):
                swarm.hub.heal(members[a].peer_id, members[b].peer_id)
        honest = [member for member in members if member.index != 4]
        await swarm.until("all end", lambda: all(member.running is None for member in honest), within_s=3000)

    swarm = play(lambda: FloodSwarm(tmp_path, 6, spec(max_steps=800)), scenario)
    honest = [member for member in swarm.members if member.index != 4]
    assert [member.failure for member in honest] == [None] * 5
    assert all(member.counters["flood_origins_cut"] == 1 for member in honest)
    assert {member.facts.state_hash for member in honest} == {swarm.central(without=(4,))}
    late = swarm.members[5]
    assert len([line for line in late.journal if line[0] == "joined"]) == 2


def test_a_node_that_comes_back_to_a_swarm_that_cut_it_off_ends_with_a_reason(tmp_path: Path) -> None:
    async def scenario(swarm: FloodSwarm) -> None:
        members = swarm.members
        for member in members:
            member.start()
        await swarm.until("some steps", lambda: members[2].facts.step >= 30)
        await members[2].kill()
        copy = (members[2].folder / "flood.log").read_bytes()
        members[2].start()
        await swarm.until("more steps", lambda: members[2].facts.step >= 80)
        await members[2].kill()
        for peer in members[:2]:
            swarm.hub.partition(members[2].peer_id, peer.peer_id)
        (members[2].folder / "flood.log").write_bytes(copy)
        members[2].start()
        await asyncio.sleep(60)
        for peer in members[:2]:
            swarm.hub.heal(members[2].peer_id, peer.peer_id)
        await swarm.until("it ends", lambda: members[2].running is None)
        await swarm.until("all end", lambda: all(member.running is None for member in members), within_s=2000)

    swarm = play(lambda: FloodSwarm(tmp_path, 3, spec(max_steps=800)), scenario)
    assert isinstance(swarm.members[2].failure, IdentityInUse)
    assert {member.facts.state_hash for member in swarm.members[:2]} == {swarm.central(without=(2,))}


def test_a_node_whose_log_is_lost_goes_on_from_what_others_have_of_it(tmp_path: Path) -> None:
    async def scenario(swarm: FloodSwarm) -> None:
        members = swarm.members
        for member in members:
            member.start()
        await swarm.until("some steps", lambda: members[1].facts.step >= 50)
        await members[1].kill()
        for path in members[1].folder.iterdir():
            path.unlink()
        members[1].start()
        await swarm.until("all end", lambda: all(member.running is None for member in members))

    swarm = play(lambda: FloodSwarm(tmp_path, 3, spec()), scenario)
    assert [member.failure for member in swarm.members] == [None] * 3
    assert len({member.facts.state_hash for member in swarm.members}) == 1
    assert not any(member.counters["flood_cut"] for member in swarm.members)


def test_a_late_joiner_of_one_node_says_what_it_cost_and_that_nobody_confirmed_it(tmp_path: Path) -> None:
    async def scenario(swarm: FloodSwarm) -> None:
        members = swarm.members
        members[0].start()
        await swarm.until("a record that tells of messages", lambda: members[0].facts.step >= 120)
        members[1].start()
        await swarm.until("all end", lambda: all(member.running is None for member in members))

    swarm = play(lambda: FloodSwarm(tmp_path, 2, spec()), scenario)
    ((_, joined),) = [line for line in swarm.members[1].journal if line[0] == "joined"]
    (said,) = swarm.members[1].said
    assert said.startswith(f"joined at {joined['messages']} messages for {joined['bytes']} bytes; ")
    assert joined["witnesses"] == 0 and said.endswith("it is taken on the donor's word alone")
    assert swarm.members[0].said == []


def test_a_node_without_the_base_fetches_it_once_and_hands_it_on(tmp_path: Path) -> None:
    async def scenario(swarm: FloodSwarm) -> None:
        members, swarm.bare = swarm.members, {2, 3}
        for member in members[:2]:
            member.start()
        await swarm.until("some steps", lambda: members[0].facts.step >= 60)
        members[2].start()
        await swarm.until("it trains", lambda: members[2].facts.step >= 70)
        await members[2].kill()
        members[2].start()
        await swarm.until("it trains again", lambda: members[2].facts.step >= 90)
        for member in members[:2]:
            await member.kill()
        await asyncio.sleep(40)  # their records expire
        members[3].start()
        await swarm.until("it trains too", lambda: members[3].facts.step > 0)
        await swarm.until("all end", lambda: all(member.running is None for member in members))

    swarm = play(lambda: FloodSwarm(tmp_path, 4, spec(max_steps=600)), scenario)
    assert [member.failure for member in swarm.members] == [None] * 4
    for member in swarm.members[2:]:
        assert len([line for line in member.journal if line[0] == "base_fetched"]) == 1
        assert member.said[0].startswith("fetched the base model for ") and member.said[1].startswith("joined at ")
    assert sum(member.counters["base_served"] for member in swarm.members[:2]) == 1
    assert swarm.members[2].counters["base_served"] == 1
    assert len({member.facts.init_digest for member in swarm.members}) == 1
    assert not any(swarm.members[index].facts.counters.get("peer_faults") for index in range(4))


def test_a_bug_in_the_flood_ends_the_node_with_its_error(tmp_path: Path) -> None:
    """Not only the link over which it was met: that comes anew, and nobody would ever know."""
    compare = FloodMachine._compare

    async def scenario(swarm: FloodSwarm) -> None:
        victim = swarm.members[0]

        def broken(machine: FloodMachine, link: Link, versions: Versions) -> None:
            if machine._own == victim.peer_id:
                raise ZeroDivisionError("a bug")
            compare(machine, link, versions)

        with patch.object(FloodMachine, "_compare", broken):
            for member in swarm.members:
                member.start()
            assert victim.running is not None
            async with asyncio.timeout(120.0):
                await asyncio.wait((victim.running,))
        assert any("_check_driver" in error and "ZeroDivisionError" in error for error in swarm.errors)
        await swarm.members[1].kill()
        swarm.errors.clear()

    play(lambda: FloodSwarm(tmp_path, 2, spec()), scenario)
