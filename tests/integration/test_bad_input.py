"""What a user can get wrong, on real nodes: one clear sentence, a documented exit code, nothing lost."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerloom.node import seeds
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.failures import OK, exit_codes, explain
from peerloom.node.identity import load_or_create
from peerloom.node.seams import Clock
from peerloom.protocol.errors import (
    ClockSkew,
    ConfigError,
    DataError,
    IdentityError,
    IdentityInUse,
    InviteError,
    PeerloomError,
    PortInUse,
    RunMismatch,
    SeedUnreachable,
    SpecError,
    StorageError,
    VersionMismatch,
)
from peerloom.protocol.invite import parse_invite
from tests.helpers import Node, Swarm, run_peer, sentence, write_run
from tests.unit.node.discovery_swarm import ShiftedClock

pytestmark = pytest.mark.slow

OTHER_PEER = "12D3KooWGRUacDBgNRcV6Hd2hbhg6XvGGwQwKNXPK9mcaCVGtC1J"


def refused(kind: type[PeerloomError], *arguments: str) -> str:
    """Runs a command that must fail so, and returns its one sentence."""
    assert kind.exit_code in exit_codes()
    return sentence(run_peer(*arguments), kind.exit_code)


def local(home: Path) -> tuple[str, ...]:
    """Flags of a node on this machine only."""
    return ("--home", str(home), "--listen", "127.0.0.1", "--device", "cpu", "--threads", "1", "--log-format", "json")


def grpc_port(swarm: Swarm, name: str) -> int:
    (row,) = [row for row in swarm.status()[1]["nodes"] if row["name"] == name]
    return int(row["addresses"][0].rsplit(":", 1)[1])


@pytest.fixture
def port() -> Iterator[int]:
    """A port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


# invites


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda invite: invite[: invite.index("/p2p/")], "/p2p/PEER_ID is missing"),
        (lambda invite: invite.partition("#")[0][:-5], "is no peer id"),
        (lambda invite: invite.replace("/tcp/", "/tcp/9"), "is no port"),
        (lambda invite: invite.replace("/ip4/127.0.0.1", "/ip4/127.0.0.300"), "is no IPv4 address"),
        (lambda invite: "peer join", "it holds blanks"),
    ],
    ids=["cut", "cut peer id", "no port", "no address", "no invite"],
)
@pytest.mark.parametrize("command", ["join", "status"])
def test_an_invite_that_does_not_parse(swarm: Swarm, tmp_path: Path, change, says: str, command: str) -> None:  # type: ignore[no-untyped-def]
    invite = change(swarm.invite.replace(f"/tcp/{parse_invite(swarm.invite).port}", "/tcp/41234"))
    told = refused(InviteError, command, invite, "--home", str(tmp_path / "home"))
    assert says in told
    assert "it should look like /ip4/" in told
    assert not (tmp_path / "home").exists()


def test_a_dead_invite(tmp_path: Path, free_port: int) -> None:
    invite = f"/ip4/127.0.0.1/tcp/{free_port}/p2p/{OTHER_PEER}"
    for command in (("join", invite, *local(tmp_path / "home")), ("status", invite)):
        told = refused(SeedUnreachable, *command)
        assert f"/tcp/{free_port}/p2p/{OTHER_PEER} refused the connection" in told
        assert "ask for a fresh invite" in told


def test_an_invite_to_a_port_that_is_not_libp2ps(swarm: Swarm, tmp_path: Path) -> None:
    invite = f"/ip4/127.0.0.1/tcp/{grpc_port(swarm, 'seed')}/p2p/{parse_invite(swarm.invite).peer_id}"
    told = refused(SeedUnreachable, "join", invite, *local(tmp_path / "home"))
    assert "listens, but is no libp2p node" in told or "did not answer" in told
    assert "ask for a fresh invite" in told


def test_an_invite_with_the_peer_id_of_another(swarm: Swarm, tmp_path: Path) -> None:
    invite = swarm.invite.replace(parse_invite(swarm.invite).peer_id, OTHER_PEER)
    told = refused(SeedUnreachable, "join", invite, *local(tmp_path / "home"))
    assert "its peer id is not the invite's" in told


def test_an_invite_of_another_run(swarm: Swarm, tmp_path: Path) -> None:
    invite = swarm.invite.partition("#")[0] + "#0123456789abcdef"
    told = refused(RunMismatch, "join", invite, *local(tmp_path / "home"))
    assert "0123456789abcdef" in told and str(parse_invite(swarm.invite).run_id) in told
    assert "ask for a fresh invite" in told


