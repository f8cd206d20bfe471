"""On which line of a TOML text each key stands: tomllib does not say.

The scan agrees with tomllib on every valid text and on the valid beginning of any other; it is linear, so it also finds
keys and brackets nested deep enough to cost tomllib quadratic time or its stack, before tomllib sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

Key = tuple[str, ...]
MAX_DEPTH = 8  # parts of a key, and brackets within each other

_TOKEN = re.compile(
    r'''(?P<text>"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?'{3,5})
    |(?P<broken>"""|\'\'\')
    |(?P<word>"(?:\\.|[^"\\\n])*"|'[^'\n]*'|[^\s\[\]{}=,.\#"']+)
    |(?P<comment>\#[^\n]*)
    |(?P<mark>[\[\]{}=,.\n])
    |(?P<space>[^\S\n]+)
    |(?P<other>.)''',
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True)
class KeyLines:
    """`lines` of all keys and tables (from 1), and the line where nesting passes MAX_DEPTH, if it does."""

    lines: dict[Key, int] = field(default_factory=dict)
    too_deep: int | None = None

    def of(self, dotted: str) -> int | None:
        return self.lines.get(tuple(dotted.split(".")))


def scan(source: str) -> KeyLines:
    """Finds the lines; ends at the first thing that is no TOML."""
    result = KeyLines()
    reader = _Reader(result)
    for token, line in _tokens(source):
        reader.take(token, line)
        if len(reader.parts) > MAX_DEPTH or len(reader.nest) > MAX_DEPTH:
            result.too_deep = line
            break
    return result


def _tokens(source: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in _TOKEN.finditer(source):
        kind, token = match.lastgroup, match.group()
        if kind in ("broken", "other"):
            return
        if kind not in ("comment", "space"):
            yield token, line
        line += token.count("\n")


class _Reader:
    """Where the scan is: reading a key, a header or a value; `nest` holds the open tables (key) and arrays (None)."""

    def __init__(self, result: KeyLines) -> None:
        self.result = result
        self.header: Key = ()
        self.key: Key = ()
        self.parts: list[str] = []
        self.nest: list[Key | None] = []
        self.in_value = False

    def take(self, token: str, line: int) -> None:
        if token == "\n":
            if not self.nest:
                self.in_value, self.parts = False, []
        elif self.in_value:
            self._value(token)
        elif token == "=":
            self.key = self._name(self._base(), line)
            self.in_value = True
        elif token == "]":
            self.header = self._name((), line)
        elif token == "}":
            self._close()
        elif token not in ("[", ".", ",", "{"):
            self.parts.append(token[1:-1] if token[0] in "\"'" else token)

    def _value(self, token: str) -> None:
        if token == "[":
            self.nest.append(None)
        elif token == "{":
            self.nest.append(self.key)
            self.in_value = False
        elif token in "]}":
            self._close()
        elif token == "," and self.nest and self.nest[-1] is not None:
            self.in_value = False

    def _close(self) -> None:
        if self.nest:
            self.nest.pop()
        self.in_value, self.parts = True, []

    def _base(self) -> Key:
        inner = self.nest[-1] if self.nest else None
        return self.header if inner is None else inner

    def _name(self, base: Key, line: int) -> Key:
        """The key just read; it and the tables it passes through are first seen on this line."""
        name = base + tuple(self.parts)
        for end in range(len(base) + 1, len(name) + 1):
            self.result.lines.setdefault(name[:end], line)
        self.parts = []
        return name
