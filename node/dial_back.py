"""Dials a peer back at its own addresses, so that it learns whether others can reach it.

It must not become a way to have others dialled: an address is tried only if it is public, or the very host that asks,
or private where that host is private too; each peer is served once every few seconds, and few at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable

from peerloom.node.seams import Clock
from peerloom.protocol import limits
from peerloom.protocol.errors import LimitExceeded, LinkError, PeerloomError
from peerloom.protocol.messages import DialBack
from peerloom.protocol.types import PeerId

DIAL_BACK_S = 4.0  # for one address, names resolved and the peer proven
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

Probe = Callable[[PeerId, DialBack, tuple[str, ...]], Awaitable[None]]  # proves a peer at one of them; PeerloomError


class DialBacks:
    """Serves Peer.DialBack within its limits."""

    def __init__(self, clock: Clock, probe: Probe) -> None:
        self._clock = clock
        self._probe = probe
        self._last: dict[PeerId, float] = {}
        self._running = 0

    async def serve(self, peer: PeerId, request: DialBack, host: str | None) -> tuple[str, ...]:
        """The addresses at which the peer answered; `host` is where its call comes from, None for a tunnel.

        Raises LimitExceeded when it asks too often, LinkError when too many do.
        """
        self._admit(peer)
        self._running += 1
        try:
            reached = await asyncio.gather(*(self._reaches(peer, request, each, host) for each in request.addresses))
        finally:
            self._running -= 1
        return tuple(address for address, yes in zip(request.addresses, reached, strict=True) if yes)

    def _admit(self, peer: PeerId) -> None:
        now = self._clock.monotonic()
        self._last = {each: at for each, at in self._last.items() if now - at < limits.DIAL_BACK_EVERY_S}
        if peer in self._last:
            raise LimitExceeded(f"a dial-back for one peer at most every {limits.DIAL_BACK_EVERY_S:.0f} s")
        if self._running >= limits.MAX_DIAL_BACKS:
            raise LinkError(f"busy: {limits.MAX_DIAL_BACKS} peers are just being dialled back")
        self._last[peer] = now

    async def _reaches(self, peer: PeerId, request: DialBack, address: str, host: str | None) -> bool:
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                found = await resolved(address)
                if not (found and all(may_dial(ip, host) for ip in found)):
                    return False
                await self._probe(peer, request, _to_dial(address, found))
        except (PeerloomError, TimeoutError):
            return False
        return True


def may_dial(ip: IpAddress, host: str | None) -> bool:
    """Whether an address may be dialled for one that calls from `host`."""
    if ip.is_multicast or ip.is_unspecified:
        return False
    if ip.is_global:
        return True
    try:
        caller = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return False
    if isinstance(caller, ipaddress.IPv6Address) and caller.ipv4_mapped is not None:
        caller = caller.ipv4_mapped
    return ip == caller or (ip.is_private and caller.is_private and not (ip.is_loopback or ip.is_link_local))


def _to_dial(address: str, found: Iterable[IpAddress]) -> tuple[str, ...]:
    """What a name was found to stand for: asked again, it could stand for what must not be dialled."""
    host, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return tuple(f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}" for ip in dict.fromkeys(found))
    return (address,)


async def resolved(address: str) -> list[IpAddress]:
    """All IP addresses that "host:port" stands for, none when its name does not resolve."""
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]
