"""Holding a TCP port for a child that listens with SO_REUSEPORT.

p2pd sets SO_REUSEPORT, so two of them on one port would both start and share its connections at random. We bind the
port exclusively first, and only then let others with SO_REUSEPORT (our own p2pd) bind beside the held socket: a second
node's exclusive bind fails for as long as this one lives.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import socket
from pathlib import Path

from peerloom.protocol.errors import ConfigError, PortInUse

log = logging.getLogger(__name__)


class HeldPort:
    """A port bound for this process, not listened on; a context manager."""

    def __init__(self, host: str, port: int, held: socket.socket) -> None:
        self.host = host
        self.port = port
        self._socket = held

    def release(self) -> None:
        """Frees the port; safe to call twice."""
        self._socket.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold_port(host: str, port: int) -> HeldPort:
    """Binds `port` on the IP address `host` (0: a free one) and keeps it from other nodes.

    Raises PortInUse when something else has it, ConfigError when this machine cannot bind it at all.
    """
    held = bound(host, port)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return HeldPort(host, held.getsockname()[1], held)


def bound(host: str, port: int, backlog: int = 0) -> socket.socket:
    """A TCP socket bound to `port` on the IP address `host`, 0 for a free one; raises as hold_port.

    It listens where a backlog is given.
    """
    family = _family(host)
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # REUSEADDR alone passes over TIME_WAIT left by a former life, never over a live socket of another node.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
        if backlog:
            made.listen(backlog)
    except OSError as error:
        made.close()
        raise _explain(error, host, port) from error
    return made


class RememberedPorts:
    """The ports a node took when none was named, in a file of its folder: the same at the next start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ports = _read_ports(file)

    def choose(self, name: str, host: str, wanted: int) -> int:
        """`wanted`, or for 0 the remembered port if it is free, or 0; raises PortInUse when `wanted` is taken."""
        remembered = self._ports.get(name, 0)
        if wanted or not remembered:
            hold_port(host, wanted).release()
            return wanted
        try:
            hold_port(host, remembered).release()
        except PortInUse:
            log.warning("port %d, which this node had before, is in use: it takes another one", remembered)
            return 0
        except ConfigError:  # that hold_port will explain
            return 0
        return remembered

    def known(self, name: str) -> int:
        """The remembered port; 0: none."""
        return self._ports.get(name, 0)

    def remember(self, name: str, port: int) -> None:
        """Keeps what was bound; a folder that cannot be written to is no reason to stop."""
        if self._ports.get(name) == port:
            return
        self._ports[name] = port
        try:
            self._file.write_text(json.dumps(self._ports) + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("cannot write %s (%s): the next start may take other ports", self._file, error.strerror)


def _read_ports(file: Path) -> dict[str, int]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): port for name, port in found.items() if type(port) is int and 0 < port < 65_536}


def _family(host: str) -> socket.AddressFamily:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise ConfigError(
            f"cannot listen on {host!r}: it is no IP address; use one of this machine, such as 0.0.0.0 or ::"
        ) from error
    return socket.AF_INET if version == 4 else socket.AF_INET6


def _explain(error: OSError, host: str, port: int) -> PortInUse | ConfigError:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {where} is in use by another program; stop it, or choose another port (0: any free one)"
        )
    remedy = {
        errno.EADDRNOTAVAIL: "it is not an address of this machine; use 0.0.0.0, :: or one of its own",
        errno.EAFNOSUPPORT: "this machine has no such protocol; leave that address out",
        errno.EACCES: "this user may not; choose a port above 1023",
    }.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
    return ConfigError(f"cannot listen on {where}: {remedy}")
