"""NAT-PMP against a router on this machine that does as it is told: grants, refuses, loses answers, gets them wrong."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from peerloom.node import nat_pmp
from peerloom.node.gateway import GatewayRefused
from peerloom.node.nat_pmp import NatPmpGateway, nat_pmp_gateways
from peerloom.protocol.errors import LinkError

Answer = Callable[["Router", bytes], list[bytes]]


class Router(asyncio.DatagramProtocol):
    """RFC 6886's answers, by the layouts written out there."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.asked: list[bytes] = []
        self.leases: dict[int, tuple[int, int]] = {}  # inner port: outer port, seconds
        self.answer = answer or Router.granted

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.asked.append(data)
        for answer in self.answer(self, data):
            self.transport.sendto(answer, addr)

    def granted(self, data: bytes) -> list[bytes]:
        if data == b"\0\0":
            return [b"\0\x80\0\0" + struct.pack("!I", 77) + socket.inet_aton("5.0.0.1")]
        version, operation, _, inner, outer, lease = struct.unpack("!BBHHHI", data)
        assert (version, operation) == (0, 2)
        if lease:
            self.leases[inner] = (outer, lease)
        else:
            del self.leases[inner]
        return [struct.pack("!BBHIHHI", 0, 130, 0, 77, inner, outer, lease)]


@asynccontextmanager
async def asked(answer: Answer | None = None) -> AsyncIterator[tuple[NatPmpGateway, Router]]:
    loop = asyncio.get_running_loop()
    transport, router = await loop.create_datagram_endpoint(lambda: Router(answer), local_addr=("127.0.0.1", 0))
    try:
        yield NatPmpGateway("127.0.0.1", transport.get_extra_info("sockname")[1]), router
    finally:
        transport.close()


async def test_a_port_is_mapped_and_given_back() -> None:
    async with asked() as (gateway, router):
        assert await gateway.outer_address() == "5.0.0.1"
        assert await gateway.forward(40_000, 4001, 1200) == 1200
        assert router.leases == {4001: (40_000, 1200)}
        await gateway.withdraw(40_000)
        await gateway.withdraw(40_001)  # nobody's
        assert router.leases == {} and len(router.asked) == 3


async def test_a_shorter_lease_than_asked_for_is_told() -> None:
    def short(router: Router, data: bytes) -> list[bytes]:
        return [router.granted(data)[0][:12] + struct.pack("!I", 120)]

    async with asked(short) as (gateway, _):
        assert await gateway.forward(40_000, 4001, 1200) == 120


async def test_another_port_than_asked_for_is_no_mapping() -> None:
    def other(router: Router, data: bytes) -> list[bytes]:
        (answer,) = router.granted(data)
        return [answer if not struct.unpack("!I", data[8:])[0] else answer[:10] + struct.pack("!H", 9) + answer[12:]]

    async with asked(other) as (gateway, router):
        with pytest.raises(GatewayRefused, match="gives port 9 for 40000"):
            await gateway.forward(40_000, 4001, 1200)
        assert router.leases == {}


@pytest.mark.parametrize(("result", "said"), [(2, "not allowed"), (4, "no mapping left"), (99, "result 99")])
async def test_a_no_has_its_reason(result: int, said: str) -> None:
    async with asked(lambda router, data: [struct.pack("!BBHI", 0, 128 + data[1], result, 77)]) as (gateway, _):
        for call in (gateway.outer_address(), gateway.forward(40_000, 4001, 1200)):
            with pytest.raises(GatewayRefused, match=said) as found:
                await call
            assert found.value.code == result


async def test_a_lost_answer_is_asked_for_again_and_garbage_is_passed_over() -> None:
    def late(router: Router, data: bytes) -> list[bytes]:
        if len(router.asked) == 1:
            return []
        (answer,) = router.granted(data)
        return [b"", b"\0", bytes(12), b"\0\x82" + bytes(2000), answer[:7], answer]

    async with asked(late) as (gateway, router):
        assert await gateway.outer_address() == "5.0.0.1"
        assert len(router.asked) == 2


async def test_a_router_behind_another_or_of_another_mind_is_of_no_use() -> None:
    def inner(router: Router, data: bytes) -> list[bytes]:
        if data == b"\0\0":
            return [b"\0\x80\0\0" + bytes(4) + socket.inet_aton("192.168.1.2")]
        return [struct.pack("!BBHIHHI", 0, 130, 0, 77, 4002, 40_000, 1200)]

    async with asked(inner) as (gateway, _):
        with pytest.raises(LinkError, match="behind a further router"):
            await gateway.outer_address()
        with pytest.raises(LinkError, match="another port"):
            await gateway.forward(40_000, 4001, 1200)


async def test_nobody_there_and_nobody_who_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(LinkError, match="knows no NAT-PMP"):
        await NatPmpGateway("127.0.0.1", port).outer_address()
    monkeypatch.setattr(nat_pmp, "WAITS_S", (0.01, 0.02))
    async with asked(lambda router, data: []) as (gateway, router):
        with pytest.raises(LinkError, match="does not answer"):
            await gateway.outer_address()
        assert len(router.asked) == 2


def test_default_gateways_are_those_of_the_routing_table_by_metric(tmp_path: Path) -> None:
    def hexed(address: str) -> str:
        return f"{struct.unpack('=L', socket.inet_aton(address))[0]:08X}"

    rows = [
        ("eth0", "0.0.0.0", "192.168.1.1", "0003", 100, "0.0.0.0"),
        ("eth0", "192.168.1.0", "0.0.0.0", "0001", 0, "255.255.255.0"),
        ("wlan0", "0.0.0.0", "192.168.2.1", "0003", 50, "0.0.0.0"),
        ("wlan1", "0.0.0.0", "192.168.1.1", "0003", 200, "0.0.0.0"),
        ("ppp0", "0.0.0.0", "0.0.0.0", "0001", 0, "0.0.0.0"),  # no gateway: the link itself
        ("tun0", "0.0.0.0", "10.8.0.1", "0003", 0, "128.0.0.0"),  # half of the world
    ]
    lines = [
        f"{name}\t{hexed(to)}\t{hexed(by)}\t{flags}\t0\t0\t{metric}\t{hexed(mask)}\t0\t0\t0"
        for name, to, by, flags, metric, mask in rows
    ]
    table = tmp_path / "route"
    table.write_text("Iface\tDestination\tGateway\tFlags\n" + "\n".join(lines) + "\n", encoding="ascii")
    assert [gateway._at[0] for gateway in nat_pmp_gateways(table)] == ["192.168.2.1", "192.168.1.1"]
    assert nat_pmp_gateways(tmp_path / "none") == []
