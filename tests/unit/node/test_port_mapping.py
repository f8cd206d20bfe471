"""Keeping a way in through a router: renewed, given back, taken anew after a move; and routers that are of no use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from peerloom.node import port_mapping, upnp
from peerloom.node.config import NodeConfig
from peerloom.node.gateway import GatewayRefused
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.port_mapping import LEAST_RENEW_S, RENEW_S, RETRY_S, PortMapping
from peerloom.node.reaching import leg_mapping_of, port_mapping_of
from peerloom.node.upnp import UpnpGateway
from peerloom.node.virtual_time import run_virtual
from peerloom.protocol.errors import LinkError


class Router:
    """A Gateway; `taken` are outer ports of others."""

    def __init__(self, outer: str = "5.0.0.1", taken: frozenset[int] = frozenset()) -> None:
        self.outer, self.taken = outer, taken
        self.ports: dict[int, int] = {}
        self.asked = 0
        self.deaf = False
        self.most_s = 86_400.0

    async def outer_address(self) -> str:
        if self.deaf:
            raise LinkError("no answer")
        return self.outer

    async def forward(self, outer_port: int, inner_port: int, lease_s: int) -> float:
        self.asked += 1
        if outer_port in self.taken:
            raise GatewayRefused("conflict", 718)
        self.ports[outer_port] = inner_port
        return min(lease_s, self.most_s)

    async def withdraw(self, outer_port: int) -> None:
        del self.ports[outer_port]


def during(routers: list[Router], body: Callable[[PortMapping], Awaitable[None]], *, elsewhere: bool = True) -> None:
    """Runs `body` beside the job, in virtual time."""

    async def find() -> list[Any]:
        return list(routers)

    async def whole() -> None:
        made = PortMapping(lambda: 4001, random.Random(0), find, elsewhere=elsewhere)
        job = asyncio.create_task(made.run())
        try:
            await asyncio.sleep(1.0)
            await body(made)
        finally:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    run_virtual(whole)


def test_a_mapping_stands_is_renewed_and_taken_back() -> None:
    router = Router()

    async def body(made: PortMapping) -> None:
        assert made.addresses == ("5.0.0.1:4001",) and router.ports == {4001: 4001}
        router.outer = "5.0.0.9"  # it has dialled in anew
        await asyncio.sleep(RENEW_S)
        assert made.addresses == ("5.0.0.9:4001",) and router.asked == 2
        router.deaf = True
        await asyncio.sleep(RENEW_S)
        assert made.addresses == ()
        router.deaf = False
        await asyncio.sleep(RETRY_S)
        assert made.addresses == ("5.0.0.9:4001",)

    during([router], body)
    assert not router.ports


@pytest.mark.parametrize(("lease_s", "renew_s"), [(120.0, 60.0), (0.0, LEAST_RENEW_S), (600.0, RENEW_S)])
def test_a_mapping_is_renewed_within_the_lease_that_the_router_grants(lease_s: float, renew_s: float) -> None:
    router = Router()
    router.most_s = lease_s

    async def body(made: PortMapping) -> None:
        assert router.asked == 1
        await asyncio.sleep(renew_s - 2.0)
        assert router.asked == 1
        await asyncio.sleep(2.0)
        assert router.asked == 2

    during([router], body)


def test_a_port_of_anothers_is_passed_over_for_one_at_random() -> None:
    router = Router(taken=frozenset({4001}))

    async def body(made: PortMapping) -> None:
        ((outer, inner),) = router.ports.items()
        assert inner == 4001 and made.addresses == (f"5.0.0.1:{outer}",)
        await asyncio.sleep(RENEW_S)
        assert list(router.ports) == [outer], "renewed, not moved"

    during([router], body)


def test_a_relay_s_own_port_is_the_same_on_both_sides_or_not_there() -> None:
    """Its ends are told the number alone, and dial the host that libp2p knows."""
    router = Router(taken=frozenset({4001}))

    async def body(made: PortMapping) -> None:
        assert made.addresses == () and router.asked == 1
        router.taken = frozenset()
        await asyncio.sleep(RETRY_S)
        assert router.ports == {4001: 4001}

    during([router], body, elsewhere=False)
    assert leg_mapping_of(NodeConfig(), 0) is None, "a node that relays nothing has none"
    assert leg_mapping_of(NodeConfig(), 4001) is not None
    assert leg_mapping_of(NodeConfig(port_mapping=False), 4001) is None


def test_after_a_move_the_new_network_is_asked_and_the_old_address_is_void() -> None:
    routers = [Router()]

    async def body(made: PortMapping) -> None:
        routers[:] = [Router("5.0.0.2")]
        made.network_changed()
        assert made.addresses == ()
        await asyncio.sleep(port_mapping.SETTLE_S + 1.0)
        assert made.addresses == ("5.0.0.2:4001",)

    during(routers, body)


def test_a_second_router_is_asked_when_the_first_is_of_no_use() -> None:
    deaf = Router()
    deaf.deaf = True

    async def body(made: PortMapping) -> None:
        assert made.addresses == ("5.0.0.3:4001",)

    during([deaf, Router("5.0.0.3")], body)


@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ({}, True),
        ({"port_mapping": False}, False),
        ({"announce": ("host.example",)}, False),
        ({"listen": ("127.0.0.1",)}, False),
    ],
)
def test_only_a_node_that_listens_everywhere_and_announces_nothing_asks(changes: dict[str, Any], asks: bool) -> None:
    assert (port_mapping_of(NodeConfig(**changes), cast(GrpcTransport, None)) is not None) is asks


class Service:
    """What the UPnP library makes of a router's service; `answers` are results, or errors to raise."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), list[dict[str, Any]]()

    def has_action(self, name: str) -> bool:
        return True

    def action(self, name: str) -> Service:
        return self

    async def async_call(self, **arguments: Any) -> dict[str, Any]:
        self.calls.append(arguments)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


