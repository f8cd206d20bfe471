"""How a peer is dialled: its ways in their order, and what grpc is given to connect to for each."""

from __future__ import annotations

from typing import Protocol

from peerloom.protocol.dial_order import plain_order, relay_of
from peerloom.protocol.errors import LinkError
from peerloom.protocol.types import PeerRecord


class Endpoint(Protocol):
    """Where grpc connects to, and what became of it."""

    @property
    def target(self) -> str:
        """ "host:port"."""
        ...

    @property
    def relayed(self) -> bool:
        """Whether it leads through a tunnel."""
        ...

    def proven(self) -> None:
        """The peer has answered there and proven itself."""
        ...

    def failed(self) -> None:
        """It has not, or the connection broke."""
        ...

    def release(self) -> None:
        """The connection is no longer wanted."""
        ...


class Dialer(Protocol):
    """Turns a record into ways to a peer."""

    async def routes(self, peer: PeerRecord) -> tuple[str, ...]:
        """All ways, in the order of trying."""
        ...

    async def endpoint(self, peer: PeerRecord, route: str) -> Endpoint:
        """What to connect to; raises PeerError."""
        ...

    async def stop(self) -> None:
        """Ends what it has opened."""
        ...


class PlainEndpoint:
    """An address as it stands."""

    relayed = False

    def __init__(self, target: str) -> None:
        self.target = target

    def proven(self) -> None:
        """Nothing to note."""

    def failed(self) -> None:
        """Nothing to note."""

    def release(self) -> None:
        """Nothing to free."""


class PlainDialer:
    """Dials addresses and no relays."""

    async def routes(self, peer: PeerRecord) -> tuple[str, ...]:
        """The record's addresses, in RFC 8305's order."""
        return tuple(plain_order(peer.addresses))

    async def endpoint(self, peer: PeerRecord, route: str) -> Endpoint:
        """The address itself."""
        if relay_of(route) is not None:
            raise LinkError("this node opens no tunnels")
        return PlainEndpoint(route)

    async def stop(self) -> None:
        """Nothing to free."""
