"""The services that carry a conversation: one stream each way, messages by the service's own codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from peerloom.protocol import codec
from peerloom.protocol.messages import ExchangeMessage, StreamEnd

M = TypeVar("M")


@dataclass(frozen=True, slots=True, eq=False)
class Service(Generic[M]):
    """A bidirectional call of peerloom.v1 by its `path`, /package.Service/Method; its envelope has an End, field 15.

    `encode` raises LimitExceeded; `decode` takes a peer's bytes and raises MalformedMessage or LimitExceeded.
    """

    path: str
    encode: Callable[[M | StreamEnd], bytes]
    decode: Callable[[bytes], M | StreamEnd]

    @property
    def name(self) -> str:
        """The method in small letters, for task names and sentences."""
        return self.path.rsplit("/", 1)[1].lower()


EXCHANGE: Service[ExchangeMessage] = Service(
    "/peerloom.v1.Gossip/Exchange", codec.encode_exchange, codec.decode_exchange
)
SERVICES: tuple[Service[Any], ...] = (EXCHANGE,)
