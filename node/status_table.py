"""The swarm as text: a header, a table that takes as many columns as the terminal has room for, and the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peerloom.node.logs import short as short_id
from peerloom.node.status import HEALTH, NodeRow, Totals, health_of, totals_of
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import RunId

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

COLOURS = {"healthy": "green", "degraded": "yellow", "empty": "red"}
_ALARMING = {"stalled", "restarting"}

SortKey = Callable[[NodeRow], tuple[bool, float | str]]


@dataclass(frozen=True, slots=True)
class Column:
    """`rank` says which columns a narrow terminal keeps: the smallest; `sort` puts rows without a value last."""

    heading: str
    width: int
    rank: int
    cell: Callable[[NodeRow], str]
    sort: SortKey
    right: bool = False


def _number(value: Callable[[NodeRow], float | None]) -> SortKey:
    def key(row: NodeRow) -> tuple[bool, float | str]:
        found = value(row)
        return found is None, found or 0.0

    return key


def _text(value: Callable[[NodeRow], str]) -> SortKey:
    return lambda row: (not value(row), value(row))


def _trainers(cell: Callable[[NodeRow], str]) -> Callable[[NodeRow], str]:
    return lambda row: cell(row) if row.role == "trainer" else ""


STAGE = Column(
    "stage", 5, 3, lambda row: "" if row.stage is None else str(row.stage), _number(lambda row: row.stage), True
)
COLUMNS = (
    Column("peer", 18, 0, lambda row: label(row), _text(lambda row: row.name)),
    Column("state", 11, 1, lambda row: state(row), _text(lambda row: state(row))),
    Column("role", 9, 12, lambda row: row.role, _text(lambda row: row.role)),
    STAGE,
    Column("round", 6, 2, _trainers(lambda row: str(row.round)), _number(lambda row: row.round), True),
    Column(
        "loss", 6, 4, lambda row: "" if row.loss is None else f"{row.loss:.3f}", _number(lambda row: row.loss), True
    ),
    Column("tok/s", 5, 5, _trainers(lambda row: short(row.tokens_per_s)), _number(lambda row: row.tokens_per_s), True),
    Column("up/s", 5, 7, lambda row: short(row.up_bytes_per_s), _number(lambda row: row.up_bytes_per_s), True),
    Column("down/s", 6, 8, lambda row: short(row.down_bytes_per_s), _number(lambda row: row.down_bytes_per_s), True),
    Column("partner", 8, 9, lambda row: short_id(row.last_partner), _text(lambda row: row.last_partner)),
    Column("age", 5, 6, lambda row: duration(row.heartbeat_age_s), _number(lambda row: row.heartbeat_age_s), True),
    Column("link", 7, 10, lambda row: link(row), _text(lambda row: link(row))),
    Column("where", 15, 11, lambda row: row.where, _text(lambda row: row.where)),
    Column("version", 8, 13, lambda row: row.version, _text(lambda row: row.version)),
)
GAP = 1


def columns_for(rows: Sequence[NodeRow], width: int) -> list[Column]:
    """The columns that fit, in their fixed order; stages only where there are some."""
    left, kept = width + GAP, set()
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if column is STAGE and all(row.stage is None for row in rows):
            continue
        if column.width + GAP > left:
            break
        left -= column.width + GAP
        kept.add(column.heading)
    return [column for column in COLUMNS if column.heading in kept]


def cells(columns: Sequence[Column], texts: Sequence[str]) -> str:
    """One line of the table, each text cut or padded to its column."""
    from rich.cells import cell_len, set_cell_size

    parts = []
    for column, text in zip(columns, texts, strict=True):
        if cell_len(text) > column.width:
            text = set_cell_size(text, column.width - 1) + "…"
        pad = " " * (column.width - cell_len(text))
        parts.append(pad + text if column.right else text + pad)
    return (" " * GAP).join(parts).rstrip()


def line(columns: Sequence[Column], row: NodeRow) -> Text:
    """A node's line; red when it is silent, yellow when it trains no longer."""
    from rich.text import Text

    style = "red" if row.silent_s is not None else "yellow" if row.state in _ALARMING else ""
    return Text(cells(columns, [column.cell(row) for column in columns]), style, no_wrap=True, overflow="crop")