@pytest.mark.parametrize("said", ["192.168.0.2", "100.64.3.4", "", "0.0.0.0", "nonsense", "::1"])
async def test_a_router_that_is_itself_behind_one_is_of_no_use(said: str) -> None:
    with pytest.raises(LinkError, match="far side"):
        await UpnpGateway(cast(Any, Service({"NewExternalIPAddress": said})), "10.0.0.2").outer_address()


async def test_a_router_without_leases_gets_a_mapping_without_one() -> None:
    from async_upnp_client.exceptions import UpnpActionError

    refusal = UpnpActionError(error_code=725, error_desc="OnlyPermanentLeasesSupported")
    service = Service(refusal, {}, UpnpActionError(error_code=718), KeyError("odd"))
    made = UpnpGateway(cast(Any, service), "10.0.0.2")
    assert await made.forward(4001, 4001, 60) == float("inf")
    assert [call["NewLeaseDuration"] for call in service.calls] == [60, 0]
    with pytest.raises(GatewayRefused):
        await made.forward(4001, 4001, 60)
    with pytest.raises(LinkError, match="odd"):
        await made.withdraw(4001)


def test_a_router_may_name_no_other_host() -> None:
    assert upnp._is_its_own("http://192.168.1.1:5000/root.xml", "192.168.1.1")
    for location in ("http://8.8.8.8/", "https://192.168.1.1/", "http://router/", "file:///etc/passwd", "http://[", ""):
        assert not upnp._is_its_own(location, "192.168.1.1"), location


async def test_an_endless_description_is_given_up_and_another_host_not_called() -> None:
    served = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal served
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(1 << 14))
                served += 1 << 14
        except ConnectionError:
            return response

    application = web.Application()
    application.router.add_get("/root.xml", endless)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with asyncio.timeout(30.0):
            assert await upnp._described(f"http://127.0.0.1:{port}/root.xml") is None
        assert served < 64 << 20
        from async_upnp_client.const import HttpRequest

        requester = upnp._requester("http://127.0.0.2:1/root.xml")
        with pytest.raises(aiohttp.ClientError, match="another host"):
            await requester.async_http_request(HttpRequest("GET", f"http://127.0.0.1:{port}/root.xml", {}, None))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("fault", [OSError(101, "Network is unreachable"), None])
async def test_a_router_to_which_there_is_no_way_any_more_is_passed_over(
    fault: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from async_upnp_client.client_factory import UpnpFactory

    async def described(*_: object) -> object:
        return SimpleNamespace(all_services=[SimpleNamespace(service_type=f"{upnp.SERVICES[0]}1")])

    def no_way(location: str) -> str:
        if fault is not None:
            raise fault
        return "10.0.0.2"

    monkeypatch.setattr(UpnpFactory, "async_create_device", described)
    monkeypatch.setattr(upnp, "_inner_address", no_way)
    assert (await upnp._described("http://192.168.1.1/root.xml") is None) is (fault is not None)
