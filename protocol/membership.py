"""Whom this node may pair with: records in, the live view out, peers at fault left alone for a while."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from peerloom.protocol.events import PeerSeen
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PROTOCOL_MAX, PROTOCOL_MIN, NodeState, PeerId, PeerRecord

PAIRABLE: frozenset[NodeState] = frozenset({"training", "seeking", "exchanging"})

LIMIT = 10.0  # points from which a peer is left alone
HALF_LIFE_S = 120.0  # of points: an occasional slip is forgotten
FIRST_BAN_S = 30.0  # or three match timeouts, if that is longer; doubles with every ban ...
LONGEST_BAN_S = 3600.0  # ... up to here
FORGIVEN_AFTER_S = 2 * 3600.0  # quiet time after a ban that ends: the next one is a first one again
FORGET_BELOW = 0.01  # points

FAR_OFF = "far_off"
WORSE_STATE = "worse_state"
BAD_BASE = "bad_base"

FAULT_WEIGHTS = {
    FAR_OFF: 10.0,  # parameters twice as far off as clip_radius allows: each exchange with it costs
    "unanswered": 2.0,  # slow or dead: an honest peer may do it
    "duplicate_exchange": 5.0,
    "out_of_order": 5.0,
    "bad_exchange": 5.0,
    "bad_state": 5.0,
    "bad_manifest": 5.0,
    "bad_stage_frame": 5.0,
    "stage_flood": 5.0,
    "stage_unanswered": 10.0,  # it took microbatches for minutes and gave none back: the run stood still for it
    WORSE_STATE: 10.0,  # handed over as the swarm's model: taking it on trust costs all that was trained
    BAD_BASE: 10.0,  # handed over as the base of the swarm's digest, which it announces itself
    "bad_piece": 10.0,  # the bytes it announced itself are not those it sent
}
OTHER_WEIGHT = 4.0


@dataclass(slots=True)
class _Standing:
    """A peer's faults: `points` as of `at`, bans so far and the end of the last."""

    points: float = 0.0
    at: float = 0.0
    bans: int = 0
    banned_until: float = 0.0

    def points_now(self, now: float) -> float:
        return decayed(self.points, now - self.at)


def decayed(points: float, seconds: float) -> float:
    """What is left of `points` after `seconds`: half every HALF_LIFE_S."""
    return points * float(0.5 ** (max(0.0, seconds) / HALF_LIFE_S))


def ban_length(bans: int, match_timeout_s: float) -> float:
    """Seconds of the ban number `bans`, from 1."""
    first = max(FIRST_BAN_S, 3 * match_timeout_s)
    return min(max(LONGEST_BAN_S, first), first * 2.0 ** min(bans - 1, 32))


class Membership:
    """Keeps the newest records and each peer's standing; every `now` is of one clock that never jumps."""

    def __init__(self, self_id: PeerId, spec: GaslocSpec) -> None:
        self._self_id = self_id
        self._layout = ""
        self._match_timeout_s = spec.match_timeout_s
        self._records: dict[PeerId, PeerRecord] = {}
        self._standings: dict[PeerId, _Standing] = {}
        self._last_seen: tuple[PeerSeen, ...] = ()

    def set_layout(self, layout: str) -> None:
        """Names this node's own layout digest; until then nobody can be paired with."""
        self._layout = layout

    def update(self, records: Iterable[PeerRecord], now: float) -> bool:
        """Takes all live records, in place of those before; True when the live view is another one."""
        self._records = {record.peer_id: record for record in records if record.peer_id != self._self_id}
        self._forget(now)
        before, self._last_seen = self._last_seen, self.seen(now)
        return before != self._last_seen

    def score(self, peer: PeerId, fault: str, now: float) -> bool:
        """Holds a fault against a peer; past LIMIT it is left alone, longer each time: True when that begins now."""
        standing = self._standings.setdefault(peer, _Standing())
        standing.points = standing.points_now(now) + FAULT_WEIGHTS.get(fault, OTHER_WEIGHT)
        standing.at = now
        if standing.points < LIMIT or now < standing.banned_until:
            return False
        if now > standing.banned_until + FORGIVEN_AFTER_S:
            standing.bans = 0
        standing.bans += 1
        standing.banned_until = now + ban_length(standing.bans, self._match_timeout_s)
        standing.points = 0.0
        return True

    def live(self, now: float) -> tuple[PeerSeen, ...]:
        """All trainers that may be paired with now, in id order."""
        return tuple(seen for seen in self.seen(now) if not seen.left_alone)

    def seen(self, now: float) -> tuple[PeerSeen, ...]:
        """As `live`, with those that this node leaves alone: who others are paired with does not hang on its word."""
        return tuple(
            PeerSeen(peer, record.round, self.left_alone(peer, now))
            for peer, record in sorted(self._records.items())
            if not self._unfit(record)
        )

    def left_alone(self, peer: PeerId, now: float) -> bool:
        """Whether its faults keep it out of sight: nothing of its record is to be believed meanwhile."""
        standing = self._standings.get(peer)
        return standing is not None and now < standing.banned_until

    def reason_excluded(self, peer: PeerId, now: float) -> str:
        """Why a peer is not in the live view, as a sentence without its subject; "" when it is in."""
        record = self._records.get(peer)
        standing = self._standings.get(peer)
        if record is None:
            return "is this node itself" if peer == self._self_id else "has no live record"
        if standing is not None and now < standing.banned_until:
            return f"is left alone for {standing.banned_until - now:.0f} s after repeated faults"
        return self._unfit(record)

    def _unfit(self, record: PeerRecord) -> str:
        if record.role != "trainer":
            return f"is a {record.role} node, not a trainer"
        if record.protocol_max < PROTOCOL_MIN or record.protocol_min > PROTOCOL_MAX:
            return f"speaks protocol {record.protocol_min} to {record.protocol_max}, not {PROTOCOL_MAX}"
        if record.state not in PAIRABLE:
            return f"is {record.state}" + (f": {record.reason}" if record.reason else "")
        if not self._layout:
            return "cannot be judged: this node's own model is not built yet"
        if record.layout_digest != self._layout:
            return "trains a model of another layout"
        return ""

    def _forget(self, now: float) -> None:
        """Drops standings that no longer say anything, so that passing strangers take no memory."""
        for peer, standing in list(self._standings.items()):
            clean = standing.points_now(now) < FORGET_BELOW
            forgiven = standing.bans == 0 or now > standing.banned_until + FORGIVEN_AFTER_S
            if clean and forgiven:
                del self._standings[peer]
