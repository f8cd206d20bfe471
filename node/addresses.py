"""From what a socket is bound to, to what a peer can dial."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

import psutil

from peerloom.protocol.limits import MAX_ADDRESSES

WILDCARDS = ("0.0.0.0", "::", "")
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def join(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def announced(entry: str, port: int) -> str:
    """What the user says peers should dial, with the bound port where it names none."""
    host = host_of(entry)
    return entry if host != entry else join(entry.strip("[]"), port)


def host_of(entry: str) -> str:
    """HOST of HOST:PORT or [IPV6]:PORT, and of HOST itself."""
    host, colon, tail = entry.rpartition(":")
    names_port = colon and tail.isdigit() and (":" not in host or host.endswith("]"))
    return host if names_port else entry


def dialable(bound: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """The addresses to publish, best first: a wildcard stands for every address of this machine's own interfaces."""
    found: dict[str, None] = {}
    for host, port in bound:
        for each in interface_addresses() if host in WILDCARDS else (host,):
            found[join(each, port)] = None
    return tuple(found)[:MAX_ADDRESSES]


def interface_addresses() -> tuple[str, ...]:
    """Addresses of the interfaces that are up: public before private, IPv4 before IPv6; loopback only if alone."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    texts = [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return best_first(texts)


def best_first(texts: Sequence[str]) -> tuple[str, ...]:
    """Drops what no other machine can dial (link-local, multicast, unspecified) and sorts the rest."""
    parsed = [ipaddress.ip_address(text) for text in texts if "%" not in text]
    usable = [ip for ip in parsed if not (ip.is_link_local or ip.is_multicast or ip.is_unspecified)]
    outside = [ip for ip in usable if not ip.is_loopback]
    return tuple(str(ip) for ip in sorted(outside or usable, key=_rank))


def _rank(ip: IpAddress) -> tuple[bool, int]:
    return (not ip.is_global, ip.version)
