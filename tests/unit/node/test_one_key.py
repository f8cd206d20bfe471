"""A look at a swarm reads one DHT key, however many nodes there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from peerloom.node.dht_records import key_bytes, peers_key
from peerloom.node.dht_stack import DhtStack, Room
from tests.unit.node.discovery_swarm import RUN, DhtSwarm


async def test_all_records_of_a_run_are_read_by_one_key(tmp_path: Path) -> None:
    swarm = DhtSwarm(tmp_path)
    try:
        a, b = await swarm.join(), await swarm.join()
        assert await a.discovery.publish(a.record())
        keys: list[bytes] = []
        find = DhtStack.find

        async def counting(self: DhtStack, key: bytes, room: Room) -> list[tuple[str, bytes, float]]:
            keys.append(key)
            return await find(self, key, room)

        with patch.object(DhtStack, "find", counting):
            assert len(await b.discovery.peers()) == 1
        assert keys == [peers_key(RUN)]
    finally:
        await swarm.stop()


async def test_a_record_is_published_again_without_reading_all_others(tmp_path: Path) -> None:
    swarm = DhtSwarm(tmp_path)
    try:
        a, b = await swarm.join(), await swarm.join()
        stack = a.discovery._stack
        assert stack is not None
        protocol, found = stack._dht.protocol, list[set[int]]()
        call_find = protocol.call_find

        async def counting(peer: Any, keys: Any) -> Any:
            found.append({int(key) for key in keys})
            return await call_find(peer, keys)

        with patch.object(protocol, "call_find", counting):
            for round in (1, 2, 3):
                assert await a.discovery.publish(replace(a.record(), round=round))
        asked = [keys for keys in found if keys != {int(stack._dht.node_id)}]
        assert len(asked) <= 1  # who is near, once in HOMES_S, by a key with nothing under it
        assert int.from_bytes(key_bytes(peers_key(RUN)), "big") not in set().union(*asked)
        assert [record.round for record in await b.discovery.peers()] == [3]
    finally:
        await swarm.stop()
