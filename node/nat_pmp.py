"""A home router that forwards TCP ports by NAT-PMP (RFC 6886): a datagram asks the default gateway, another answers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from peerloom.node.gateway import GatewayRefused, outer_address_of
from peerloom.protocol.errors import LinkError

log = logging.getLogger(__name__)

PORT = 5351
WAITS_S = (0.25, 0.5, 1.0, 2.0)  # for an answer, before the question is put again; RFC 6886, 3.1, goes on to 64 s
ADDRESS, TCP = 0, 2  # operations; an answer's is ANSWER more
ANSWER = 128
ADDRESS_ANSWER = struct.Struct("!BBHI4s")  # version, operation, result, seconds since the router's start, address
QUESTION = struct.Struct("!BBHHHI")  # version, operation, 0, inner port, outer port, lease in seconds
MAPPED = struct.Struct("!BBHIHHI")  # as ADDRESS_ANSWER to the seconds, then inner port, outer port, lease
RESULTS = {
    1: "another version of NAT-PMP", 2: "not allowed", 3: "it has no network itself", 4: "no mapping left",
    5: "it maps no ports",
}  # fmt: skip
ROUTES = Path("/proc/net/route")
HAS_GATEWAY = 2  # a route's flag


class NatPmpGateway:
    """A Gateway over NAT-PMP at `router`, an IPv4 address."""

    def __init__(self, router: str, port: int = PORT) -> None:
        self._at = (router, port)
        self._inner: dict[int, int] = {}  # by outer port: a mapping is ended by its inner one

    async def outer_address(self) -> str:
        """Its address on the far side; raises LinkError for one behind a further router."""
        answer = await self._ask(struct.pack("!BB", 0, ADDRESS), ADDRESS_ANSWER.size)
        return outer_address_of(str(ipaddress.IPv4Address(ADDRESS_ANSWER.unpack(answer)[-1])))

    async def forward(self, outer_port: int, inner_port: int, lease_s: int) -> float:
        """Raises GatewayRefused too where the router gives another port: that mapping is ended again."""
        given, granted_s = await self._map(inner_port, outer_port, lease_s)
        if given != outer_port:
            await self._map(inner_port, 0, 0)
            raise GatewayRefused(f"the router gives port {given} for {outer_port}", None)
        self._inner[outer_port] = inner_port
        return granted_s

    async def withdraw(self, outer_port: int) -> None:
        """Ends a mapping."""
        if outer_port in self._inner:
            await self._map(self._inner.pop(outer_port), 0, 0)

    async def _map(self, inner_port: int, outer_port: int, lease_s: int) -> tuple[int, int]:
        """The outer port that the router gave, and for how many seconds."""
        answer = await self._ask(QUESTION.pack(0, TCP, 0, inner_port, outer_port, lease_s), MAPPED.size)
        *_, inner, outer, granted_s = MAPPED.unpack(answer)
        if inner != inner_port:
            raise LinkError("the router answers for another port")
        return int(outer), int(granted_s)

    async def _ask(self, question: bytes, size: int) -> bytes:
        """The first `size` bytes of an answer to `question` that grants it."""
        loop = asyncio.get_running_loop()
        try:  # connected: the kernel drops what others send
            transport, protocol = await loop.create_datagram_endpoint(_Answers, remote_addr=self._at)
        except OSError as error:
            raise LinkError(f"no way to {self._at[0]}: {error}") from error
        try:
            for wait_s in WAITS_S:
                transport.sendto(question)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        return await _granted(protocol.queue, question[1], size)
        finally:
            transport.close()
        raise LinkError(f"{self._at[0]} does not answer NAT-PMP")


class _Answers(asyncio.DatagramProtocol):
    """Keeps a few datagrams, and the error that stands for a closed port."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | OSError] = asyncio.Queue(16)

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._keep(data[: MAPPED.size])

    def error_received(self, exc: Exception) -> None:
        self._keep(cast(OSError, exc))

    def _keep(self, found: bytes | OSError) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self.queue.put_nowait(found)


async def _granted(queue: asyncio.Queue[bytes | OSError], operation: int, size: int) -> bytes:
    """Waits past what is no answer to `operation`; raises GatewayRefused for a no."""
    while True:
        found = await queue.get()
        if isinstance(found, OSError):
            raise LinkError(f"the router knows no NAT-PMP: {found}") from found
        if len(found) < 4 or found[1] != ANSWER + operation:
            continue
        (result,) = struct.unpack_from("!H", found, 2)
        if result:
            raise GatewayRefused(f"the router refuses: {RESULTS.get(result, f'result {result}')}", result)
        if len(found) >= size:
            return found[:size]


def nat_pmp_gateways(routes: Path = ROUTES) -> list[NatPmpGateway]:
    """This machine's default gateways, which may or may not know NAT-PMP; none where they are not told (not Linux)."""
    try:
        lines = routes.read_text(encoding="ascii").splitlines()[1:]
    except OSError as error:
        log.debug("no default gateway is known: %s", error)
        return []
    return [NatPmpGateway(router) for router in dict.fromkeys(_default_routers(lines))]


def _default_routers(lines: list[str]) -> Iterator[str]:
    """The routers of the routes to anywhere, of the lowest metric first; addresses are in the machine's byte order."""
    found = [line.split() for line in lines]
    ways = [way for way in found if way[1] == way[7] == "00000000" and int(way[3], 16) & HAS_GATEWAY]
    for way in sorted(ways, key=lambda way: int(way[6])):
        yield socket.inet_ntoa(struct.pack("=L", int(way[2], 16)))
