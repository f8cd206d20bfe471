"""What the page shows: a node's own view of its swarm, looked at every few seconds, told to whoever listens.

It asks nobody: all of it stands in the records that the node reads anyway. A listener gets one `snapshot` and then
`update`s with what changed; the rows are those of `peer status --json` with times of day in place of ages.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from peerloom.node.http_history import Curves, Events, Meetings
from peerloom.node.status import (
    HEALTH,
    NodeRow,
    Totals,
    health_from,
    problems_of,
    row_of,
    rows_of,
    to_json,
    totals_of,
)
from peerloom.protocol.consensus import relative_distance
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

LOOK_S = 2.0
FORGET_S = 900.0  # a silent node stays on the page this long
DISTANCE_EVERY_S = 10.0  # the one sum that costs something
MAX_PROBLEMS = 20
MAX_LISTENERS = 32
MAX_BEHIND = 16  # updates that a slow listener may have waiting: then it is dropped, and may come back

_OWN_TIME = ("silent_s", "heartbeat_age_s", "last_met_s", "sketch", "partners", "addresses")


class TooManyListeners(Exception):
    """As many pages are open as one node serves."""


class SwarmFeed:
    """`own` is this node's status, `others` the newest records of the rest, `left` who has withdrawn its record."""

    def __init__(
        self,
        spec: RunSpec,
        own: Callable[[], NodeStatus],
        others: Callable[[], list[PeerRecord]],
        left: Callable[[], dict[PeerId, float]],
        wall: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._own, self._others, self._left, self._wall = own, others, left, wall
        self._heard: dict[PeerId, NodeStatus] = {}
        self._sent: dict[PeerId, tuple[object, ...]] = {}
        self._curves, self._meetings, self._events = Curves(), Meetings(), Events()
        self._told_event = 0
        self._distance: float | None = None
        self._distance_at = 0.0
        self._listeners: set[asyncio.Queue[bytes | None]] = set()

    async def run(self) -> None:
        """Looks every LOOK_S; until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def status(self) -> dict[str, Any]:
        """The documented object of `peer status --json`, as this node sees the swarm."""
        now = self._wall()
        return to_json(self._spec, self._spec.run_id, rows_of(self._heard.values(), now), now)

    def totals(self) -> Totals:
        """The swarm's sums as of the last look."""
        return totals_of(rows_of(self._heard.values(), self._wall()), self._spec)

    def look(self) -> None:
        """Takes in what the node knows now, and tells the listeners what is new."""
        now = self._wall()
        gone = self._hear(now)
        rows = [row_of(status, now) for status in self._heard.values()]
        changed = [row for row in rows if self._is_news(row)]
        points: dict[PeerId, Any] = {}
        met: list[list[object]] = []
        for row in changed:
            self._events.note(row, now)
            if (meeting := self._meetings.note(row, now)) is not None:
                met.append(meeting.plain())
            if row.silent_s is None and row.role == "trainer" and (point := self._curves.add(row, now)) is not None:
                points[row.peer_id] = point
        if self._listeners:
            news = {"changed": self._plain(changed), "gone": gone, "points": points, "met": met}
            self._tell("update", {**self._head(rows, now), **news, "events": self._events.since(self._told_event)})
        self._told_event = self._events.last

    def _is_news(self, row: NodeRow) -> bool:
        record = self._heard[row.peer_id].record
        word = (record.issued_at, record.state, record.reason, row.silent_s is None)
        before, self._sent[row.peer_id] = self._sent.get(row.peer_id), word
        return word != before

    def listen(self) -> asyncio.Queue[bytes | None]:
        """A queue of server-sent events that begins with a snapshot; None ends it. Raises TooManyListeners."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise TooManyListeners
        now = self._wall()
        rows = [row_of(status, now) for status in self._heard.values()]
        snapshot = {
            **self._head(rows, now),
            "run": {"id": self._spec.run_id, "name": self._spec.name, "method": self._spec.method},
            "this": self._own().record.peer_id,
            "changed": self._plain(rows),
            "curves": self._curves.all(),
            "met": [each.plain() for each in self._meetings.recent(now)],
            "events": self._events.since(0),
        }
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        queue.put_nowait(_event("snapshot", snapshot))
        self._listeners.add(queue)
        return queue

    def leave(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Ends a listener; safe to call twice."""
        self._listeners.discard(queue)

    def close(self) -> None:
        """Ends all listeners."""
        for queue in self._listeners:
            queue.put_nowait(None)
        self._listeners.clear()

    def _hear(self, now: float) -> list[PeerId]:
        """Takes the newest words in; returns who is no more to be shown."""
        for record in self._others():
            known = self._heard.get(record.peer_id)
            if known is None or record.issued_at >= known.record.issued_at or record.instance != known.record.instance:
                self._heard[record.peer_id] = NodeStatus(record=record)
        own = self._own()
        self._heard[own.record.peer_id] = own
        gone: dict[PeerId, str] = {}
        for peer, at in self._left().items():
            if peer in self._heard and self._heard[peer].record.issued_at <= at:
                gone[peer] = "has left"
        for peer, status in self._heard.items():
            if now - status.record.issued_at > FORGET_S:
                gone.setdefault(peer, "was not heard from any more")
        for peer, how in gone.items():
            self._events.left(peer, self._heard.pop(peer).record.name, now, how)
            self._sent.pop(peer, None)
        if gone:
            self._curves.keep(self._heard)
        return list(gone)

    def _head(self, rows: list[NodeRow], now: float) -> dict[str, Any]:
        totals = totals_of([replace(row, sketch=()) for row in rows], self._spec)
        if now >= self._distance_at + DISTANCE_EVERY_S:
            heard = [row.sketch for row in rows if row.role == "trainer" and row.silent_s is None]
            self._distance_at, self._distance = now, relative_distance(heard)
        problems = problems_of(rows, totals)
        return {
            "at": now,
            "health": HEALTH[health_from(totals, problems)],
            "problems": problems[:MAX_PROBLEMS],
            "totals": {**asdict(totals), "consensus_distance": self._distance},
        }

    def _plain(self, rows: list[NodeRow]) -> list[dict[str, Any]]:
        return [self._plain_row(row) for row in rows]

    def _plain_row(self, row: NodeRow) -> dict[str, Any]:
        record = self._heard[row.peer_id].record
        fields = {name: getattr(row, name) for name in NodeRow.__slots__ if name not in _OWN_TIME}
        last_met_at = record.last_met_at if record.last_partner else None
        return {
            **fields, "issued_at": record.issued_at, "last_met_at": last_met_at, "silent": row.silent_s is not None
        }  # fmt: skip

    def _tell(self, kind: str, value: dict[str, Any]) -> None:
        data = _event(kind, value)
        for queue in list(self._listeners):
            if queue.qsize() >= MAX_BEHIND:
                self._listeners.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(data)


def _event(kind: str, value: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
