"""Invites: the one line a joiner pastes, `/ip4/1.2.3.4/tcp/4001/p2p/12D3Koo…[#run_id]`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from peerloom.protocol.errors import InviteError
from peerloom.protocol.peer_id import public_key_of
from peerloom.protocol.types import PeerId, RunId

_HOSTS = ("ip4", "ip6", "dns4", "dns6", "dns")
_EXAMPLE = "/ip4/203.0.113.5/tcp/4001/p2p/12D3Koo…#0123456789abcdef"
_MAX_CHARS = 512
_QUOTES = "\"'`“”‘’«»<>"
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
_RUN_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Invite:
    """A seed to dial and, when its line says so, the run to join; `host_multiaddr` is `/ip4/1.2.3.4/tcp/4001`."""

    host_multiaddr: str
    peer_id: PeerId
    run_id: RunId | None = None

    @property
    def protocol(self) -> str:
        """How `host` is to be read: ip4, ip6, dns4, dns6 or dns."""
        return self.host_multiaddr.split("/")[1]

    @property
    def host(self) -> str:
        """The address or name to dial."""
        return self.host_multiaddr.split("/")[2]

    @property
    def port(self) -> int:
        """The TCP port to dial."""
        return int(self.host_multiaddr.split("/")[4])

    @property
    def multiaddr(self) -> str:
        """The line without the run id, as libp2p reads it."""
        return f"{self.host_multiaddr}/p2p/{self.peer_id}"

    def __str__(self) -> str:
        return self.multiaddr + (f"#{self.run_id}" if self.run_id else "")


def parse_invite(text: str) -> Invite:
    """Reads one invite, blanks around it ignored; raises InviteError that names what is wrong and shows the form."""
    text = text.strip()
    _check_line(text)
    address, hash_sign, run = text.partition("#")
    parts = address.split("/")[1:]
    if hash_sign and not _RUN_ID.fullmatch(run):
        raise _wrong(text, f"{run!r} after # is no run id, which is 16 digits of 0-9 and a-f")
    if len(parts) < 2 or not parts[1]:
        raise _wrong(text, "it is cut off: no address follows")
    host = _check_host(text, parts[0], parts[1])
    port = _check_port(text, parts[2:4])
    peer_id = _check_peer(text, parts[4:])
    return Invite(f"/{parts[0]}/{host}/tcp/{port}", peer_id, RunId(run) if run else None)


def check_host_multiaddr(text: str) -> str:
    """`/ip4/1.2.3.4/tcp/4001` and its like, without a peer id; raises InviteError."""
    _check_line(text)
    parts = text.split("/")[1:]
    if len(parts) < 2 or not parts[1]:
        raise _wrong(text, "it is cut off: no address follows")
    host, port = _check_host(text, parts[0], parts[1]), _check_port(text, parts[2:4])
    if len(parts) > 4:
        raise _wrong(text, f"/{parts[4]} follows the port, where it should end")
    return f"/{parts[0]}/{host}/tcp/{port}"


def _wrong(text: str, what: str) -> InviteError:
    shown = text if len(text) <= 120 else text[:119] + "…"
    printable = "".join(char if char.isprintable() else "?" for char in shown)
    return InviteError(f"the invite {printable} is wrong: {what}; it should look like {_EXAMPLE}")


def _check_line(text: str) -> None:
    if not text:
        raise InviteError(f"the invite is empty; it should look like {_EXAMPLE}")
    if len(text) > _MAX_CHARS:
        raise _wrong(text, f"it has {len(text)} characters; paste one invite only")
    if any(quote in text for quote in _QUOTES):
        raise _wrong(text, "it holds quotes or brackets; paste it without them")
    if any(char.isspace() or not char.isprintable() for char in text):
        raise _wrong(text, "it holds blanks or line breaks; paste one invite, in one piece")
    if not text.startswith("/"):
        raise _wrong(text, "it does not begin with /; paste the line that the other node printed after \"peer join\"")
    if text[1:].split("/")[0] not in _HOSTS:
        raise _wrong(text, f"it does not begin with one of {', '.join('/' + host for host in _HOSTS)}")


def _check_host(text: str, protocol: str, host: str) -> str:
    try:
        if protocol == "ip4":
            return str(ipaddress.IPv4Address(host))
        if protocol == "ip6":
            if "%" in host:
                raise ValueError("a zone means nothing on another machine")
            return str(ipaddress.IPv6Address(host))
    except ValueError as error:
        raise _wrong(text, f"{host} is no IPv{protocol[2]} address") from error
    if "_" in host:  # a container's name may have one; libp2p's reader of addresses knows none
        raise _wrong(text, f"{host} cannot be dialled, since it has a _ in it; give the address, or a name without one")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in host.rstrip(".").split(".")):
        raise _wrong(text, f"{host} is no host name")
    return host


def _check_port(text: str, parts: list[str]) -> int:
    if not parts or parts == [""]:
        raise _wrong(text, "it is cut off: /tcp/PORT is missing")
    if parts[0] != "tcp":
        raise _wrong(text, f"/tcp/PORT is expected after the address, not /{parts[0]}")
    if len(parts) < 2 or not parts[1]:
        raise _wrong(text, "it is cut off: the port is missing")
    if not re.fullmatch(r"[0-9]{1,5}", parts[1]) or not 1 <= int(parts[1]) <= 65535:
        raise _wrong(text, f"{parts[1]} is no port, which is 1 to 65535")
    return int(parts[1])


def _check_peer(text: str, parts: list[str]) -> PeerId:
    if not parts or parts == [""]:
        raise _wrong(text, "/p2p/PEER_ID is missing at its end")
    if parts[0] != "p2p":
        raise _wrong(text, f"/p2p/PEER_ID is expected after the port, not /{parts[0]}")
    if len(parts) < 2 or not parts[1]:
        raise _wrong(text, "it is cut off: the peer id is missing")
    if len(parts) > 2:
        raise _wrong(text, f"/{parts[2]} follows the peer id, where it should end")
    try:
        public_key_of(PeerId(parts[1]))
    except ValueError as error:
        raise _wrong(text, f"{parts[1]} is no peer id: {error}") from error
    return PeerId(parts[1])
