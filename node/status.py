"""The swarm as a user sees it: rows and totals from what the nodes say, and the JSON of both; see `status_table`.

The JSON of `peer status --json` and of the page's `/status.json`, schema 1; keys are only ever added. Times are
seconds, `at`, `started_at` Unix time; loss is held-out, in nats a token; null where nothing is known yet.

    {"schema": 1, "at": float, "health": "healthy" | "degraded" | "empty", "problems": [str],
     "run": {"id": str, "name": str, "method": str},
     "totals": {"nodes": int, "trainers": int, "training": int, "silent": int, "tokens_per_s": float, "tokens": int,
                "token_budget": int | null, "left_s": float | null,
                "loss_min": float | null, "loss_max": float | null, "loss_spread": float | null,
                "consensus_distance": float | null, "states_differ": int | null,
                "stages": {str: int}, "missing_stages": [int]},
     "nodes": [{"peer_id": str, "name": str, "role": "trainer" | "bootstrap", "state": str, "reason": str,
                "silent_s": float | null, "heartbeat_age_s": float, "round": int, "step": int, "loss": float | null,
                "tokens": int, "tokens_per_s": float, "up_bytes": int, "down_bytes": int,
                "partners": {peer_id: int}, "addresses": [str], "version": str, "started_at": float,
                "sketch": [float], "reach": "unknown" | "direct" | "via", "via": [peer_id], "relays": bool,
                "where": str, "stage": int | null, "stage_role": str, "up_bytes_per_s": float,
                "down_bytes_per_s": float, "last_partner": str, "last_met_s": float | null,
                "accuracy": float | null, "state_hash": str, "messages": int}]}

`state` is the node's own word, the last one heard; `silent_s` is null while it is heard from. `problems` says in
sentences why `health` is not healthy. `partners` counts committed exchanges by peer, as far as the node was asked;
`last_partner` is the newest, met `last_met_s` ago. `where` is the host of its first address, `via` names the relays
through which a node that cannot be dialled is reached, and `relays` says that a node carries others'. `left_s` is how
long the token budget lasts at the present speed. `consensus_distance` is an estimate of how far the trainers'
parameters lie from their mean, relative to the parameters' own norm; `sketch` is the projection it is told from.
Where a method keeps all nodes equal, `states_differ` counts the trainers whose `state_hash` is not the commonest of
those that have seen as many `messages`. `stages` counts the hosts of each stage of a pipeline.
`--watch --json` prints one such object a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from peerloom.node.failures import DEGRADED, EMPTY, OK
from peerloom.protocol.consensus import relative_distance
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, RunId

SCHEMA = 1
SILENT_AFTER_S = 15.0  # records are renewed every 10 s
FORGET_AFTER_S = 3600.0  # of silence: a watch that lasts for months stays small
HEALTH = {OK: "healthy", DEGRADED: "degraded", EMPTY: "empty"}

_TRAINING = {"training", "seeking", "exchanging", "done"}
_LEAVING = {"draining", "done"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node's line, field for field the JSON's `nodes` entry."""

    peer_id: PeerId
    name: str
    role: str
    state: str
    reason: str
    silent_s: float | None
    heartbeat_age_s: float
    round: int
    step: int
    loss: float | None
    tokens: int
    tokens_per_s: float
    up_bytes: int
    down_bytes: int
    partners: dict[PeerId, int]
    addresses: tuple[str, ...]
    version: str
    started_at: float
    sketch: tuple[float, ...]
    reach: str = "unknown"
    via: tuple[PeerId, ...] = ()
    relays: bool = False
    where: str = ""
    stage: int | None = None
    stage_role: str = ""
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    last_partner: str = ""
    last_met_s: float | None = None
    accuracy: float | None = None
    state_hash: str = ""
    messages: int = 0

    @property
    def trains(self) -> bool:
        """Heard from, and training or done with it."""
        return self.silent_s is None and self.state in _TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The swarm's sums, field for field the JSON's `totals`; speed, loss and stages count only nodes heard from."""

    nodes: int
    trainers: int
    training: int
    silent: int
    tokens_per_s: float
    tokens: int
    token_budget: int | None
    left_s: float | None
    loss_min: float | None
    loss_max: float | None
    loss_spread: float | None
    consensus_distance: float | None
    states_differ: int | None
    stages: dict[str, int]
    missing_stages: list[int]


class LastHeard:
    """Remembers nodes across observations, so that one that stops answering stays listed until it is back."""

    def __init__(self) -> None:
        self._known: dict[PeerId, NodeStatus] = {}

    def observe(self, statuses: Iterable[NodeStatus]) -> list[NodeStatus]:
        """Takes in one observation and returns the newest word of every node seen so far.

        A node that said it was leaving is forgotten when it is gone, any other when it was silent for FORGET_AFTER_S.
        """
        seen = {status.record.peer_id: status for status in statuses}
        newest = max((status.record.issued_at for status in seen.values()), default=0.0)
        for peer, status in self._known.items():
            silent = status.record.issued_at < newest - FORGET_AFTER_S
            if peer not in seen and status.record.state not in _LEAVING and not silent:
                seen[peer] = status
        self._known = {peer: self._newest(peer, status) for peer, status in seen.items()}
        return list(self._known.values())

    def _newest(self, peer: PeerId, status: NodeStatus) -> NodeStatus:
        known = self._known.get(peer)
        if known is None or known.record.instance != status.record.instance:
            return status
        if _age_key(status) < _age_key(known):  # an old DHT record after a fresher answer
            return known
        if not status.partners:  # read from a record, which has no room for them
            return replace(status, partners=known.partners, counters=status.counters or known.counters)
        return status


def _age_key(status: NodeStatus) -> tuple[float, int, int]:
    return status.record.issued_at, status.record.round, status.record.step


def rows_of(statuses: Iterable[NodeStatus], now: float) -> list[NodeRow]:
    """One row a node, trainers first, then by name; `now` is Unix time."""
    rows = [row_of(status, now) for status in statuses]
    return sorted(rows, key=lambda row: (row.role != "trainer", row.name, row.peer_id))


def row_of(status: NodeStatus, now: float) -> NodeRow:
    """One node's row; `now` is Unix time."""
    record = status.record
    age_s = max(0.0, now - record.issued_at)
    return NodeRow(
        peer_id=record.peer_id,
        name=record.name,
        role=record.role,
        state=record.state,
        reason=record.reason,
        silent_s=age_s if age_s > SILENT_AFTER_S else None,
        heartbeat_age_s=age_s,
        round=record.round,
        step=record.step,
        loss=record.loss,
        tokens=record.tokens,
        tokens_per_s=record.tokens_per_s,
        up_bytes=record.up_bytes,
        down_bytes=record.down_bytes,
        partners={peer: count for peer, count in sorted(status.partners.items()) if count > 0},
        addresses=record.addresses,
        version=record.version,
        started_at=record.started_at,
        sketch=record.sketch,
        reach=record.reach,
        via=record.via,
        relays=record.relays,
        where=record.addresses[0].rpartition(":")[0] if record.addresses else "",
        stage=record.stage if record.stage >= 0 else None,
        stage_role=record.stage_role,
        up_bytes_per_s=record.up_bytes_per_s,
        down_bytes_per_s=record.down_bytes_per_s,
        last_partner=record.last_partner,
        last_met_s=max(0.0, now - record.last_met_at) if record.last_partner else None,
        accuracy=record.accuracy,
        state_hash=record.state_hash,
        messages=record.messages,
    )


