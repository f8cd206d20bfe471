"""A look at a swarm reads one DHT key, however many nodes there are."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from peerloom.node.dht_records import peers_key
from peerloom.node.dht_stack import DhtStack
from tests.unit.node.discovery_swarm import RUN, DhtSwarm


async def test_all_records_of_a_run_are_read_by_one_key(tmp_path: Path) -> None:
    swarm = DhtSwarm(tmp_path)
    try:
        a, b = await swarm.join(), await swarm.join()
        assert await a.discovery.publish(a.record())
        keys: list[bytes] = []
        find = DhtStack.find

        async def counting(self: DhtStack, key: bytes) -> list[tuple[str, bytes, float]]:
            keys.append(key)
            return await find(self, key)

        with patch.object(DhtStack, "find", counting):
            assert len(await b.discovery.peers()) == 1
        assert keys == [peers_key(RUN)]
    finally:
        await swarm.stop()
