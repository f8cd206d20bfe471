"""Spec dataclasses from and to TOML text: every fault at once with its line, and one canonical text a spec."""

from __future__ import annotations

import tomllib
from dataclasses import Field, fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any, TypeVar, get_type_hints

from peerloom.protocol.errors import SpecError
from peerloom.protocol.spec_rules import DOC, Fault, allowed, shown
from peerloom.protocol.toml_lines import MAX_DEPTH, KeyLines, scan

MAX_SPEC_CHARS = 65_536
MAX_GUESSES = 32  # guessing what was meant costs milliseconds a key, and a text may be all unknown keys
T = TypeVar("T")


def read(kind: type[T], source: str) -> tuple[T, list[Fault], KeyLines]:
    """The dataclass with the values as they stand, unchecked; faults of unknown keys and of tables; lines of all keys.

    Raises SpecError alone when the text is no TOML at all.
    """
    lines = scan(_within_limits(source))
    if lines.too_deep:
        raise SpecError([f"line {lines.too_deep}: more than {MAX_DEPTH} levels deep; no key of a run spec is"])
    try:
        raw = tomllib.loads(source)
    except ValueError as error:  # TOMLDecodeError, and int() on too many digits
        raise SpecError([f"not TOML: {error}"]) from error
    found: list[Fault] = []
    return _table(kind, raw, "", found, known_keys(kind)), found, lines


def _within_limits(source: str) -> str:
    if len(source) > MAX_SPEC_CHARS:
        raise SpecError([f"a run spec of {len(source)} characters; at most {MAX_SPEC_CHARS} are allowed"])
    return source


def known_keys(kind: type, prefix: str = "") -> list[str]:
    """All dotted keys of a spec dataclass, tables included, in order."""
    keys: list[str] = []
    for name, hint in get_type_hints(kind).items():
        keys.append(prefix + name)
        if is_dataclass(hint):
            keys += known_keys(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
    return keys


def _table(kind: type[T], raw: dict[str, Any], prefix: str, found: list[Fault], known: list[str]) -> T:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in raw.items():
        key, hint = prefix + name, hints.get(name)
        if hint is None:
            guess = f"; the closest known one is {closest(key, known)}" if len(found) < MAX_GUESSES else ""
            found.append(Fault((key if _plain(name) else prefix + shown(name),), f"{shown(value)}: no such key{guess}"))
        elif is_dataclass(hint):
            if isinstance(value, dict):
                values[name] = _table(hint, value, key + ".", found, known)  # type: ignore[arg-type]
            else:
                found.append(Fault((key,), f"{shown(value)}: must be a table"))
        else:
            values[name] = float(value) if hint is float and _is_float_like(value) else value
    implied = getattr(kind, "implied", None)
    return kind(**{**(implied(values) if implied else {}), **values})


def _plain(name: str) -> bool:
    return name.isprintable() and len(name) <= 64


def _is_float_like(value: object) -> bool:
    """An int that fits a float exactly enough; larger ones stay ints and fail the range check."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000


def closest(key: str, known: list[str]) -> str:
    """The known key most like `key`: by its last part first, so that a key in the wrong table is found."""

    def likeness(candidate: str) -> float:
        leaf = SequenceMatcher(None, key.rpartition(".")[2][:64], candidate.rpartition(".")[2]).ratio()
        return leaf + 0.5 * SequenceMatcher(None, key[:128], candidate).ratio()

    return max(known, key=likeness)


def sentences(found: list[Fault], lines: KeyLines) -> list[str]:
    """The faults in the order of their lines, each with its line if the text has the key."""
    placed = [(min((n for n in map(lines.of, fault.keys) if n), default=0), fault) for fault in found]
    placed = [(lines.of(fault.keys[0]) or line, fault) for line, fault in placed]
    return [f"line {line}: {fault}" if line else str(fault) for line, fault in sorted(placed, key=lambda at: at[0])]


def write(table: Any, comments: bool = False, without: frozenset[str] = frozenset(), prefix: str = "") -> str:
    """TOML text of a spec: its own keys in order, then a `[table]` for each dataclass inside it.

    `without`: dotted keys that are left out.
    """
    out: list[str] = []
    hints = get_type_hints(type(table))
    for item in fields(table):
        value, key = getattr(table, item.name), prefix + item.name
        if key in without:
            continue
        if is_dataclass(value):
            note = f"# {(type(value).__doc__ or '').splitlines()[0]}\n" if comments else ""
            out.append(f"\n{note}[{item.name}]\n" + write(value, comments, without, key + "."))
        else:
            note = _note(item, hints[item.name]) if comments else ""
            out.append(f"{note}{item.name} = {_literal(value, hints[item.name])}\n")
    return "".join(out)


def _note(item: Field[Any], hint: object) -> str:
    """The comment above a key; that text is text goes without saying."""
    said = item.metadata[DOC].replace("\n", "\n# ")
    return f"# {said}\n" if hint is str else f"# {said}\n#   {allowed(hint, item)}\n"


def _literal(value: Any, hint: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if hint is float:
        return repr(float(value) + 0.0)  # + 0.0: no negative zero, which equals zero
    if isinstance(value, int):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
