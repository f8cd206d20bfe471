"""Checks of single fields that came from a peer: each returns the value or raises MalformedMessage or LimitExceeded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TypeVar, get_args

from peerloom.protocol import limits
from peerloom.protocol.errors import InviteError, LimitExceeded, MalformedMessage
from peerloom.protocol.invite import check_host_multiaddr

Octets = TypeVar("Octets", bytes, memoryview, bytes | memoryview)

_HEX = re.compile(r"[0-9a-f]*")
_BASE58 = re.compile(r"[1-9A-HJ-NP-Za-km-z]+")
_V4_OR_NAME = re.compile(r"[0-9A-Za-z]([0-9A-Za-z._-]*[0-9A-Za-z])?")
_V6 = re.compile(r"\[[0-9A-Fa-f:.]+\]")


def text(what: str, value: str, limit: int, *, empty: bool = True) -> str:
    """Printable text of at most `limit` characters: what a terminal may show."""
    if len(value) > limit:
        raise LimitExceeded(f"{what} has {len(value)} characters; the limit is {limit}")
    if not value.isprintable():
        raise MalformedMessage(f"{what} holds characters that are not printable")
    if not (value or empty):
        raise MalformedMessage(f"{what} is empty")
    return value


def hex_text(what: str, value: str, limit: int, *, exact: bool = False) -> str:
    """Lower-case hex of at most, or exactly, `limit` characters."""
    if len(value) > limit or (exact and len(value) != limit) or not _HEX.fullmatch(value):
        raise MalformedMessage(f"{what} is not {'' if exact else 'up to '}{limit} hex digits")
    return value


def peer_id(what: str, value: str) -> str:
    """The form of a libp2p peer id; whether it is a key is verify()'s business."""
    if len(value) > limits.MAX_PEER_ID_CHARS or not _BASE58.fullmatch(value):
        raise MalformedMessage(f"{what} is not a peer id")
    return value


def one_of(what: str, value: str, literal: object) -> str:
    """A member of a Literal type."""
    if value not in get_args(literal):
        raise MalformedMessage(f"{what} is {value[:32]!r}; known are {', '.join(get_args(literal))}")
    return value


def whole(what: str, value: int, limit: int = limits.MAX_COUNT) -> int:
    """An integer from 0 to `limit`."""
    if not 0 <= value <= limit:
        raise MalformedMessage(f"{what} is {value}, outside 0 to {limit}")
    return value


def position(what: str, value: int) -> int:
    """A round or a step."""
    return whole(what, value, limits.MAX_POSITION)


def finite(what: str, value: float) -> float:
    """Neither NaN nor infinite."""
    if not math.isfinite(value):
        raise MalformedMessage(f"{what} is {value}")
    return value


def sketch(what: str, values: Iterable[float]) -> tuple[float, ...]:
    """At most MAX_SKETCH numbers of a size that can be squared."""
    numbers = tuple(values)
    limits.check_number_of(f"numbers in the {what}", len(numbers), limits.MAX_SKETCH)
    for value in numbers:
        if not abs(value) <= limits.MAX_SKETCH_VALUE:  # NaN fails too
            raise MalformedMessage(f"the {what} holds {value}")
    return numbers


def fit_sketch(values: tuple[float, ...]) -> tuple[float, ...]:
    """Our own sketch, none where it could not be sent."""
    return values if all(abs(value) <= limits.MAX_SKETCH_VALUE for value in values) else ()


def wall_time(what: str, value: float) -> float:
    """Unix seconds between 1970 and 2100."""
    if not 0.0 <= value <= limits.MAX_WALL_S:  # NaN fails too
        raise MalformedMessage(f"{what} is {value}, which is no time in seconds")
    return value


def octets(what: str, value: bytes, length: int) -> bytes:
    """Exactly `length` bytes."""
    if len(value) != length:
        raise MalformedMessage(f"{what} has {len(value)} bytes instead of {length}")
    return value


def bounded(what: str, value: Octets, limit: int) -> Octets:
    """1 to `limit` bytes."""
    limits.check_size(what, len(value), limit)
    if not value:
        raise MalformedMessage(f"{what} is empty")
    return value


def address(value: str) -> str:
    """A dialable "host:port" or "[v6]:port": nothing that a dialler could take for a scheme, a path or an option."""
    host, colon, port = value.rpartition(":")
    good_port = colon and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536
    if not good_port or len(value) > limits.MAX_ADDRESS_CHARS:
        raise MalformedMessage(f"address {value[:80]!r} is not host:port")
    if not (_V6.fullmatch(host) if host.startswith("[") else _V4_OR_NAME.fullmatch(host)):
        raise MalformedMessage(f"address {value[:80]!r} names no host")
    return value


def multiaddr(value: str) -> str:
    """`/ip4/1.2.3.4/tcp/4001` and its like, without a peer id."""
    try:
        return check_host_multiaddr(text("multiaddr", value, limits.MAX_MULTIADDR_CHARS))
    except InviteError:
        raise MalformedMessage(f"{value[:80]!r} is not the multiaddr of a host and a TCP port") from None


def shown(value: str, limit: int = limits.MAX_TEXT_CHARS) -> str:
    """Our own text made fit to send: one line, printable, cut at `limit` characters."""
    line = "".join(char if char.isprintable() else " " for char in value)
    return line if len(line) <= limit else line[: limit - 1] + "…"
