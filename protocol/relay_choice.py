"""Which relays a node uses: to be reached through, and to reach others; by latency, load and past faults."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from peerloom.protocol.membership import decayed
from peerloom.protocol.types import PeerId, PeerRecord

AT_ONCE = 2  # relays that a node may be reached through
TRIED_AT_ONCE = 4  # candidates that are measured beside those kept
LOAD_S = 0.2  # seconds of latency that a full relay is worth
UNKNOWN_S = 0.3  # what one not measured yet is taken for
BETTER = 0.6  # another relay must cost less than this share of the dearest kept one's to take its place ...
BETTER_S = 0.02  # ... and so many seconds less
SMOOTHING = 0.3  # weight of the newest latency

LIMIT = 10.0  # points from which a relay is left alone
FIRST_BAN_S = 60.0
LONGEST_BAN_S = 3600.0
FAULT_WEIGHTS = {
    "gone": 0.0,  # it cannot be reached: as in a cut of our own, whose end must find it in good standing
    "refused": 1.0,  # full, or the target has moved on: no fault, but others may be of more use
    "broken": 2.0,  # a tunnel, or the connection to it, ended before its time; the far end may have died
    "stalled": 4.0,  # bytes went in and none came out
    "corrupt": 5.0,  # what came out was not what went in: TLS said so
}


@dataclass(slots=True)
class _Relay:
    """What is known of one: `latency_s` None until measured, `points` of fault as of `at`."""

    latency_s: float | None = None
    load: float = 0.0
    points: float = 0.0
    at: float = 0.0
    bans: int = 0
    banned_until: float = float("-inf")

    def points_now(self, now: float) -> float:
        return decayed(self.points, now - self.at)


class RelayBook:
    """Measures and faults of relays; every `now` is of one clock that never jumps."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._relays: dict[PeerId, _Relay] = {}

    def measured(self, relay: PeerId, latency_s: float, load: float) -> None:
        """Takes a round trip to a relay, and the share of its room that is taken."""
        known = self._relays.setdefault(relay, _Relay())
        before = known.latency_s
        known.latency_s = latency_s if before is None else before + SMOOTHING * (latency_s - before)
        known.load = load

    def fault(self, relay: PeerId, fault: str, now: float) -> bool:
        """Holds a fault against a relay; past LIMIT it is left alone, longer each time: True when that begins now."""
        known = self._relays.setdefault(relay, _Relay())
        known.points, known.at = known.points_now(now) + FAULT_WEIGHTS[fault], now
        if known.points < LIMIT or now < known.banned_until:
            return False
        known.bans += 1
        known.banned_until = now + min(LONGEST_BAN_S, FIRST_BAN_S * 2.0 ** min(known.bans - 1, 16))
        known.points = 0.0
        return True

    def left_alone(self, relay: PeerId, now: float) -> bool:
        """Whether its faults keep it out of use."""
        known = self._relays.get(relay)
        return known is not None and now < known.banned_until

    def latency_s(self, relay: PeerId) -> float | None:
        """Its smoothed round trip, None before the first."""
        known = self._relays.get(relay)
        return known.latency_s if known is not None else None

    def order(self, relays: Iterable[PeerId], now: float) -> tuple[PeerId, ...]:
        """The relays of another node, best first; those left alone come last, since the other may have no better."""
        return tuple(sorted(relays, key=lambda relay: (self.left_alone(relay, now), self._cost(relay, now))))

    def choose(
        self, records: Iterable[PeerRecord], kept: tuple[PeerId, ...], gone: frozenset[PeerId], now: float
    ) -> tuple[PeerId, ...]:
        """The AT_ONCE relays to hold a place at: those `kept`, unless they no longer serve or others are far better.

        A relay is one that can be dialled itself and offers it: so no relay is reached through a relay. `gone` are
        those that broke off just now.
        """
        listed = {record.peer_id: record.relays and record.reach == "direct" for record in records}
        able = {peer for peer, serves in listed.items() if serves}
        able |= {peer for peer in kept if peer not in listed}  # its record may be late: its stream says that it lives
        fit = sorted(peer for peer in able - gone if not self.left_alone(peer, now))
        staying = [peer for peer in kept if peer in fit][:AT_ONCE]
        others = [peer for peer in fit if peer not in staying]
        self._rng.shuffle(others)  # so that a swarm's nodes do not all take the first
        others.sort(key=lambda peer: self._cost(peer, now))
        while others and len(staying) < AT_ONCE:
            staying.append(others.pop(0))
        dearest = max(staying, key=lambda peer: self._cost(peer, now), default=None)
        if others and dearest is not None and self._far_better(others[0], dearest, now):
            staying[staying.index(dearest)] = others[0]
        return tuple(staying)

    def candidates(self, records: Iterable[PeerRecord], kept: tuple[PeerId, ...], now: float) -> tuple[PeerId, ...]:
        """A few other relays to measure, those never measured first."""
        fit = [
            record.peer_id
            for record in records
            if record.relays and record.reach == "direct" and record.peer_id not in kept
        ]
        fit = [peer for peer in fit if not self.left_alone(peer, now)]
        self._rng.shuffle(fit)
        return tuple(sorted(fit, key=lambda peer: self.latency_s(peer) is not None)[:TRIED_AT_ONCE])

    def forget(self, present: Iterable[PeerId], now: float) -> None:
        """Drops what is known of relays that are gone and have no fault to remember."""
        there = set(present)
        for peer, known in list(self._relays.items()):
            if peer not in there and known.points_now(now) < 0.01 and now > known.banned_until:
                del self._relays[peer]

    def _far_better(self, one: PeerId, other: PeerId, now: float) -> bool:
        if self.latency_s(one) is None:
            return False
        cheap, dear = self._cost(one, now), self._cost(other, now)
        return cheap < BETTER * dear and dear - cheap > BETTER_S

    def _cost(self, relay: PeerId, now: float) -> float:
        """Seconds of latency, load and faults counted in."""
        known = self._relays.get(relay)
        if known is None:
            return UNKNOWN_S
        latency = UNKNOWN_S if known.latency_s is None else known.latency_s
        return latency + LOAD_S * known.load + UNKNOWN_S * known.points_now(now)
