"""A swarm that stands in the DHT alone: signed records as a find returns them, and which keys were asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peerloom.node import dht_records
from peerloom.node.dht_member import Settings
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.identity import Identity
from peerloom.node.observer import Observer
from tests.unit.node.discovery_swarm import RUN, SPEC, ManualClock, record_of


@dataclass
class StoredRecords:
    """In place of a DhtStack: answers finds out of memory."""

    values: dict[bytes, list[tuple[str, bytes, float]]]
    asked: list[bytes] = field(default_factory=list)

    async def find(self, key: bytes, room: object) -> list[tuple[str, bytes, float]]:
        self.asked.append(key)
        return self.values.get(key, [])


class NobodyToAsk:
    """In place of a transport: fails whoever asks a node."""

    async def status(self, record: object) -> Any:
        raise AssertionError("in a large swarm the records tell enough")


def stored_swarm(count: int, transport: object = None) -> tuple[Observer, StoredRecords, ManualClock]:
    """An observer of `count` trainers, what it reads from, and its clock."""
    clock = ManualClock()
    values = []
    for number in range(count):
        identity = Identity.generate()
        record = record_of(identity.peer_id, clock, name=f"node-{number:03}", sketch=(0.5,) * 32, tokens_per_s=100.0)
        expires_at = clock.wall() + dht_records.PEER_LIFE_S
        value = dht_records.encode_peer(identity, RUN, record, expires_at)
        values.append((str(identity.peer_id), value, expires_at))
    stored = StoredRecords({dht_records.peers_key(RUN): values})
    settings = Settings(
        identity=Identity.generate(), identity_path=None, seeds=(), hosts=(), announce=(), clock=clock,
        client_only=True, port_map=False,
    )  # fmt: skip
    discovery = DhtDiscovery(settings, RUN)
    discovery._stack = stored  # type: ignore[assignment]
    return Observer(SPEC, discovery, transport or NobodyToAsk()), stored, clock  # type: ignore[arg-type]