class SwarmTable:
    """Heading and all rows, as wide as the console allows."""

    def __init__(self, rows: list[NodeRow]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        columns = columns_for(self._rows, options.max_width)
        yield Text(cells(columns, [column.heading for column in columns]), "bold", no_wrap=True, overflow="crop")
        for row in self._rows:
            yield line(columns, row)


def render(spec: RunSpec, run_id: RunId, rows: list[NodeRow]) -> RenderableType:
    """Header, table, and under it a line for each node with something to explain; readable at 80 columns."""
    from rich.console import Group
    from rich.text import Text

    notes = [Text(f"{label(row)}: {told}", "yellow") for row in rows if (told := note(row))]
    return Group(header(spec, run_id, rows), Text(), SwarmTable(rows), *notes)


def header(spec: RunSpec, run_id: RunId, rows: list[NodeRow]) -> Text:
    """What run it is, whether it is healthy, and its sums."""
    from rich.text import Text

    health = HEALTH[health_of(rows, spec)]
    return Text.assemble(
        (spec.name, "bold"),
        f"  run {run_id}  {spec.method}  ",
        (health, COLOURS[health]),
        f"\n{summary(totals_of(rows, spec))}",
    )


def summary(totals: Totals) -> str:
    """The swarm in one line."""
    parts = [f"{totals.training} of {totals.trainers} training", f"{totals.nodes} node{'s' * (totals.nodes != 1)}"]
    if totals.silent:
        parts.append(f"{totals.silent} silent")
    parts.append(f"{short(totals.tokens_per_s)} tokens/s")
    if totals.token_budget is None:
        parts.append(f"{short(totals.tokens)} tokens")
    else:
        parts.append(f"{short(totals.tokens)} of {short(totals.token_budget)} tokens")
        parts.append("no speed yet" if totals.left_s is None else f"{duration(totals.left_s)} left")
    if totals.loss_spread is not None:
        parts.append(f"loss spread {totals.loss_spread:.3f}")
    if totals.consensus_distance is not None:
        parts.append(f"consensus distance {totals.consensus_distance:.2g}")
    if totals.states_differ is not None:
        parts.append("equal states" if not totals.states_differ else f"{totals.states_differ} states differ")
    if totals.stages:
        parts.append("stages " + " ".join(f"{stage}:{count}" for stage, count in totals.stages.items()))
    if totals.missing_stages:
        parts.append("missing stages " + " ".join(map(str, totals.missing_stages)))
    return ", ".join(parts)


def label(row: NodeRow) -> str:
    """What a node is called in a table."""
    return f"{short_id(row.peer_id)} {row.name}"


def state(row: NodeRow) -> str:
    """Its state, or that it is silent."""
    return row.state if row.silent_s is None else "silent"


def link(row: NodeRow) -> str:
    """How it is reached; a node that has not found out yet is dialled directly."""
    return "relayed" if row.via else "direct"


def note(row: NodeRow) -> str:
    """Why it is not as it should be, "" when it is."""
    if row.silent_s is not None:
        last = f", last heard {row.state}" + (f" ({row.reason})" if row.reason else "")
        return f"silent for {row.silent_s:.0f} s{last}"
    if row.state in ("seeking", "exchanging"):  # with whom, or for whom it waits: no complaint
        return ""
    return f"{row.state}: {row.reason}" if row.reason else ""


def short(amount: float) -> str:
    """A count or a number of bytes in at most five characters: 950, 1.2k, 34M."""
    for unit in ("", "k", "M", "G", "T"):
        if amount < 999.5:
            return f"{amount:.1f}{unit}" if unit and amount < 9.95 else f"{amount:.0f}{unit}"
        amount /= 1000
    return f"{amount:.0f}P"


def duration(seconds: float) -> str:
    """Seconds in at most five characters: 42 s, 17 m, 5.2 h, 12 d."""
    for unit, length in (("s", 60.0), ("m", 60.0), ("h", 24.0)):
        if seconds < length - 0.5:
            return f"{seconds:.1f} {unit}" if unit == "h" and seconds < 9.95 else f"{seconds:.0f} {unit}"
        seconds /= length
    return f"{min(seconds, 999):.0f} d"
