"""What a node lets others do with its tunnels: who is let in, how many, and how a relay's bandwidth is shared out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from peerloom.protocol.tunnel import Refusal
from peerloom.protocol.types import PeerId

RATE_SPAN_S = 1.0  # a pair that has moved nothing for so long gives its share to the others
SLACK_S = 0.05  # time that a late timer may make up for
OPENS_PER_S = 16.0  # tunnels that one peer may ask for, or one relay may bring, a second
OPENS_BURST = 64.0

Pair = tuple[PeerId, PeerId]  # who asked, and whom for; one pair each way
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskLimits:
    """How much is let in. `rate` and `pair_rate` are bytes a second that are relayed, both ways together; 0: no cap."""

    relays: bool = True
    tunnels: int = 256  # relayed, at once
    tunnels_of_peer: int = 32  # that one peer has asked for
    tunnels_of_pair: int = 4
    delivered: int = 256  # that end at this node, at once
    delivered_of_origin: int = 8
    places: int = 256  # peers that may be reached through this one
    watchers: int = 512  # streams that keep an eye on this relay without a place
    watchers_of_peer: int = 8
    half_open: int = 64  # streams whose header has not come, or whose target has not answered
    half_open_of_peer: int = 8
    rate: int = 0
    pair_rate: int = 0


@dataclass(slots=True)
class _Budget:
    """Openings that one peer has left."""

    left: float
    at: float


@dataclass(slots=True)
class RelayDesk:
    """Counts what is under way and says what may begin; every `now` is of one clock that never jumps.

    Each method that lets something in returns None, or why it does not; what it let in must be given back.
    """

    own: PeerId
    limits: DeskLimits = field(default_factory=DeskLimits)
    willing: bool = True  # False while this node cannot be dialled, and so is no use as a relay
    _half_open: Counter[PeerId] = field(default_factory=Counter)
    _tunnels: Counter[Pair] = field(default_factory=Counter)
    _asked: Counter[PeerId] = field(default_factory=Counter)
    _delivered: Counter[PeerId] = field(default_factory=Counter)
    _places: Counter[PeerId] = field(default_factory=Counter)
    _watchers: Counter[PeerId] = field(default_factory=Counter)
    _budgets: dict[PeerId, _Budget] = field(default_factory=dict)

    def arrived(self, source: PeerId) -> Refusal | None:
        """A stream without a header yet; end with `settled`."""
        return _more(self._half_open, source, self.limits.half_open_of_peer, self.limits.half_open)

    def settled(self, source: PeerId) -> None:
        """That stream is open, or gone."""
        _less(self._half_open, source)

    def open_to(self, source: PeerId, target: PeerId, now: float) -> Refusal | None:
        """A tunnel to a peer that holds a place here; end with `closed`."""
        if target == source:
            return "own"
        if not (self.limits.relays and self.willing):
            return "unwilling"
        if not self._places[target]:
            return "unknown"
        if self._asked[source] >= self.limits.tunnels_of_peer or not self._may_open(source, now):
            return "greedy"
        if self._tunnels[source, target] >= self.limits.tunnels_of_pair:
            return "greedy"
        if self._tunnels.total() >= self.limits.tunnels:
            return "busy"
        self._tunnels[source, target] += 1
        self._asked[source] += 1
        return None

    def closed(self, source: PeerId, target: PeerId) -> None:
        """The tunnel has ended."""
        _less(self._tunnels, (source, target))
        _less(self._asked, source)

    def deliver(self, bearer: PeerId, origin: PeerId, relays: frozenset[PeerId], now: float) -> Refusal | None:
        """A tunnel to this very node, from `origin` itself or by one of this node's `relays`; end with `left`.

        `relays` holds also those just given up, whose tunnels others may still use.
        """
        if origin == self.own:
            return "own"
        if bearer != origin and bearer not in relays:
            return "unwilling"
        if self._delivered[origin] >= self.limits.delivered_of_origin or not self._may_open(bearer, now):
            return "greedy"
        if self._delivered.total() >= self.limits.delivered:
            return "busy"
        self._delivered[origin] += 1
        return None

    def left(self, origin: PeerId) -> None:
        """The tunnel to this node has ended."""
        _less(self._delivered, origin)

    def keep(self, source: PeerId, place: bool, my_relays: frozenset[PeerId]) -> Refusal | None:
        """A stream by which a peer keeps an eye on this relay, with or without a place; end with `unkept`."""
        if not (self.limits.relays and self.willing):
            return "unwilling"
        if not place:
            return _more(self._watchers, source, self.limits.watchers_of_peer, self.limits.watchers)
        if source in my_relays:
            return "loop"
        if self._places[source] >= self.limits.half_open_of_peer:
            return "greedy"
        if source not in self._places and len(self._places) >= self.limits.places:
            return "busy"
        self._places[source] += 1
        return None

    def unkept(self, source: PeerId, place: bool) -> None:
        """That stream has ended."""
        _less(self._places if place else self._watchers, source)

    def load(self) -> float:
        """How much of what it may carry is taken, 0 to 1."""
        shares = (
            self._tunnels.total() / max(1, self.limits.tunnels),
            len(self._places) / max(1, self.limits.places),
        )
        return min(1.0, max(shares))

    def counts(self) -> dict[str, float]:
        """What is under way, for metrics."""
        return {
            "tunnels_relayed_now": float(self._tunnels.total()),
            "tunnels_delivered_now": float(self._delivered.total()),
            "tunnels_half_open_now": float(self._half_open.total()),
            "relay_places_now": float(len(self._places)),
        }

    def _may_open(self, peer: PeerId, now: float) -> bool:
        budget = self._budgets.get(peer)
        left = OPENS_BURST if budget is None else min(OPENS_BURST, budget.left + (now - budget.at) * OPENS_PER_S)
        self._forget(now)
        self._budgets[peer] = _Budget(max(0.0, left - 1.0), now)
        return left >= 1.0

    def _forget(self, now: float) -> None:
        """Budgets that are whole again say nothing; at most one peer a libp2p connection has one."""
        for peer, each in list(self._budgets.items()):
            if each.left + (now - each.at) * OPENS_PER_S >= OPENS_BURST:
                del self._budgets[peer]


class RelayShares:
    """Shares a relay's bandwidth out among the pairs that use it, so that none starves another.

    Each pair may move the total divided by the pairs that moved something within RATE_SPAN_S, and never more than its
    own quota.
    """

    def __init__(self, rate: int, pair_rate: int) -> None:
        self._rate = rate
        self._pair_rate = pair_rate
        self._free_at: dict[Pair, float] = {}
        self._busy_until: dict[Pair, float] = {}

    def wait_s(self, pair: Pair, size: int, now: float) -> float:
        """Takes `size` bytes of the pair's share; returns in how many seconds they may pass."""
        if not (self._rate or self._pair_rate):
            return 0.0
        rate = self._share(pair, now)
        free_at = max(self._free_at.get(pair, float("-inf")), now - SLACK_S)
        self._free_at[pair] = free_at + size / rate
        return max(0.0, free_at - now)

    def _share(self, pair: Pair, now: float) -> float:
        """The pair's bytes a second as of now."""
        for other in [each for each, at in self._busy_until.items() if now - at > RATE_SPAN_S]:
            del self._busy_until[other]
            self._free_at.pop(other, None)
        self._busy_until[pair] = max(now, self._free_at.get(pair, now))
        share = self._rate / len(self._busy_until) if self._rate else float(self._pair_rate)
        return min(share, self._pair_rate) if self._pair_rate else share


def _more(counter: Counter[K], key: K, most_of_key: int, most: int) -> Refusal | None:
    """Counts one more, unless the key, or all of them together, have as many as they may."""
    if counter[key] >= most_of_key:
        return "greedy"
    if counter.total() >= most:
        return "busy"
    counter[key] += 1
    return None


def _less(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
