"""Which addresses a node gives to others."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from peerloom.protocol.errors import ConfigError, InviteError
from peerloom.protocol.invite import check_host_multiaddr


def libp2p_announce(entries: Sequence[str]) -> tuple[str, ...]:
    """The multiaddrs that HOST and HOST:PORT entries stand for: without a port, since theirs is the one for calls."""
    hosts: dict[str, None] = {}
    for entry in entries:
        host, colon, tail = entry.rpartition(":")
        named = colon and tail.isdigit() and (":" not in host or host.endswith("]"))
        hosts[(host if named else entry).strip("[]")] = None
    return tuple(f"/{_protocol(host)}/{host}" for host in hosts)


def _protocol(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"


def announce_multiaddrs(announce: Sequence[str], port: int) -> tuple[str, ...]:
    """The `--announce` values as whole multiaddrs, `port` added where none is given; raises ConfigError."""
    whole = []
    for text in announce:
        given = text.strip().rstrip("/")
        try:
            whole.append(check_host_multiaddr(given if given.count("/") > 2 else f"{given}/tcp/{port}"))
        except InviteError as error:
            raise ConfigError(f"the announced address {text!r} cannot be used: {error}") from error
    return tuple(whole)


def best_first(multiaddrs: Sequence[str]) -> list[str]:
    """TCP addresses that others can dial: public ones and names, then private ones; loopback only where alone."""
    ranked = sorted((rank, address) for address in multiaddrs if (rank := _rank(address)) is not None)
    reachable = [address for rank, address in ranked if rank < _LOOPBACK]
    return reachable or [address for _, address in ranked]


_PUBLIC, _PRIVATE, _LOOPBACK = 0, 1, 2


def _rank(multiaddr: str) -> int | None:
    parts = multiaddr.split("/")[1:]
    if len(parts) != 4 or parts[2] != "tcp":
        return None
    if parts[0] not in ("ip4", "ip6"):
        return _PUBLIC
    address = ipaddress.ip_address(parts[1])
    if address.is_link_local or address.is_unspecified:
        return None
    if address.is_loopback:
        return _LOOPBACK
    return _PRIVATE if address.is_private else _PUBLIC
