"""Decisions of a node's life that explain themselves: how to start, when the run is done, when to try again."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from types import MappingProxyType
from typing import Final, Literal

from peerloom.protocol.limits import MAX_LEAP, MAX_TAKEN
from peerloom.protocol.membership import PAIRABLE
from peerloom.protocol.types import PeerId, PeerRecord

RECORD_LIFE_S = 45.0  # a record's 30 s and the clock skew and delays that a swarm lives with

RESTART_LIMIT = 6  # failures in a row after which a person must look
FIRST_RESTART_S = 1.0
LONGEST_RESTART_S = 60.0

LONE_S = 60.0  # how long the only other trainer must be there before a node that has trained asks it for its state
WORSE_NATS, WORSE_SHARE = 0.5, 0.25  # how much worse a fetched state may be, whichever allows more
FIRST_CATCH_UP_S, LONGEST_CATCH_UP_S = 60.0, 1800.0  # between two attempts to catch up that fail

NOBODY_SEEN: Final[Mapping[PeerId, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StartDecision:
    """How to start, from whom (best first; empty: ask again when the peers change), and why, in one sentence."""

    kind: Literal["fresh", "resume", "fetch"]
    donors: tuple[PeerId, ...]
    reason: str


def choose_start(
    own_round: int,
    resumed: bool,
    init_digest: str,
    layout_digest: str,
    peers: Sequence[PeerRecord],
    max_round_skew: int,
    now: float,
    *,
    started_at: float | None = None,
    seen_s: Mapping[PeerId, float] = NOBODY_SEEN,
) -> StartDecision:
    """Fresh, resume or fetch; `now` and `started_at` (of this process; default: just now) are Unix seconds.

    A node that has trained (`resumed`) is behind when at least two trainers, and at least half of all with this node
    counted, are more than `max_round_skew` ahead; or when the only other one is, and its record has been there for
    LONE_S (`seen_s`). What is fetched is still judged by its held-out loss: see `worse_than`.
    Donors come nearest their lower median round first, which one liar among them cannot choose; a round more than
    MAX_LEAP ahead is no donor's.
    Among nodes that have not trained yet and differ in theta_0, the digest of the majority leads, this node counted;
    then that of the oldest node; then the smaller one: so that two nodes never follow each other.
    """
    trainers = [p for p in peers if _is_trainer(p, layout_digest, now)]
    donors = [p for p in trainers if p.state in PAIRABLE and _is_credible(p, own_round)]
    if resumed:
        return _go_on_or_catch_up(own_round, donors, max_round_skew, seen_s)
    if ahead := [p for p in donors if p.round > 0]:
        return StartDecision("fetch", _best_first(ahead), f"the swarm is at round {_middle(ahead)} already")
    leading = _leading_digest(trainers, init_digest, now if started_at is None else started_at)
    if leading != init_digest:
        return StartDecision(
            "fetch",
            _best_first([p for p in donors if p.init_digest == leading]),
            "this machine builds another theta_0 from the run's seed than the swarm does",
        )
    if donors:
        return StartDecision("fresh", (), "no trainer is past its first round")
    return StartDecision("fresh", (), "no trainer to take over from: starting from the run's own theta_0")


def _go_on_or_catch_up(
    own_round: int, donors: Sequence[PeerRecord], max_round_skew: int, seen_s: Mapping[PeerId, float]
) -> StartDecision:
    going_on = f"going on from the checkpoint of round {own_round}"
    ahead = [p for p in donors if p.round - own_round > max_round_skew]
    if not donors:
        return StartDecision("resume", (), f"no trainer to compare with: {going_on}")
    if 2 * len(ahead) < len(donors) + 1:
        told = f"{len(ahead)} of {len(donors)} other trainers are more than {max_round_skew} rounds ahead"
        return StartDecision("resume", (), f"{told}: {going_on}")
    middle = _middle(ahead)
    if len(ahead) == 1 and seen_s.get(ahead[0].peer_id, 0.0) < LONE_S:
        told = f"the only other trainer says it is at round {middle}, and has not been there for {LONE_S:.0f} s yet"
        return StartDecision("resume", (), f"{told}: {going_on}")
    return StartDecision(
        "fetch",
        _best_first(ahead),
        f"the swarm is at round {middle}, this node at {own_round}: more than {max_round_skew} behind",
    )


def worse_than(loss: float, reference: float | None) -> bool:
    """Whether a fetched state's held-out loss (nats) speaks against it: not finite, or clearly over the reference."""
    if not math.isfinite(loss):
        return True
    return reference is not None and loss > reference + max(WORSE_NATS, WORSE_SHARE * reference)


def catch_up_delay(failures: int) -> float:
    """Seconds to go on training after the failure number `failures` in a row (from 1) to catch up."""
    return min(LONGEST_CATCH_UP_S, FIRST_CATCH_UP_S * 2.0 ** min(failures - 1, 32))


def _is_trainer(peer: PeerRecord, layout_digest: str, now: float) -> bool:
    return (
        peer.role == "trainer"
        and peer.layout_digest == layout_digest
        and peer.state not in ("draining", "done")
        and now - peer.issued_at <= RECORD_LIFE_S
    )


def _is_credible(peer: PeerRecord, own_round: int) -> bool:
    return peer.round - own_round <= MAX_LEAP and max(peer.round, peer.step) <= MAX_TAKEN


def _middle(donors: Sequence[PeerRecord]) -> int:
    return median_low(p.round for p in donors)


def _best_first(donors: Sequence[PeerRecord]) -> tuple[PeerId, ...]:
    """Nearest the middle round first, then the further one, then the older node."""
    if not donors:
        return ()
    middle = _middle(donors)
    ordered = sorted(donors, key=lambda p: (abs(p.round - middle), -p.round, p.started_at, p.peer_id))
    return tuple(p.peer_id for p in ordered)


def _leading_digest(trainers: Iterable[PeerRecord], own: str, own_started_at: float) -> str:
    """The theta_0 to follow: most nodes, then the oldest of them, then the smaller digest."""
    started: dict[str, list[float]] = {own: [own_started_at]}
    for peer in trainers:
        if peer.init_digest:
            started.setdefault(peer.init_digest, []).append(peer.started_at)
    return min(started, key=lambda digest: (-len(started[digest]), min(started[digest]), digest))


def budget_spent(others: Iterable[int], own_tokens: int, budget: int) -> bool:
    """Whether the swarm's tokens, those of each other node ever seen among them, reach the run's budget (0: none)."""
    return budget > 0 and own_tokens + sum(max(0, tokens) for tokens in others) >= budget


def restart_delay(failures: int, rng: random.Random) -> float | None:
    """Seconds to wait after the failure number `failures` in a row (from 1), jittered; None: give up."""
    if failures >= RESTART_LIMIT:
        return None
    full = min(LONGEST_RESTART_S, FIRST_RESTART_S * 2.0 ** max(0, failures - 1))
    return full * (0.5 + 0.5 * rng.random())
