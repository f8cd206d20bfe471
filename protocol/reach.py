"""Whether this node can be dialled, and through whom it is reached if not: decided from what its peers try for it.

Pure: the driver hands in what it sees and what came back, and performs the effects.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from peerloom.protocol.relay_choice import RelayBook
from peerloom.protocol.types import PeerId, PeerRecord, Reach

ASKED = 2  # peers that are asked to dial back, at a time
RECHECK_S = 180.0
RETRY_S = 10.0  # when none of them answered, or nobody was there to ask
ANSWER_S = 15.0  # after which an answer no longer counts
MEASURE_S = 60.0  # between looks at relays other than those kept
GONE_S = 5.0  # a relay that broke off is not chosen again so soon


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The driver's look around, every second or so: this node's own addresses, and the records that may be believed."""

    addresses: tuple[str, ...]
    records: tuple[PeerRecord, ...]


@dataclass(frozen=True, slots=True)
class DialledBack:
    """A peer says at which of this node's addresses it reached it; `reached` is None when it did not answer."""

    peer: PeerId
    reached: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class RelayMeasured:
    """A round trip to a relay, and how full it is, 0 to 1."""

    relay: PeerId
    latency_s: float
    load: float


@dataclass(frozen=True, slots=True)
class RelayLost:
    """A relay ended a stream that should have gone on, or never took it; `fault` is one of RelayBook's."""

    relay: PeerId
    fault: str


@dataclass(frozen=True, slots=True)
class AskDialBack:
    """Have `peer` dial this node at `addresses`."""

    peer: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeepRelay:
    """Hold a place at a relay and measure it all the while."""

    relay: PeerId


@dataclass(frozen=True, slots=True)
class LeaveRelay:
    """Give that place up."""

    relay: PeerId


@dataclass(frozen=True, slots=True)
class MeasureRelay:
    """Find out a relay's latency and load once."""

    relay: PeerId


@dataclass(frozen=True, slots=True)
class ReachChanged:
    """What the record shall say from now on: `addresses` with those reached first, and a sentence for people."""

    reach: Reach
    via: tuple[PeerId, ...]
    addresses: tuple[str, ...]
    why: str


Event = Looked | DialledBack | RelayMeasured | RelayLost
Effect = AskDialBack | KeepRelay | LeaveRelay | MeasureRelay | ReachChanged


@dataclass(slots=True)
class _Round:
    """One round of asking."""

    asked: tuple[PeerId, ...]
    began: float
    addresses: tuple[str, ...]
    answers: dict[PeerId, tuple[str, ...] | None] = field(default_factory=dict)

    def over(self, now: float) -> bool:
        return len(self.answers) == len(self.asked) or now - self.began > ANSWER_S


