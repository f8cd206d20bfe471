"""Protobuf's messages to and from bytes, with its errors as ours; what every service's codec stands on."""

from __future__ import annotations

import math
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from peerloom.protocol import checks, limits
from peerloom.protocol.errors import MalformedMessage

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes, limit: int = limits.MAX_MESSAGE_BYTES) -> M:
    """A message of a peer's; raises LimitExceeded or MalformedMessage."""
    limits.check_size(kind.DESCRIPTOR.name, len(data), limit)
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise MalformedMessage(f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}") from None
    return message


def serialize(message: Message) -> bytes:
    """Our own message; raises LimitExceeded."""
    data = message.SerializeToString()
    limits.check_size(message.DESCRIPTOR.name, len(data), limits.MAX_MESSAGE_BYTES)
    return data


def finite_or_none(value: float | None) -> float | None:
    """The number, unless it is none."""
    return value if value is not None and math.isfinite(value) else None


def optional_finite(what: str, message: Message, field: str) -> float | None:
    """A field of a peer's that may be left out; raises MalformedMessage for what is no number."""
    return checks.finite(what, getattr(message, field)) if message.HasField(field) else None
