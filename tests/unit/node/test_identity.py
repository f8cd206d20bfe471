"""The identity file: made once, kept, refused when it cannot be trusted; the same peer id as libp2p's."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from peerloom.node.identity import Identity, load_or_create, lock_identity, public_key_of, verify
from peerloom.node.p2pd import P2pDaemon, P2pdOptions
from peerloom.protocol.errors import IdentityError, IdentityInUse
from peerloom.protocol.peer_id import peer_id_of
from peerloom.protocol.types import PeerId


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_made_once_and_loaded_after(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "identity.key"
    identity = load_or_create(path)
    before = path.read_bytes()
    assert load_or_create(path).peer_id == identity.peer_id
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "deep" / "er").stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["identity.key"]


def test_known_vector_of_libp2p(tmp_path: Path) -> None:
    # libp2p specs, peer-ids/peer-ids.md, "Test vectors": the Ed25519 private and public key.
    private = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    identity = load_or_create(write(tmp_path / "identity.key", private))
    assert public_key_of(identity.peer_id) == identity.public_bytes
    assert identity.public_bytes.hex() == "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    assert identity.to_file_bytes() == private


def test_signs_and_verifies() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(b"data")
    assert verify(identity.peer_id, b"data", signature)
    assert not verify(identity.peer_id, b"Data", signature)
    assert not verify(other.peer_id, b"data", signature)
    assert not verify(identity.peer_id, b"data", signature[:-1])
    assert not verify(identity.peer_id, b"data", b"")
    for nobody in ("", "12D3Koo", "0OIl", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "1" * 10_000):
        assert not verify(PeerId(nobody), b"data", signature)


def test_what_more_than_one_signature_would_fit_is_none() -> None:
    """A second form of a signature, a key under which anything is signed, a byte moved from one to the other."""
    identity = Identity.generate()
    signature = identity.sign(b"data")
    order = 2**252 + 27742317777372353535851937790883648493
    second = int.from_bytes(signature[32:], "little") + order
    assert not verify(identity.peer_id, b"data", signature[:32] + second.to_bytes(32, "little"))
    neutral = b"\1" + bytes(31)
    assert not verify(peer_id_of(neutral), b"data", neutral + bytes(32))
    assert not verify(identity.peer_id, signature[-1:] + b"data", signature[:-1])


def test_a_private_key_is_in_no_text_about_it() -> None:
    identity = Identity.generate()
    assert repr(identity) == f"Identity({identity.peer_id})"


KEY = Identity.generate().to_file_bytes()


@pytest.mark.parametrize(
    ("data", "mode", "says"),
    [
        (KEY, 0o644, "open to other users .*chmod 600"),
        (KEY, 0o640, "open to other users .*chmod 600"),
        (KEY, 0o602, "open to other users .*chmod 600"),
        (KEY, 0o200, "cannot read .*chmod 600"),
        (b"", 0o600, "is empty"),
        (b"hello", 0o600, "is not a libp2p Ed25519 key"),
        (KEY[:-1], 0o600, "is not a libp2p Ed25519 key"),
        (KEY + b"\n", 0o600, "is not a libp2p Ed25519 key"),
        (KEY[:-32] + bytes(32), 0o600, "do not belong together"),
        (b"\x08\x00\x12\x80\x10" + bytes(1200), 0o600, "RSA key"),
        (b"-----BEGIN PRIVATE KEY-----\n" * 2000, 0o600, "is not a libp2p Ed25519 key"),
    ],
    ids=["readable", "group", "writable", "unreadable", "empty", "text", "short", "long", "halves", "RSA", "PEM"],
)
def test_a_file_that_cannot_be_used_is_named_and_left_alone(tmp_path: Path, data: bytes, mode: int, says: str) -> None:
    path = write(tmp_path / "identity.key", data, mode)
    with pytest.raises(IdentityError, match=says) as caught:
        load_or_create(path)
    assert str(path) in str(caught.value)
    path.chmod(0o600)
    assert path.read_bytes() == data


def test_a_folder_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="is a folder"):
        load_or_create(tmp_path)


def test_a_pipe_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises(IdentityError, match="not a regular file"):
        load_or_create(path)


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "file", b"x")
    with pytest.raises(IdentityError, match="cannot (create|read) the identity file"):
        load_or_create(tmp_path / "file" / "identity.key")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(IdentityError, match="make its folder writable"):
        load_or_create(tmp_path / "identity.key")


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(IdentityError, match=os.strerror(code)):
        load_or_create(tmp_path / "identity.key")
    assert os.listdir(tmp_path) == []


def test_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "identity.key"
    assert load_or_create(path).peer_id == load_or_create(path).peer_id
    assert os.listdir(tmp_path) == ["identity.key"]


def test_racing_starts_agree_on_one_key(tmp_path: Path) -> None:
    barrier, peers = threading.Barrier(8), []

    def start() -> None:
        barrier.wait()
        peers.append(load_or_create(tmp_path / "identity.key").peer_id)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(peers) == 8 and len(set(peers)) == 1


def test_the_lock_names_the_other_process(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    with lock_identity(path):
        code = f"from pathlib import Path; from peerloom.node.identity import *; lock_identity(Path({str(path)!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert f"IdentityInUse: the identity {path} is in use by process {os.getpid()};" in done.stderr
        with pytest.raises(IdentityInUse):
            lock_identity(path)
    with lock_identity(path):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    code = (
        "import sys; from pathlib import Path; from peerloom.node.identity import *;"
        f"held = lock_identity(Path({str(path)!r})); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(IdentityInUse, match=f"process {child.pid};"):
            lock_identity(path)
        child.kill()
    with lock_identity(path):
        pass


def test_no_lock_where_no_file_can_be_made(tmp_path: Path) -> None:
    write(tmp_path / "file", b"x")
    with pytest.raises(IdentityError, match="cannot open the lock file"):
        lock_identity(tmp_path / "file" / "identity.key")


def test_importing_it_brings_in_no_heavy_module() -> None:
    code = "import sys, peerloom.node.identity; print(sorted({'torch', 'hivemind', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


async def test_p2pd_computes_the_same_peer_id(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    identity = load_or_create(path)
    daemon = await P2pDaemon.start(P2pdOptions(listen=("/ip4/127.0.0.1/tcp/0",), identity_path=path))
    try:
        assert str(daemon.p2p.peer_id) == identity.peer_id
    finally:
        await daemon.stop()
