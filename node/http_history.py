"""What a node remembers of its swarm for the page: curves, meetings and events, each bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from peerloom.node.status import NodeRow
from peerloom.protocol.types import PeerId

MAX_POINTS = 240  # of a node's curve: past it every second one is dropped, so the past gets coarser, not shorter
MAX_EVENTS = 300
MEETING_S = 300.0  # how long who spoke with whom is remembered

Point = tuple[float, float | None, float]  # Unix time, held-out loss, tokens/s


class Curves:
    """Loss and throughput of each node over time."""

    def __init__(self) -> None:
        self._points: dict[PeerId, list[Point]] = {}
        self._least_gap: dict[PeerId, float] = {}

    def add(self, row: NodeRow, at: float) -> Point | None:
        """Takes a node's figures; returns the point kept, None when it is too near the last."""
        points = self._points.setdefault(row.peer_id, [])
        if points and at - points[-1][0] < self._least_gap.get(row.peer_id, 0.0):
            return None
        point = (round(at, 1), row.loss, round(row.tokens_per_s, 1))
        points.append(point)
        if len(points) > MAX_POINTS:
            del points[-2::-2]
            self._least_gap[row.peer_id] = (points[-1][0] - points[0][0]) / len(points) / 2
        return point

    def keep(self, peers: Iterable[PeerId]) -> None:
        """Forgets all others."""
        kept = set(peers)
        self._points = {peer: points for peer, points in self._points.items() if peer in kept}
        self._least_gap = {peer: gap for peer, gap in self._least_gap.items() if peer in kept}

    def all(self) -> dict[PeerId, list[Point]]:
        """Each node's points, oldest first."""
        return self._points


@dataclass(slots=True)
class Meeting:
    """How often two nodes were seen to have exchanged, and when last (Unix time)."""

    a: PeerId
    b: PeerId
    at: float
    count: int = 1

    def plain(self) -> list[object]:
        """As the page takes it."""
        return [self.a, self.b, round(self.at, 1), self.count]


class Meetings:
    """Who spoke with whom in the last MEETING_S, as told by either side."""

    def __init__(self) -> None:
        self._known: dict[tuple[PeerId, PeerId], Meeting] = {}
        self._told: dict[PeerId, float] = {}
        self._forgot_at = 0.0

    def note(self, row: NodeRow, now: float) -> Meeting | None:
        """Takes a node's last exchange and returns the meeting; None for one that it has told before."""
        if now - self._forgot_at > MEETING_S:  # also where no page is ever open
            self.recent(now)
        if not row.last_partner or row.last_met_s is None:
            return None
        at = now - row.last_met_s
        if at - self._told.get(row.peer_id, 0.0) < 0.05:
            return None
        self._told[row.peer_id] = at
        first, second = sorted((row.peer_id, PeerId(row.last_partner)))
        known = self._known.setdefault((first, second), Meeting(first, second, at, 0))
        if known.count == 0 or at - known.at > 1.0:  # within a second it is the other side's word of the same
            known.count += 1
        known.at = max(known.at, at)
        return known

    def recent(self, now: float) -> list[Meeting]:
        """Those of the last MEETING_S; the others are forgotten."""
        self._forgot_at = now
        self._known = {pair: each for pair, each in self._known.items() if now - each.at <= MEETING_S}
        self._told = {peer: at for peer, at in self._told.items() if now - at <= MEETING_S}
        return list(self._known.values())


@dataclass(frozen=True, slots=True)
class SwarmEvent:
    """One line of the events list; `number` only grows."""

    number: int
    at: float
    peer_id: str
    name: str
    what: str


class Events:
    """What happened to whom: joins, leaves, silences, and changes between training and not."""

    def __init__(self) -> None:
        self._kinds: dict[PeerId, str] = {}
        self._last = 0
        self.events: deque[SwarmEvent] = deque(maxlen=MAX_EVENTS)

    def note(self, row: NodeRow, at: float) -> None:
        """Takes a node as it is now; a first look at it is a join."""
        kind = _kind(row)
        before = self._kinds.get(row.peer_id)
        if kind == before:
            return
        self._kinds[row.peer_id] = kind
        reason = f": {row.reason}" if row.reason and kind not in ("well", "silent") else ""
        if before is None:
            joined = f"joined at round {row.round}" if row.role == "trainer" else "joined"
            self._add(at, row.peer_id, row.name, joined if kind == "well" else f"joined, {kind}{reason}")
        elif kind == "well":
            self._add(at, row.peer_id, row.name, f"is well again after {before}" if before == "silent" else row.state)
        else:
            self._add(at, row.peer_id, row.name, f"{kind}{reason}")

    def left(self, peer: PeerId, name: str, at: float, how: str) -> None:
        """Takes that a node is gone."""
        if self._kinds.pop(peer, None) is not None:
            self._add(at, peer, name, how)

    def since(self, number: int) -> list[dict[str, object]]:
        """Events after `number`, oldest first."""
        return [asdict(event) for event in self.events if event.number > number]

    @property
    def last(self) -> int:
        """The newest event's number."""
        return self._last

    def _add(self, at: float, peer: PeerId, name: str, what: str) -> None:
        self._last += 1
        self.events.append(SwarmEvent(self._last, round(at, 1), peer, name, what))


def _kind(row: NodeRow) -> str:
    """What the events list tells apart: a round's turns are no news."""
    if row.silent_s is not None:
        return "silent"
    return "well" if row.state in ("training", "seeking", "exchanging", "serving") else row.state
