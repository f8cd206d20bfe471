"""The swarm as a user sees it: rows and totals from what the nodes say, as a table and as JSON.

The JSON of `peer status --json`, schema 1; keys are only ever added. Times are seconds, `at` and `started_at` Unix
time; loss is held-out, in nats a token; null where nothing is known yet.

    {"schema": 1, "at": float, "health": "healthy" | "degraded" | "empty",
     "run": {"id": str, "name": str, "method": str},
     "totals": {"nodes": int, "trainers": int, "training": int, "silent": int, "tokens_per_s": float, "tokens": int,
                "loss_min": float | null, "loss_max": float | null, "loss_spread": float | null,
                "consensus_distance": float | null},
     "nodes": [{"peer_id": str, "name": str, "role": "trainer" | "bootstrap", "state": str, "reason": str,
                "silent_s": float | null, "heartbeat_age_s": float, "round": int, "step": int, "loss": float | null,
                "tokens": int, "tokens_per_s": float, "up_bytes": int, "down_bytes": int,
                "partners": {peer_id: int}, "addresses": [str], "version": str, "started_at": float,
                "sketch": [float], "reach": "unknown" | "direct" | "via", "via": [peer_id], "relays": bool,
                "state_hash": str, "messages": int, "accuracy": float | null, "stage": int | null,
                "stage_role": "hosts" | "claims" | "stands_by" | ""}],
     "pipeline": {"stages": int, "missing": [int]} | null}

`state` is the node's own word, the last one heard; `silent_s` is null while it is heard from. `partners` counts
committed exchanges by peer. `consensus_distance` is an estimate of how far the trainers' parameters lie from their
mean, relative to the parameters' own norm; `sketch` is the projection it is told from. `via` names the relays through
which a node that cannot be dialled is reached; `relays` says that a node carries others'. `--watch --json` prints one
such object a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from peerloom.node.failures import DEGRADED, EMPTY, OK
from peerloom.node.logs import short as short_id
from peerloom.protocol.consensus import relative_distance
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, RunId, StageRole

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SCHEMA = 1
SILENT_AFTER_S = 15.0  # records are renewed every 10 s
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
    reach: str
    via: tuple[PeerId, ...]
    relays: bool
    state_hash: str
    messages: int
    accuracy: float | None
    stage: int | None = None
    stage_role: StageRole = ""

    @property
    def trains(self) -> bool:
        """Heard from, and training or done with it."""
        return self.silent_s is None and self.state in _TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The swarm's sums, field for field the JSON's `totals`; speed and loss count only nodes heard from."""

    nodes: int
    trainers: int
    training: int
    silent: int
    tokens_per_s: float
    tokens: int
    loss_min: float | None
    loss_max: float | None
    loss_spread: float | None
    consensus_distance: float | None


class LastHeard:
    """Remembers nodes across observations, so that one that stops answering stays listed until it is back."""

    def __init__(self) -> None:
        self._known: dict[PeerId, NodeStatus] = {}

    def observe(self, statuses: Iterable[NodeStatus]) -> list[NodeStatus]:
        """Takes in one observation and returns the newest word of every node seen so far.

        A node that said it was leaving is forgotten when it is gone.
        """
        seen = {status.record.peer_id: status for status in statuses}
        for peer, status in self._known.items():
            if peer not in seen and status.record.state not in _LEAVING:
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
    rows = [_row_of(status, now) for status in statuses]
    return sorted(rows, key=lambda row: (row.role != "trainer", row.name, row.peer_id))


def _row_of(status: NodeStatus, now: float) -> NodeRow:
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
        state_hash=record.state_hash,
        messages=record.messages,
        accuracy=record.accuracy,
        stage=record.stage if record.stage >= 0 else None,
        stage_role=record.stage_role,
    )


def totals_of(rows: list[NodeRow]) -> Totals:
    """The swarm's sums over its rows."""
    heard = [row for row in rows if row.silent_s is None]
    losses = [row.loss for row in heard if row.role == "trainer" and row.loss is not None]
    low, high = (min(losses), max(losses)) if losses else (None, None)
    return Totals(
        nodes=len(rows),
        trainers=sum(row.role == "trainer" for row in rows),
        training=sum(row.role == "trainer" and row.trains for row in rows),
        silent=len(rows) - len(heard),
        tokens_per_s=sum(row.tokens_per_s for row in heard),
        tokens=sum(row.tokens for row in rows),
        loss_min=low,
        loss_max=high,
        loss_spread=None if low is None or high is None else high - low,
        consensus_distance=relative_distance([row.sketch for row in heard if row.role == "trainer"]),
    )


def health_of(rows: list[NodeRow], missing: list[int] | None = None) -> int:
    """The exit code of `peer status`: OK, DEGRADED or EMPTY (no trainer).

    Degraded is a swarm with a silent node, a trainer that does not train, or stages of a pipeline that are `missing`.
    """
    trainers = [row for row in rows if row.role == "trainer"]
    if not trainers:
        return EMPTY
    if missing or any(row.silent_s is not None for row in rows) or not all(row.trains for row in trainers):
        return DEGRADED
    return OK


def to_json(spec: RunSpec, run_id: RunId, rows: list[NodeRow], now: float) -> dict[str, Any]:
    """The object that the module's docstring describes."""
    return {
        "schema": SCHEMA,
        "at": now,
        "health": HEALTH[health_of(rows, missing_of(spec, rows))],
        "run": {"id": run_id, "name": spec.name, "method": spec.method},
        "totals": asdict(totals_of(rows)),
        "nodes": [asdict(row) for row in rows],
        "pipeline": _pipeline(spec, rows),
    }


