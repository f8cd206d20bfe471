"""A home router that forwards ports when asked, whatever it is asked by: UPnP (upnp.py) or NAT-PMP (nat_pmp.py)."""

from __future__ import annotations

import ipaddress
from typing import Protocol

from peerloom.protocol.errors import LinkError


class Gateway(Protocol):
    """A router; each call raises LinkError with its reason."""

    async def outer_address(self) -> str:
        """Its address on the far side, if others can dial that."""
        ...

    async def forward(self, outer_port: int, inner_port: int, lease_s: int) -> float:
        """Sends what comes to `outer_port` on to `inner_port` of this machine, again or for the first time.

        Returns for how many seconds it does so.
        """
        ...

    async def withdraw(self, outer_port: int) -> None:
        """Ends that."""
        ...


class GatewayRefused(LinkError):
    """A router's no; `code` is its protocol's, None when it gave none."""

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.code = code


def outer_address_of(found: str) -> str:
    """What a router calls its address on the far side; raises LinkError where nobody can dial that."""
    try:
        public = ipaddress.IPv4Address(found).is_global
    except ValueError:
        raise LinkError(f"the router has no address on its far side ({found[:40]!r})") from None
    if not public:
        raise LinkError(f"the router's far side, {found}, is behind a further router")
    return found