class Reachability:
    """`handle(event, now) -> effects`; every `now` is of one clock that never jumps."""

    def __init__(self, rng: random.Random, book: RelayBook) -> None:
        self._rng = rng
        self._book = book
        self._round: _Round | None = None
        self._next_at = float("-inf")
        self._measure_at = float("-inf")
        self._addresses: tuple[str, ...] = ()
        self._reached: tuple[str, ...] = ()
        self._why = "nobody has dialled this node back yet"
        self._said: ReachChanged | None = None
        self._records: tuple[PeerRecord, ...] = ()
        self._kept: tuple[PeerId, ...] = ()  # relays whose place was asked for
        self._standing: set[PeerId] = set()  # those that answer
        self._gone: dict[PeerId, float] = {}  # relays that broke off, and until when they are passed over
        self.reach: Reach = "unknown"

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes what happened; returns what to do."""
        match event:
            case Looked():
                return self._looked(event, now)
            case DialledBack(peer, reached):
                if self._round is not None and peer in self._round.asked:
                    self._round.answers.setdefault(peer, reached)
                return self._conclude(now)
            case RelayMeasured(relay, latency_s, load):
                self._book.measured(relay, latency_s, load)
                if relay in self._kept:
                    self._standing.add(relay)
                return self._tell()
            case RelayLost(relay, fault):
                self._book.fault(relay, fault, now)
                self._gone[relay] = now + GONE_S
                self._standing.discard(relay)
                self._kept = tuple(peer for peer in self._kept if peer != relay)
                return [*self._tend_relays(now), *self._tell()]

    def _looked(self, look: Looked, now: float) -> list[Effect]:
        self._records = look.records
        self._book.forget((*(record.peer_id for record in look.records), *self._kept), now)
        if look.addresses != self._addresses:  # moved, or the first look: what was found out is void
            self._addresses, self._round, self._next_at = look.addresses, None, now
            self._reached = tuple(address for address in self._reached if address in look.addresses)
        effects = self._conclude(now)
        if self._round is None and now >= self._next_at:
            effects += self._ask(now)
        return [*effects, *self._tend_relays(now), *self._tell()]

    def _ask(self, now: float) -> list[Effect]:
        helpers = self._helpers()
        self._next_at = now + RETRY_S
        if not (helpers and self._addresses):
            return []
        self._round = _Round(helpers, now, self._addresses)
        return [AskDialBack(peer, self._addresses) for peer in helpers]

    def _helpers(self) -> tuple[PeerId, ...]:
        """Those that can be dialled before those that nothing is known of, others last; at random among equals."""
        rank: dict[Reach, int] = {"direct": 0, "unknown": 1, "via": 2}
        known = list(self._records)
        self._rng.shuffle(known)
        known.sort(key=lambda record: rank[record.reach])
        return tuple(record.peer_id for record in known[:ASKED])

    def _conclude(self, now: float) -> list[Effect]:
        """Ends the round once all have answered, or time is up: this node is direct when each answer says so.

        One that lies behind the same router would reach it where nobody else does, so a single no weighs more.
        """
        if self._round is None or not self._round.over(now):
            return []
        ended, self._round = self._round, None
        answers = [reached for reached in ended.answers.values() if reached is not None]
        if not answers:
            self._next_at = now + RETRY_S
            return []
        self._next_at = now + RECHECK_S
        said_yes = sum(bool(reached) for reached in answers)
        direct = said_yes == len(answers)
        self.reach = "direct" if direct else "via"
        common = set(ended.addresses).intersection(*map(set, answers)) if direct else set()
        self._reached = tuple(address for address in ended.addresses if address in common)
        self._why = f"{said_yes} of {len(answers)} peers that dialled this node back reached it"
        return [*self._tend_relays(now), *self._tell()]

    def _tend_relays(self, now: float) -> list[Effect]:
        self._gone = {peer: until for peer, until in self._gone.items() if until > now}
        if self.reach != "via":
            leaving, self._kept = self._kept, ()
            self._standing.clear()
            return [LeaveRelay(peer) for peer in leaving]
        chosen = self._book.choose(self._records, self._kept, frozenset(self._gone), now)
        effects: list[Effect] = [LeaveRelay(peer) for peer in self._kept if peer not in chosen]
        effects += [KeepRelay(peer) for peer in chosen if peer not in self._kept]
        self._kept = chosen
        self._standing &= set(chosen)
        if now >= self._measure_at:
            self._measure_at = now + MEASURE_S
            effects += [MeasureRelay(peer) for peer in self._book.candidates(self._records, chosen, now)]
        return effects

    def _tell(self) -> list[Effect]:
        via = tuple(peer for peer in self._kept if peer in self._standing)
        addresses = (*self._reached, *(each for each in self._addresses if each not in self._reached))
        news = ReachChanged(self.reach, via, addresses, self._why)
        if self._said is not None and _same(self._said, news):
            return []
        self._said = news
        return [news]

    def why(self) -> str:
        """How the newest verdict came about, as a sentence."""
        return self._why


def _same(one: ReachChanged, other: ReachChanged) -> bool:
    return (one.reach, one.via, one.addresses) == (other.reach, other.via, other.addresses)


def relays_of(records: Sequence[PeerRecord]) -> dict[PeerId, PeerRecord]:
    """Those that offer to relay and can be dialled."""
    return {record.peer_id: record for record in records if record.relays and record.reach == "direct"}
