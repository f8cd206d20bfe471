"""Holding a port: taken ones are seen, p2pd may still listen on ours, another node may not have it."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from peerloom.node.p2pd import P2pDaemon, P2pdOptions, listen_multiaddrs
from peerloom.node.ports import RememberedPorts, hold_port
from peerloom.protocol.errors import ConfigError, PortInUse


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")),
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_held_port_is_refused_to_another_and_free_after(host: str) -> None:
    with hold_port(host, 0) as held:
        assert held.port > 0
        with pytest.raises(PortInUse, match=f"{held.port} is in use .* choose another port"):
            hold_port(host, held.port)
    with hold_port(host, held.port) as again:
        assert again.port == held.port


def test_another_process_cannot_hold_it() -> None:
    with hold_port("127.0.0.1", 0) as held:
        code = f"from peerloom.node.ports import hold_port; hold_port('127.0.0.1', {held.port})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"PortInUse: port 127.0.0.1:{held.port}" in done.stderr


def test_the_wildcard_collides_with_a_specific_address() -> None:
    with hold_port("127.0.0.1", 0) as held, pytest.raises(PortInUse):
        hold_port("0.0.0.0", held.port)


@pytest.mark.parametrize("reuse", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_a_listening_program_is_seen(reuse: tuple[int, ...]) -> None:
    with socket.socket() as other:
        for option in reuse:
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortInUse):
            hold_port("127.0.0.1", other.getsockname()[1])


def test_a_port_left_in_time_wait_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = server.accept()
        served.close()  # this side closes first, so TIME_WAIT stays on `port`
        assert client.recv(1) == b""
        client.close()
    with socket.socket() as plain, pytest.raises(OSError, match="in use") as caught:
        plain.bind(("127.0.0.1", port))
    assert caught.value.errno == errno.EADDRINUSE
    with hold_port("127.0.0.1", port) as held:
        assert held.port == port


@pytest.mark.parametrize(
    ("host", "port", "says"), [("203.0.113.1", 0, "not an address of this machine"), ("localhost", 0, "no IP address")]
)
def test_an_address_that_cannot_be_bound(host: str, port: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        hold_port(host, port)


@pytest.mark.parametrize("host", HOSTS)
async def test_p2pd_listens_on_the_held_port_and_guards_it(host: str) -> None:
    with hold_port(host, 0) as held:
        daemon = await P2pDaemon.start(P2pdOptions(listen=listen_multiaddrs([host], held.port)))
        try:
            assert await daemon.addresses() == list(listen_multiaddrs([host], held.port))
            reader, writer = await asyncio.open_connection(host, held.port)
            assert b"/multistream/" in await reader.read(64)
            writer.close()
            await writer.wait_closed()
            with pytest.raises(PortInUse):
                hold_port(host, held.port)
        finally:
            await daemon.stop()


def test_a_port_that_was_free_is_taken_again_at_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "ports.json"
    first = RememberedPorts(file)
    assert first.choose("dht", "127.0.0.1", 0) == 0
    with hold_port("127.0.0.1", 0) as held:
        first.remember("dht", held.port)
    assert RememberedPorts(file).choose("dht", "127.0.0.1", 0) == held.port
    assert RememberedPorts(file).choose("grpc", "127.0.0.1", 0) == 0


def test_a_remembered_port_in_use_is_passed_over_and_a_named_one_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ports = RememberedPorts(tmp_path / "ports.json")
    with hold_port("127.0.0.1", 0) as held:
        ports.remember("grpc", held.port)
        assert ports.choose("grpc", "127.0.0.1", 0) == 0
        assert str(held.port) in caplog.text
        with pytest.raises(PortInUse, match=str(held.port)):
            ports.choose("grpc", "127.0.0.1", held.port)


@pytest.mark.parametrize("text", ["", "[]", '{"dht": "1"}', '{"dht": 70000}', '{"dht": true}', "\xff"])
def test_a_file_of_ports_that_is_none_counts_for_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ports.json"
    file.write_text(text, encoding="latin-1")
    assert RememberedPorts(file).choose("dht", "127.0.0.1", 0) == 0
