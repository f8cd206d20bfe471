"""The libp2p daemon's sockets: where temporary files are to be, and none left by whoever was killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from peerloom.node.p2pd import (
    SOCKET_NAME_BYTES,
    SOCKETS,
    P2pDaemon,
    P2pdOptions,
    load_hivemind,
    remove_dead_sockets,
    socket_folder,
)
from peerloom.protocol.errors import LinkError
from peerloom.protocol.peer_id import peer_id_of
from peerloom.protocol.types import PeerId
from tests.helpers import swarm_folder


def bound(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def test_sockets_of_processes_that_are_gone_are_removed_and_no_others() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with swarm_folder() as folder:
        dead, served = (folder / f"{SOCKETS}{gone.pid}-{name}.sock" for name in ("dead", "served"))
        others = [folder / f"{SOCKETS}{os.getpid()}-own.sock", folder / f"{SOCKETS}x-y.sock", folder / "other.sock"]
        for path in (dead, *others):
            bound(path).close()
        with bound(served) as listening:  # by a process of another container, say
            listening.listen()
            remove_dead_sockets(folder)
            assert not dead.exists() and served.exists() and all(path.exists() for path in others)


@pytest.mark.parametrize(("length", "used"), [(51, True), (52, False)])
def test_a_folder_whose_name_leaves_no_room_for_a_sockets_is_not_used(
    length: int, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "/" + "x" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert socket_folder() == Path(folder if used else "/tmp")


async def test_all_sockets_lie_with_the_temporary_files_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm_folder() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        daemon = await P2pDaemon.start(P2pdOptions())
        try:
            await daemon.p2p.add_binary_stream_handler("/none/1", _ignore)  # for which hivemind listens
            made = list(folder.glob(f"{SOCKETS}{os.getpid()}-*.sock"))
            assert len(made) == 2
            spare = 10 - len(str(os.getpid()))
            assert max(len(path.name) for path in made) + spare + 1 <= SOCKET_NAME_BYTES
        finally:
            await daemon.stop()
        assert not list(folder.glob("*.sock"))


@pytest.mark.parametrize(
    ("peer", "multiaddr"),
    [
        (peer_id_of(bytes(32)), "/dns4/a_b/tcp/80"),
        (peer_id_of(bytes(32)), "/ip4/1.2.3.4/tcp"),
        ("0OIl", "/ip4/1.2.3.4/tcp/80"),
    ],
)
async def test_what_libp2p_cannot_read_is_a_peer_that_cannot_be_dialled(peer: str, multiaddr: str) -> None:
    load_hivemind()
    with pytest.raises(LinkError, match="cannot be dialled"):
        await P2pDaemon.connect(P2pDaemon.__new__(P2pDaemon), PeerId(peer), multiaddr, 1.0)


async def _ignore(*_: object) -> None: ...
