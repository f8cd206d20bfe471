"""`peer status --watch` on a terminal: the whole screen, with scrolling, sorting and filtering by key.

`View` is what the keys have chosen and knows no terminal; `frame` draws it; `Keyboard` reads the keys.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peerloom.node.status import NodeRow, problems_of, totals_of
from peerloom.node.status_table import COLUMNS, cells, columns_for, header, label, line, note
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import RunId

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

HELP = "q quit  ↑↓ PgUp PgDn move  s/S sort  r reverse  / filter  Esc all"
LEAST_ROWS = 3

_ESCAPES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1bOA": "up", "\x1bOB": "down",
    "\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end",
}  # fmt: skip
_TOKEN = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])?|.", re.DOTALL)
_SAME = {"k": "up", "j": "down", " ": "pagedown", "b": "pageup", "g": "home", "G": "end", "right": "s", "left": "S"}


@dataclass(slots=True)
class View:
    """Which rows are shown and which is marked; `page` is how many fit, set by the last frame."""

    sort: int | None = None  # index into COLUMNS; None: trainers first, then by name
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    top: int = 0
    marked: int = 0
    page: int = LEAST_ROWS
    over: bool = False

    def shown(self, rows: list[NodeRow]) -> list[NodeRow]:
        """The rows that pass the filter (part of name, id, state, role or address), in order."""
        wanted = self.filter.lower()
        found = [row for row in rows if not wanted or wanted in _searched(row)]
        if self.sort is None:
            return found[::-1] if self.reverse else found
        key = COLUMNS[self.sort].sort
        known = [row for row in found if not key(row)[0]]
        return sorted(known, key=key, reverse=self.reverse) + [row for row in found if key(row)[0]]

    def key(self, key: str, count: int) -> None:
        """Takes a key, of `count` rows shown."""
        if self.typing:
            self._type(key)
            return
        key = _SAME.get(key, key)
        steps = {"up": -1, "down": 1, "pageup": -self.page, "pagedown": self.page, "home": -count, "end": count}
        if key in steps:
            self.marked = min(max(0, self.marked + steps[key]), max(0, count - 1))
        elif key in ("s", "S"):
            self._sort_next(1 if key == "s" else -1)
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key == "escape":
            self.filter, self.marked = "", 0
        elif key in ("q", "\x03"):
            self.over = True

    def _type(self, key: str) -> None:
        if key in ("\r", "\n", "escape"):
            self.typing = False
            if key == "escape":
                self.filter = ""
        elif key in ("\x7f", "\b"):
            self.filter = self.filter[:-1]
        elif len(key) == 1 and key.isprintable():
            self.filter += key
        self.marked = 0

    def _sort_next(self, step: int) -> None:
        choices = [None, *range(len(COLUMNS))]
        self.sort = choices[(choices.index(self.sort) + step) % len(choices)]
        self.reverse = False

    def scroll(self, count: int, page: int) -> None:
        """Keeps the marked row on the screen, which has room for `page` of `count`."""
        self.page = max(1, page)
        self.marked = min(self.marked, max(0, count - 1))
        self.top = min(max(self.top, self.marked - self.page + 1), self.marked, max(0, count - self.page))


def frame(
    view: View, spec: RunSpec, run_id: RunId, rows: list[NodeRow], width: int, height: int
) -> RenderableType:
    """One screen of `width` x `height`: header, the table's part in sight, the marked node, the keys."""
    from rich.console import Console, Group
    from rich.text import Text

    shown = view.shown(rows)
    head = header(spec, run_id, rows).wrap(Console(width=width), width)
    problems = problems_of(rows, totals_of(rows, spec))
    view.scroll(len(shown), max(LEAST_ROWS, height - len(head) - 6))
    columns = columns_for(rows, width)
    names = [_arrowed(view, column.heading) for column in columns]
    body = []
    for number, row in enumerate(shown[view.top : view.top + view.page], view.top):
        text = line(columns, row)
        if number == view.marked:
            text.stylize("reverse")
        body.append(text)
    body += [Text() for _ in range(view.page - len(body))]
    marked = shown[view.marked] if shown else None
    trouble = Text(_first_of(problems), "yellow")
    foot = [_one_line(trouble, width), *(_one_line(Text(text, "dim"), width) for text in _details(marked))]
    return Group(
        *head,
        Text(cells(columns, names), "bold underline", no_wrap=True),
        *body,
        *foot,
        _one_line(Text(_bottom(view, shown, rows), "reverse dim"), width),
    )


def _searched(row: NodeRow) -> str:
    where = "silent" if row.silent_s is not None else row.state
    return f"{row.name} {row.peer_id} {where} {row.role} {row.where}".lower()


def _arrowed(view: View, heading: str) -> str:
    if view.sort is None or COLUMNS[view.sort].heading != heading:
        return heading
    return f"{heading[:-1] if len(heading) > 5 else heading}{'▼' if view.reverse else '▲'}"


def _details(row: NodeRow | None) -> list[str]:
    if row is None:
        return ["no node matches", "", ""]
    relays, addresses = ", ".join(row.via), ", ".join(row.addresses)
    link = f"relayed by {relays}" if relays else f"direct at {addresses or 'no address'}"
    met = "" if row.last_met_s is None else f", met {row.last_partner[-8:]} {row.last_met_s:.0f} s ago"
    return [
        f"{label(row)}: {row.role}, {link}, version {row.version}",
        f"step {row.step}, {row.tokens:,} tokens{met}",
        note(row) or "no complaint",
    ]


def _bottom(view: View, shown: list[NodeRow], rows: list[NodeRow]) -> str:
    if view.typing:
        return f"filter: {view.filter}▏ ({len(shown)} of {len(rows)}; Enter keeps it, Esc drops it)"
    last = min(view.top + view.page, len(shown))
    span = f"{view.top + 1 if shown else 0}-{last} of {len(shown)}"
    return f"{span}{f' like {view.filter!r}' if view.filter else ''}  {HELP}"


def _first_of(problems: list[str]) -> str:
    if not problems:
        return ""
    return problems[0] if len(problems) == 1 else f"{len(problems)} problems, first: {problems[0]}"


def _one_line(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text


def keys_of(text: str) -> Iterator[str]:
    """The keys in what a terminal sent: names for arrows and pages, "escape", else characters; others are left out."""
    for token in _TOKEN.findall(text):
        if token in _ESCAPES:
            yield _ESCAPES[token]
        elif token == "\x1b":
            yield "escape"
        elif not token.startswith("\x1b"):
            yield token


class Keyboard:
    """Keys of the terminal on stdin, given to `on_key` in the running loop; nothing where stdin is no terminal."""

    def __init__(self, on_key: Callable[[str], None], fd: int | None = None) -> None:
        self._on_key = on_key
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._before: list[Any] | None = None

    def __enter__(self) -> Keyboard:
        if os.isatty(self._fd):
            import termios
            import tty

            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
            asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            import termios

            asyncio.get_running_loop().remove_reader(self._fd)
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        data = os.read(self._fd, 1024)
        if not data:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(self._fd)
            self._on_key("q")
        for key in keys_of(data.decode("utf-8", "replace")):
            self._on_key(key)