def totals_of(rows: list[NodeRow], spec: RunSpec | None = None) -> Totals:
    """The swarm's sums over its rows; budget and missing stages are the spec's to name."""
    heard = [row for row in rows if row.silent_s is None]
    trainers = [row for row in heard if row.role == "trainer"]
    losses = [row.loss for row in trainers if row.loss is not None]
    low, high = (min(losses), max(losses)) if losses else (None, None)
    tokens, speed = sum(row.tokens for row in rows), sum(row.tokens_per_s for row in heard)
    budget = (spec.token_budget or None) if spec is not None else None
    hosts = [row.stage for row in trainers if row.stage is not None and row.stage_role in ("", "hosts")]
    stages = Counter(hosts)
    return Totals(
        nodes=len(rows),
        trainers=sum(row.role == "trainer" for row in rows),
        training=sum(row.trains for row in trainers),
        silent=len(rows) - len(heard),
        tokens_per_s=speed,
        tokens=tokens,
        token_budget=budget,
        left_s=max(0, budget - tokens) / speed if budget is not None and speed > 0 else None,
        loss_min=low,
        loss_max=high,
        loss_spread=None if low is None or high is None else high - low,
        consensus_distance=relative_distance([row.sketch for row in trainers]),
        states_differ=_states_differ(trainers),
        stages={str(stage): stages[stage] for stage in sorted(stages)},
        missing_stages=[stage for stage in range(stages_of(spec)) if not stages[stage]],
    )


def _states_differ(trainers: list[NodeRow]) -> int | None:
    """How many hold another state than most of those that have seen as many messages; None without hashes."""
    alike: dict[int, Counter[str]] = {}
    for row in trainers:
        if row.state_hash:
            alike.setdefault(row.messages, Counter())[row.state_hash] += 1
    return sum(hashes.total() - max(hashes.values()) for hashes in alike.values()) if alike else None


def stages_of(spec: RunSpec | None) -> int:
    """How many stages the run cuts its model into; 0 where it does not."""
    if spec is None or spec.method != "pipeline":
        return 0
    return spec.pipeline.stages


def problems_of(rows: list[NodeRow], totals: Totals) -> list[str]:
    """Why the swarm is not healthy, one sentence each, the worst first; empty when it is."""
    problems = [] if totals.trainers else ["no trainer is there"]
    problems += [f"stage {stage} is served by nobody" for stage in totals.missing_stages]
    for row in rows:
        if row.silent_s is not None:
            last = f", last heard {row.state}" + (f" ({row.reason})" if row.reason else "")
            problems.append(f"{row.name} is silent for {row.silent_s:.0f} s{last}")
        elif row.role == "trainer" and not row.trains and row.state not in _LEAVING:
            problems.append(f"{row.name} is {row.state}" + (f": {row.reason}" if row.reason else ""))
    return problems


def health_from(totals: Totals, problems: list[str]) -> int:
    """OK, EMPTY (no trainer), or DEGRADED (there are problems beside that)."""
    if not totals.trainers:
        return EMPTY
    return DEGRADED if problems else OK


def health_of(rows: list[NodeRow], spec: RunSpec | None = None) -> int:
    """The exit code of `peer status`."""
    totals = totals_of(rows, spec)
    return health_from(totals, problems_of(rows, totals))


def to_json(spec: RunSpec, run_id: RunId, rows: list[NodeRow], now: float) -> dict[str, Any]:
    """The object that the module's docstring describes."""
    totals = totals_of(rows, spec)
    problems = problems_of(rows, totals)
    return {
        "schema": SCHEMA,
        "at": now,
        "health": HEALTH[health_from(totals, problems)],
        "problems": problems,
        "run": {"id": run_id, "name": spec.name, "method": spec.method},
        "totals": asdict(totals),
        "nodes": [asdict(row) for row in rows],
    }
