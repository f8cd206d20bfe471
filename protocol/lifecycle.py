"""Decisions of a node's life that explain themselves: how to start, when the run is done, when to try again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Literal

from peerloom.protocol.membership import PAIRABLE
from peerloom.protocol.types import PeerId, PeerRecord

RECORD_LIFE_S = 45.0  # a record's 30 s and the clock skew and delays that a swarm lives with

RESTART_LIMIT = 6  # failures in a row after which a person must look
FIRST_RESTART_S = 1.0
LONGEST_RESTART_S = 60.0


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
) -> StartDecision:
    """Fresh, resume or fetch; `now` and `started_at` (of this process; default: just now) are Unix seconds.

    How far behind a checkpoint is, is measured against the median round of the donors, which one liar cannot move.
    Among nodes that have not trained yet and differ in theta_0, the digest of the majority leads, this node counted;
    then that of the oldest node; then the smaller one: so that two nodes never follow each other.
    """
    trainers = [p for p in peers if _is_trainer(p, layout_digest, now)]
    donors = sorted((p for p in trainers if p.state in PAIRABLE), key=_best_first)
    ids = tuple(p.peer_id for p in donors)
    ahead = tuple(p.peer_id for p in donors if p.round > 0)
    if resumed:
        middle = median_high(p.round for p in donors) if donors else 0
        if middle - own_round > max_round_skew:
            usable = tuple(p.peer_id for p in donors if p.round > own_round)
            return StartDecision(
                "fetch",
                usable,
                f"the swarm is at round {middle}, the checkpoint at {own_round}: more than {max_round_skew} behind",
            )
        return StartDecision("resume", (), f"the checkpoint of round {own_round} is recent enough to go on from")
    if ahead:
        return StartDecision("fetch", ahead, f"the swarm is at round {donors[0].round} already")
    leading = _leading_digest(trainers, init_digest, now if started_at is None else started_at)
    if leading != init_digest:
        matching = {p.peer_id for p in donors if p.init_digest == leading}
        return StartDecision(
            "fetch",
            tuple(peer for peer in ids if peer in matching),
            "this machine builds another theta_0 from the run's seed than the swarm does",
        )
    return StartDecision("fresh", (), "no trainer is past its first round" if trainers else "no other trainer is there")


def _is_trainer(peer: PeerRecord, layout_digest: str, now: float) -> bool:
    return (
        peer.role == "trainer"
        and peer.layout_digest == layout_digest
        and peer.state not in ("draining", "done")
        and now - peer.issued_at <= RECORD_LIFE_S
    )


def _best_first(peer: PeerRecord) -> tuple[int, float, PeerId]:
    return (-peer.round, peer.started_at, peer.peer_id)


def _leading_digest(trainers: Iterable[PeerRecord], own: str, own_started_at: float) -> str:
    """The theta_0 to follow: most nodes, then the oldest of them, then the smaller digest."""
    started: dict[str, list[float]] = {own: [own_started_at]}
    for peer in trainers:
        if peer.init_digest:
            started.setdefault(peer.init_digest, []).append(peer.started_at)
    return min(started, key=lambda digest: (-len(started[digest]), min(started[digest]), digest))


def budget_spent(peers: Iterable[PeerRecord], own_tokens: int, budget: int) -> bool:
    """Whether the swarm's tokens, as far as live records tell, have reached the run's budget (0: none)."""
    others = sum(max(0, tokens) for tokens in {peer.peer_id: peer.tokens for peer in peers}.values())
    return budget > 0 and own_tokens + others >= budget


def restart_delay(failures: int, rng: random.Random) -> float | None:
    """Seconds to wait after the failure number `failures` in a row (from 1), jittered; None: give up."""
    if failures >= RESTART_LIMIT:
        return None
    full = min(LONGEST_RESTART_S, FIRST_RESTART_S * 2.0 ** max(0, failures - 1))
    return full * (0.5 + 0.5 * rng.random())