def missing_of(spec: RunSpec, rows: list[NodeRow]) -> list[int]:
    """The stages of a pipeline that no node heard from hosts; none for other methods."""
    if spec.method != "pipeline":
        return []
    hosted = {row.stage for row in rows if row.silent_s is None and row.stage_role == "hosts"}
    return [stage for stage in range(spec.pipeline.stages) if stage not in hosted]


def _pipeline(spec: RunSpec, rows: list[NodeRow]) -> dict[str, Any] | None:
    if spec.method != "pipeline":
        return None
    return {"stages": spec.pipeline.stages, "missing": missing_of(spec, rows)}


def render(spec: RunSpec, run_id: RunId, rows: list[NodeRow]) -> RenderableType:
    """Header, table, and under it a line for each node with something to explain; readable at 80 columns."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble((spec.name, "bold"), f"  run {run_id}  {spec.method}\n", summary(totals_of(rows)))
    missing = missing_of(spec, rows)
    if missing:
        named = ", ".join(map(str, missing))
        head.append(f"\nno host of stage {named} of {spec.pipeline.stages}: the run waits for one", "red")
    notes = [Text(f"{_label(row)}: {note}", style="yellow") for row in rows if (note := _note(row))]
    return Group(head, Text(), _table(rows, _COLUMNS[spec.method]), *notes)


def summary(totals: Totals) -> str:
    """The swarm in one line."""
    parts = [f"{totals.training} of {totals.trainers} training", f"{totals.nodes} node{'s' * (totals.nodes != 1)}"]
    if totals.silent:
        parts.append(f"{totals.silent} silent")
    parts += [f"{short(totals.tokens_per_s)} tokens/s", f"{short(totals.tokens)} tokens"]
    if totals.loss_spread is not None:
        parts.append(f"loss spread {totals.loss_spread:.3f}")
    if totals.consensus_distance is not None:
        parts.append(f"consensus distance {totals.consensus_distance:.2g}")
    return ", ".join(parts)


def short(amount: float) -> str:
    """A count or a number of bytes in at most five characters: 950, 1.2k, 34M."""
    for unit in ("", "k", "M", "G", "T"):
        if amount < 999.5:
            return f"{amount:.1f}{unit}" if unit and amount < 9.95 else f"{amount:.0f}{unit}"
        amount /= 1000
    return f"{amount:.0f}P"


def _table(rows: list[NodeRow], columns: dict[str, Callable[[NodeRow], str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("peer", no_wrap=True, max_width=18, overflow="ellipsis")
    table.add_column("state", no_wrap=True, min_width=11)
    for heading in columns:
        table.add_column(heading, no_wrap=True, justify="right")
    for row in rows:
        state = row.state if row.silent_s is None else f"silent {row.silent_s:.0f} s"
        cells = [_label(row), state, *(cell(row) for cell in columns.values())]
        table.add_row(*cells, style="red" if row.silent_s is not None else None)
    return table


def _of_trainers(cell: Callable[[NodeRow], str]) -> Callable[[NodeRow], str]:
    return lambda row: cell(row) if row.role == "trainer" else ""


def _loss(row: NodeRow) -> str:
    return f"{row.loss:.3f}" if row.loss is not None else ""


_TRAFFIC: dict[str, Callable[[NodeRow], str]] = {
    "up": lambda row: short(row.up_bytes),
    "down": lambda row: short(row.down_bytes),
}
_AGE: dict[str, Callable[[NodeRow], str]] = {"age": lambda row: f"{row.heartbeat_age_s:.0f} s"}
_GOSSIPING: dict[str, Callable[[NodeRow], str]] = {
    "round": _of_trainers(lambda row: str(row.round)),
    "loss": _loss,
    "tok/s": _of_trainers(lambda row: short(row.tokens_per_s)),
    **_TRAFFIC,
    "partners": _of_trainers(lambda row: str(len(row.partners))),
    **_AGE,
}
_STAGES: dict[str, Callable[[NodeRow], str]] = {
    "round": _of_trainers(lambda row: str(row.round)),
    "loss": _loss,
    "tok/s": _of_trainers(lambda row: short(row.tokens_per_s)),
    **_TRAFFIC,
    "stage": lambda row: _place(row),
    **_AGE,
}
_FLOODING: dict[str, Callable[[NodeRow], str]] = {
    "step": _of_trainers(lambda row: str(row.step)),
    "loss": _loss,
    "acc": lambda row: f"{row.accuracy:.1%}" if row.accuracy is not None else "",
    "msgs": _of_trainers(lambda row: str(row.messages)),
    "hash": lambda row: row.state_hash[:8],
    **_TRAFFIC,
    **_AGE,
}

_COLUMNS = {"gasloc": _GOSSIPING, "seedflow": _FLOODING, "pipeline": _STAGES}


def _label(row: NodeRow) -> str:
    return f"{short_id(row.peer_id)} {row.name}"


def _place(row: NodeRow) -> str:
    """What a pipeline's node does, where others have their partners."""
    if row.stage is None or not row.stage_role:
        return ""
    return {"hosts": "", "claims": "claims ", "stands_by": "spare "}.get(row.stage_role, "") + str(row.stage)


def _note(row: NodeRow) -> str:
    if row.silent_s is not None:
        last = f", last heard {row.state}" + (f" ({row.reason})" if row.reason else "")
        return f"silent for {row.silent_s:.0f} s{last}"
    return f"{row.state}: {row.reason}" if row.reason else ""