def test_a_run_file_of_another_run(swarm: Swarm, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", local_steps=7)
    told = refused(RunMismatch, "join", swarm.invite, "--run", str(other), *local(tmp_path / "home"))
    assert str(parse_invite(swarm.invite).run_id) in told
    assert "use one run's" in told


# ports


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_of_another_program(tmp_path: Path, port: int, flag: str) -> None:
    told = refused(PortInUse, "bootstrap", *local(tmp_path / "home"), flag, str(port))
    assert f"127.0.0.1:{port}" in told and "another" in told


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_of_another_node(swarm: Swarm, tmp_path: Path, flag: str) -> None:
    taken = parse_invite(swarm.invite).port if flag == "--port" else grpc_port(swarm, "seed")
    told = refused(PortInUse, "bootstrap", *local(tmp_path / "home"), flag, str(taken))
    assert str(taken) in told
    assert swarm.nodes["seed"].running


# identity


@pytest.mark.parametrize(
    ("data", "mode", "says"),
    [
        (None, 0o000, "chmod 600"),
        (None, 0o644, "is open to other users"),
        (b"-----BEGIN PRIVATE KEY-----\n", 0o600, "is not a libp2p Ed25519 key"),
        (b"", 0o600, "is empty"),
    ],
    ids=["unreadable", "world-readable", "not a key", "empty"],
)
def test_an_identity_file_that_cannot_be_used(tmp_path: Path, data: bytes | None, mode: int, says: str) -> None:
    file = tmp_path / "home" / "identity.key"
    load_or_create(file)
    if data is not None:
        file.write_bytes(data)
    before = file.read_bytes()
    file.chmod(mode)
    told = refused(IdentityError, "join", *local(tmp_path / "home"))
    assert str(file) in told and says in told
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (before, mode)


def test_the_same_home_twice(swarm: Swarm) -> None:
    seed = swarm.nodes["seed"]
    told = refused(IdentityInUse, "join", swarm.invite, *local(seed.home))
    assert str(seed.home / "identity.key") in told and f"in use by process {seed.pid}" in told


def test_a_copied_identity_while_its_owner_lives(swarm: Swarm, tmp_path: Path) -> None:
    (owner,) = swarm.trainers("a")
    home = tmp_path / "copy"
    home.mkdir(mode=0o700)
    shutil.copy2(owner.home / "identity.key", home)
    text = str(swarm.run_file.parent / "text")
    told = refused(IdentityInUse, "join", swarm.invite, "--data", text, *local(home))
    assert "'a'" in told and "--home" in told
    owner.wait_for_rounds(2)


# spec, settings and data


def test_a_spec_with_bad_values(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.write_text(run.read_text().replace("batch_size = 2", "batch_size = 0").replace("layers = 1", "layer = 1"))
    told = refused(SpecError, "bootstrap", "--run", str(run), *local(tmp_path / "home"))
    assert "train.batch_size" in told and "from 1 to" in told
    assert "layer" in told
    assert not (tmp_path / "home").exists()


def test_a_bad_setting(tmp_path: Path) -> None:
    told = sentence(run_peer("bootstrap", *local(tmp_path / "home"), PEER_PORT="99999"), ConfigError.exit_code)
    assert "PEER_PORT" in told and "65535" in told


@pytest.mark.parametrize("content", [None, "a few words"], ids=["missing", "too little"])
def test_a_data_path_with_no_text(tmp_path: Path, content: str | None) -> None:
    run = write_run(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "text")
    if content is not None:
        (tmp_path / "run" / "text").mkdir()
        (tmp_path / "run" / "text" / "a.txt").write_text(content)
    told = refused(DataError, "join", "--run", str(run), *local(tmp_path / "home"))
    assert str(tmp_path / "run" / "text") in told


# disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode:
        pytest.skip(f"a file system of its own needs the right to mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> Path:
    """Leaves not a byte free."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


def test_a_read_only_home(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    told = refused(StorageError, "bootstrap", *local(disk / "home"))
    assert str(disk) in told and "read-only" in told and "--home" in told


def test_a_home_in_the_way_of_which_a_file_stands(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    told = refused(StorageError, "bootstrap", *local(tmp_path / "home"))
    assert "a file stands where a folder is needed" in told and "--home" in told


def test_a_full_disk_at_the_start(disk: Path) -> None:
    fill(disk)
    told = refused(StorageError, "bootstrap", *local(disk / "home"))
    assert str(disk) in told and "the disk is full; free some space" in told


def test_a_disk_that_fills_up_stops_nobody(swarm: Swarm, disk: Path) -> None:
    home, text = disk / "filled", str(swarm.run_file.parent / "text")
    node = Node(home, "join", swarm.invite, "--data", text, **swarm.variables)
    try:
        node.wait_for("three checkpoints", lambda: (home / "runs").exists() and len(node.checkpoints()) >= 3)
        fill(disk)  # its log and its metrics.jsonl lie there too
        for _ in range(2):  # each on the room of the oldest one
            saved = node.checkpoints()[-1]
            node.wait_for("a newer checkpoint", lambda saved=saved: node.checkpoints()[-1] > saved)
        assert node.end() == OK
        assert "Traceback" not in node.said()
    finally:
        node.destroy()


# clocks and versions


async def join_with(swarm: Swarm, folder: Path, clock: Clock) -> PeerloomError:
    """Joins as a node with this clock would, and returns what stops it."""
    file = folder / "identity.key"
    with pytest.raises(PeerloomError) as caught:
        await DhtDiscovery.create(
            identity=load_or_create(file),
            identity_path=file,
            seeds=[parse_invite(swarm.invite)],
            host="127.0.0.1",
            clock=clock,
        )
    return caught.value


@pytest.mark.parametrize(("shift", "says"), [(5.0, "5.0 s ahead of"), (-5.0, "5.0 s behind")])
async def test_a_clock_that_is_off(swarm: Swarm, tmp_path: Path, shift: float, says: str) -> None:
    code, told = explain(await join_with(swarm, tmp_path, ShiftedClock(shift)))
    assert code == ClockSkew.exit_code
    assert says in told and "timedatectl set-ntp true" in told


async def test_a_swarm_of_another_version(swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "PROTOCOL_MIN", 2)
    monkeypatch.setattr(seeds, "PROTOCOL_MAX", 3)
    code, told = explain(await join_with(swarm, tmp_path, ShiftedClock()))
    assert code == VersionMismatch.exit_code
    assert "speaks protocol 1 to 1" in told and "this node 2 to 3" in told and "install the same version" in told
