"""Keeps a way in through the home router for a port of ours; p2pd keeps one for its own port itself.

What the router says is not believed: the mapped address is one more that peers dial back, and only what they reach
makes the node direct.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

from peerloom.node.gateway import Gateway, GatewayRefused
from peerloom.node.nat_pmp import nat_pmp_gateways
from peerloom.node.upnp import upnp_gateways
from peerloom.protocol.errors import LinkError

log = logging.getLogger(__name__)

LEASE_S = 1200
RENEW_S = 240.0  # a router that was restarted has forgotten; its address may be another
LEAST_RENEW_S = 10.0  # a mapping is renewed in the middle of a shorter lease, but a router is not asked more often
RETRY_S = 120.0  # with no router that forwards
SETTLE_S = 3.0  # after a change of network
WITHDRAW_S = 2.0  # at the end
PORTS_TRIED = 4  # when the router has given our port to another machine

Find = Callable[[], Awaitable[list[Gateway]]]


async def find_gateways() -> list[Gateway]:
    """Routers to ask, those first that said that they forward; raises nothing."""
    return [*await upnp_gateways(), *nat_pmp_gateways()]


class PortMapping:
    """`run` is a background job of the node, begun once its server listens; `port` tells where.

    Unless `elsewhere`, the far side's port must be the same number, for those who are told no other.
    """

    def __init__(
        self, port: Callable[[], int], rng: random.Random, find: Find = find_gateways, *, elsewhere: bool = True
    ) -> None:
        self._port = port
        self._rng = rng
        self._find = find
        self._tries = PORTS_TRIED if elsewhere else 1
        self._gateway: Gateway | None = None
        self._outer_port = 0
        self._renew_s = RENEW_S
        self._moved = asyncio.Event()
        self.addresses: tuple[str, ...] = ()  # "host:port" on the router's far side, if it forwards

    def network_changed(self) -> None:
        """The router, if there is one, is another: what was mapped is void."""
        self.addresses, self._gateway, self._outer_port = (), None, 0
        self._moved.set()

    async def run(self) -> None:
        """Until cancelled; then the mapping is taken back."""
        try:
            while True:
                mapped = await self._keep()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._renew_s if mapped else RETRY_S):
                        await self._moved.wait()
                        self._moved.clear()
                        await asyncio.sleep(SETTLE_S)
        finally:
            await self.withdraw()

    async def once(self) -> tuple[str, ...]:
        """Maps, as `run` would, until `withdraw`; returns the addresses."""
        await self._keep()
        return self.addresses

    async def _keep(self) -> bool:
        """Maps, or renews; whether it stands."""
        for gateway in [self._gateway] if self._gateway is not None else await self._find():
            try:
                host, port = await gateway.outer_address(), await self._forward(gateway)
            except LinkError as error:
                log.debug("no port mapping: %s", error)
                continue
            if self._moved.is_set():  # meanwhile
                return False
            self._stands(gateway, host, port)
            return True
        self.addresses, self._gateway = (), None
        return False

    def _stands(self, gateway: Gateway, host: str, port: int) -> None:
        found = (f"{host}:{port}",)
        if found != self.addresses:
            log.info("the router forwards %s to this node", found[0])
        self.addresses, self._gateway, self._outer_port = found, gateway, port

    async def _forward(self, gateway: Gateway) -> int:
        """The same port on both sides if the router gives it, else one at random where that is of use."""
        inner = self._port()
        wanted = [self._outer_port or inner, *(self._rng.randint(20_000, 60_000) for _ in range(self._tries - 1))]
        for port in wanted[:-1]:
            try:
                await self._ask(gateway, port, inner)
            except GatewayRefused as error:
                log.debug("port %d: %s", port, error)
            else:
                return port
        await self._ask(gateway, wanted[-1], inner)
        return wanted[-1]

    async def _ask(self, gateway: Gateway, port: int, inner: int) -> None:
        granted_s = await gateway.forward(port, inner, LEASE_S)
        self._renew_s = min(RENEW_S, max(LEAST_RENEW_S, granted_s / 2))

    async def withdraw(self) -> None:
        """Takes the mapping back, if one stands."""
        if self._gateway is None or not self.addresses:
            return
        try:
            async with asyncio.timeout(WITHDRAW_S):
                await self._gateway.withdraw(self._outer_port)
        except (LinkError, TimeoutError) as error:
            log.debug("the port mapping is left to its lease: %s", error)
