"""What a look from outside reads: of a large swarm one key of the DHT, and nobody is asked."""

from __future__ import annotations

import pytest

from peerloom.node.dht_records import peers_key
from peerloom.node.status import rows_of, to_json
from peerloom.protocol.errors import LinkError, NoDonor, PeerloomError, RunMismatch, VersionMismatch
from peerloom.protocol.types import NodeStatus, PeerRecord
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


class Refusing:
    """In place of a transport: one node answers, the others as they please."""

    def __init__(self, error: PeerloomError) -> None:
        self.error = error
        self.asked = 0

    async def status(self, record: PeerRecord) -> NodeStatus:
        self.asked += 1
        if self.asked > 1:
            raise self.error
        return NodeStatus(record=record, counters={"answered": 1.0})


@pytest.mark.parametrize("kind", [LinkError, NoDonor, RunMismatch, VersionMismatch])
async def test_whatever_a_node_answers_it_is_shown_as_its_record_says(kind: type[PeerloomError]) -> None:
    observer, _, _ = stored_swarm(3, Refusing(kind("so it says")))
    seen = await observer.look()
    assert [len(status.counters) for status in seen] == [1, 0, 0]
