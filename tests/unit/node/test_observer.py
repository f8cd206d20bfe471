"""What a look from outside reads: of a large swarm one key of the DHT, and nobody is asked."""

from __future__ import annotations

from peerloom.node.dht_records import peers_key
from peerloom.node.status import rows_of, to_json
from tests.unit.node.discovery_swarm import RUN, SPEC
from tests.unit.node.stored_swarm import stored_swarm


async def test_a_look_at_200_nodes_reads_one_key_and_asks_nobody() -> None:
    observer, stored, clock = stored_swarm(200)
    rows = rows_of(await observer.look(), clock.wall())
    assert stored.asked == [peers_key(RUN)]
    told = to_json(SPEC, RUN, rows, clock.wall())
    assert told["totals"]["nodes"] == told["totals"]["training"] == 200 and told["health"] == "healthy"
    assert len({row.peer_id for row in rows}) == 200


async def test_a_second_look_reads_it_once_more() -> None:
    observer, stored, _ = stored_swarm(70)
    first, second = await observer.look(), await observer.look()
    assert len(first) == len(second) == 70
    assert stored.asked == [peers_key(RUN)] * 2
