"""Where a node serves its page and metrics: the value of `--http`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

DEFAULT: Final = "auto"
FIRST_PORT: Final = 9464  # which exporters for Prometheus commonly use
OFF: Final = "none"
SERVED_AT: Final = "page, metrics and health on "  # what the log says when it is served, before the address


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to serve; `moves` when a taken port is no error but a reason to try the next."""

    host: str
    port: int
    moves: bool

    @property
    def loopback(self) -> bool:
        """Whether only this machine can ask."""
        return ipaddress.ip_address(self.host).is_loopback


def parse_endpoint(text: str) -> Endpoint | None:
    """`--http`: "none", "auto", or an IP address (in [] if v6) and a port, 0 for any; raises ValueError."""
    if text == OFF:
        return None
    if text == DEFAULT:
        return Endpoint("127.0.0.1", FIRST_PORT, moves=True)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    ipaddress.ip_address(host)
    if not (colon and port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError(text)
    return Endpoint(host, int(port), moves=False)
