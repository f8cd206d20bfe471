"""SeedFlow's nodes as a swarm in virtual time: kills, late joins, partitions; one state hash in the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

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

    swarm = play(lambda: FloodSwarm(tmp_path, 12, spec(max_steps=600)), scenario)
    assert [member.failure for member in swarm.members] == [None] * 12
    stayed = [member for member in swarm.members if member.index != 4]
    assert {member.facts.state_hash for member in stayed} == {swarm.central()}
    assert len([line for line in swarm.members[11].journal if line[0] == "joined"]) == 1
    assert not any(member.counters["flood_cut"] for member in swarm.members)
