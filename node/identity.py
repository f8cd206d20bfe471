"""The node's identity: one Ed25519 key in libp2p's private key file format, and the peer id that follows from it.

A peer id is the base58 of an identity multihash over the public key (libp2p specs, peer-ids.md), so anyone who knows
the id can verify what its owner signed. p2pd reads the same file, which is how the DHT and gRPC share one identity.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.bindings import crypto_sign_BYTES, crypto_sign_open
from nacl.exceptions import BadSignatureError

from peerloom.protocol.errors import IdentityError, IdentityInUse
from peerloom.protocol.peer_id import KEY_BYTES, peer_id_of, public_key_of
from peerloom.protocol.types import PeerId

__all__ = ["Identity", "IdentityLock", "load_or_create", "lock_identity", "public_key_of", "verify"]

# libp2p crypto.proto, PrivateKey{Type: Ed25519 (1), Data: private || public}: field 1 varint, field 2 of 64 bytes.
_PRIVATE_PREFIX = b"\x08\x01\x12\x40"
_FILE_BYTES = len(_PRIVATE_PREFIX) + 2 * KEY_BYTES
_RSA_TYPE = b"\x08\x00"
_MAX_FILE_BYTES = 1 << 14  # an RSA key of 16384 bits fits; what is longer is no key
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Identity:
    """A private key and its peer id."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public = key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self._public)

    @classmethod
    def generate(cls) -> Identity:
        """A new random identity, on no disk yet."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def public_bytes(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self._public

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature, 64 bytes; callers put a domain in front of `data`."""
        return self._key.sign(data)

    def to_file_bytes(self) -> bytes:
        """The key in libp2p's format: what the identity file holds. Secret."""
        return _PRIVATE_PREFIX + self._key.private_bytes_raw() + self._public

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(peer_id: PeerId, data: bytes, signature: bytes) -> bool:
    """Whether the owner of `peer_id` signed `data`; False for a peer id that is none.

    By libsodium, in less than half the time of OpenSSL: a node that floods does little else.
    """
    if len(signature) != crypto_sign_BYTES:
        return False  # else bytes of one could be taken for the other's
    try:
        crypto_sign_open(signature + data, public_key_of(peer_id))
    except (BadSignatureError, ValueError):
        return False
    return True


def load_or_create(path: Path) -> Identity:
    """Loads the identity file, or makes it (mode 0600) where there is none; never overwrites.

    Raises IdentityError with the remedy when the file or its folder cannot be used.
    """
    try:
        return _load(path)
    except FileNotFoundError:
        return _create(path)


def _load(path: Path) -> Identity:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us up
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    try:
        _check_kind_and_mode(path, os.fstat(descriptor))
        data = os.read(descriptor, _MAX_FILE_BYTES)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    finally:
        os.close(descriptor)
    return _parse(path, data)


def _unreadable(path: Path, why: str | None) -> IdentityError:
    return IdentityError(
        f"cannot read the identity file {path} ({why}); make it readable for this user alone: chmod 600 {path}"
    )


def _check_kind_and_mode(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IdentityError(f"the identity file {path} is a folder; name a file inside it instead")
    if not stat.S_ISREG(status.st_mode):
        raise IdentityError(f"the identity file {path} is not a regular file; name another path")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise IdentityError(
            f"the identity file {path} is open to other users (mode {mode:04o}); close it: chmod 600 {path}"
        )
    if not mode & 0o400:
        raise _unreadable(path, f"mode {mode:04o}")


def _parse(path: Path, data: bytes) -> Identity:
    remedy = f"restore it from a copy, or move {path} away to start with a new identity"
    if not data:
        raise IdentityError(f"the identity file {path} is empty; {remedy}")
    if data.startswith(_RSA_TYPE):
        raise IdentityError(f"the identity file {path} holds an RSA key, and peerloom needs an Ed25519 one; {remedy}")
    if len(data) != _FILE_BYTES or not data.startswith(_PRIVATE_PREFIX):
        raise IdentityError(f"the identity file {path} is not a libp2p Ed25519 key; {remedy}")
    private = data[len(_PRIVATE_PREFIX) :][:KEY_BYTES]
    identity = Identity(Ed25519PrivateKey.from_private_bytes(private))
    if identity.public_bytes != data[-KEY_BYTES:]:
        raise IdentityError(f"the identity file {path} is damaged: its two halves do not belong together; {remedy}")
    return identity


def _create(path: Path) -> Identity:
    identity = Identity.generate()
    try:
        make_private_folder(path.parent)
        _write_new(path, identity.to_file_bytes())
    except FileExistsError:  # another process was first: its key is the identity
        return _load(path)
    except OSError as error:
        raise IdentityError(
            f"cannot create the identity file {path} ({error.strerror}); "
            "make its folder writable, or name an identity file in another one"
        ) from error
    return identity


def make_private_folder(folder: Path) -> None:
    """Makes `folder` and its missing parents with mode 0700; leaves existing ones as they are."""
    if folder.is_dir():
        return
    make_private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder") from None


def _write_new(path: Path, data: bytes) -> None:
    """Whole or not at all, and never over an existing file: a temporary file, hard-linked to its name."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    _write_exclusive(temporary, data)
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _write_exclusive(path, data)
    finally:
        temporary.unlink()
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_exclusive(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise


class IdentityLock:
    """Holds an identity for this process; a context manager. The kernel frees it when the process ends, however."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Lets another process use the identity; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> IdentityLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_identity(path: Path) -> IdentityLock:
    """Takes the lock file beside the identity file (`<path>.lock`, this pid inside).

    Raises IdentityInUse, naming the file and the other process, and IdentityError where no lock file can be made.
    """
    lock_path = path.with_name(path.name + ".lock")
    try:
        make_private_folder(path.parent)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise IdentityError(
            f"cannot open the lock file {lock_path} ({error.strerror}); make its folder writable for this user"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            raise IdentityError(f"cannot lock {lock_path} ({error.strerror}); use a folder on a local disk") from error
        raise IdentityInUse(
            f"the identity {path} is in use by process {holder or 'unknown'}; "
            "stop that one, or start this one with another --home"
        ) from None
    return IdentityLock(descriptor)
