"""What a spec field may hold: the rule stands in the field itself, so check, template and tests read the same one."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

RULE = "rule"
DOC = "doc"
SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong: the dotted keys it is about (the first is named), what was found and what is allowed."""

    keys: tuple[str, ...]
    sentence: str

    def __str__(self) -> str:
        return f"{self.keys[0]} = {self.sentence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRule:
    """low <= value <= high, an end left out where `open_low` or `open_high` says so."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def allowed(self) -> str:
        if not (self.open_low or self.open_high):
            return f"from {self.low} to {self.high}"
        low = f"above {self.low}" if self.open_low else f"at least {self.low}"
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRule:
    """Text of at most `most` characters without control characters; a slug, or possibly empty."""

    most: int
    slug: bool = False
    empty: bool = False

    def holds(self, value: str) -> bool:
        if self.slug:
            return len(value) <= self.most and SLUG.fullmatch(value) is not None
        plain = len(value) <= self.most and not any(unicodedata.category(c) in _UNFIT for c in value)
        return plain and (self.empty or bool(value.strip()))

    def allowed(self) -> str:
        if self.slug:
            return f"1 to {self.most} letters, digits, '.', '_' or '-', the first a letter or digit"
        return f"text of {0 if self.empty else 1} to {self.most} characters without control characters"


_UNFIT = {"Cc", "Cs", "Zl", "Zp"}  # controls, lone surrogates, line and paragraph separators


def number(
    default: float, low: float, high: float, doc: str, *, open_low: bool = False, open_high: bool = False
) -> Any:
    """A field that holds an int or a float, as its annotation says."""
    rule = NumberRule(low=low, high=high, open_low=open_low, open_high=open_high)
    return field(default=default, metadata={RULE: rule, DOC: doc})


def text(default: str, doc: str, *, most: int = 512, slug: bool = False, empty: bool = False) -> Any:
    """A field that holds a string."""
    rule = TextRule(most=64 if slug else most, slug=slug, empty=empty)
    return field(default=default, metadata={RULE: rule, DOC: doc})


def choice(default: str | bool, doc: str) -> Any:
    """A field whose annotation, a Literal or bool, already says what it may hold."""
    return field(default=default, metadata={DOC: doc})


def shown(value: object) -> str:
    """A value as a message shows it: short, on one line, whatever it is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # repr() refuses the largest ones
    if isinstance(value, dict):
        return "a table"
    text_ = repr(value)
    return text_ if len(text_) <= 80 else text_[:77] + "..."


def allowed(annotation: object, item: Field[Any]) -> str:
    """What the field may hold, as the end of "must be ..."."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(annotation))
    if annotation is bool:
        return "true or false"
    rule: NumberRule | TextRule = item.metadata[RULE]  # a field without a rule is a bug: KeyError
    if isinstance(rule, TextRule):
        return rule.allowed()
    return f"{'an integer' if annotation is int else 'a number'} {rule.allowed()}"


def holds(annotation: object, item: Field[Any], value: object) -> bool:
    """Whether the field may hold the value; a bool is not a number, an int is a float, NaN and inf are neither."""
    if get_origin(annotation) is Literal:
        return isinstance(value, str) and value in get_args(annotation)
    if annotation is bool:
        return isinstance(value, bool)
    rule = item.metadata[RULE]
    if isinstance(rule, TextRule):
        return isinstance(value, str) and rule.holds(value)
    if isinstance(value, bool) or not isinstance(value, int if annotation is int else (int, float)):
        return False
    return (isinstance(value, int) or math.isfinite(value)) and rule.holds(value)


def faults(table: Any, prefix: str = "") -> list[Fault]:
    """All faults of a spec dataclass and of those inside it.

    `table.cross()` yields the faults between fields; it runs with defaults in place of bad fields, and what it then
    says of a bad field is left out.
    """
    found: list[Fault] = []
    repairs: dict[str, Any] = {}
    hints = get_type_hints(type(table))
    for item in fields(table):
        value, hint, key = getattr(table, item.name), hints[item.name], prefix + item.name
        if is_dataclass(hint):
            inner = _inner(value, hint, key)
            if inner:
                repairs[item.name] = _repaired(value, hint, inner, key + ".")
                found += inner
        elif not holds(hint, item, value):
            repairs[item.name] = item.default
            found.append(_fault(key, value, allowed(hint, item)))
    bad = {key for fault in found for key in fault.keys}
    return found + [fault for fault in _cross(replace(table, **repairs), prefix) if not bad & set(fault.keys)]


def _inner(value: Any, kind: Any, key: str) -> list[Fault]:
    return faults(value, key + ".") if isinstance(value, kind) else [_fault(key, value, "a table")]


def _fault(key: str, value: object, allowed_: str) -> Fault:
    return Fault((key,), f"{shown(value)}: must be {allowed_}")


def _cross(table: Any, prefix: str) -> Iterator[Fault]:
    pairs: Iterable[Fault] = table.cross()
    for fault in pairs:
        yield Fault(tuple(prefix + key for key in fault.keys), fault.sentence)


def _repaired(value: Any, kind: Any, inner: list[Fault], prefix: str) -> Any:
    if not isinstance(value, kind):
        return kind()
    bad = {key.removeprefix(prefix) for fault in inner for key in fault.keys}
    return replace(value, **{item.name: item.default for item in fields(value) if item.name in bad})
