"""Where a node keeps its things: XDG folders by default, all below one folder when `home` is set."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from peerloom.node.durable import write_at
from peerloom.protocol.errors import RunMismatch, StorageError
from peerloom.protocol.types import RunId

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EROFS: "it lies on a read-only file system; name another folder with --home",
    errno.EACCES: "this user may not write there; change its permissions or name another folder with --home",
    errno.EPERM: "this user may not write there; change its permissions or name another folder with --home",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away or name another folder with --home",
    errno.EEXIST: "a file stands where a folder is needed; move it away or name another folder with --home",
}
PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """The three roots and what lies below them; nothing is created here."""

    config: Path
    data: Path
    cache: Path

    @classmethod
    def of(cls, home: Path | None) -> Folders:
        """Below `home`, or the user's XDG folders for None."""
        if home is not None:
            home = Path(os.path.expanduser(home)).absolute()
            return cls(config=home, data=home, cache=home / "cache")
        dirs = platformdirs.PlatformDirs("peerloom", appauthor=False)
        return cls(config=dirs.user_config_path, data=dirs.user_data_path, cache=dirs.user_cache_path)

    @property
    def peer_toml(self) -> Path:
        return self.config / "peer.toml"

    @property
    def identity_file(self) -> Path:
        return self.data / "identity.key"

    @property
    def ports_file(self) -> Path:
        return self.data / "ports.json"

    @property
    def runs_dir(self) -> Path:
        return self.data / "runs"

    def run_dir(self, run_id: RunId) -> Path:
        """The node's folder of one run; raises RunMismatch for what is no run id and might lead out of the folder."""
        if not re.fullmatch(r"[0-9a-f]{16}", run_id):
            raise RunMismatch(f"{run_id!r:.80} is not a run id; one has 16 hex digits")
        return self.runs_dir / run_id


def ensure_writable(path: Path) -> Path:
    """Makes the folder (0700) if need be and writes a probe; raises StorageError with the remedy, else returns it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, probe = tempfile.mkstemp(prefix=".probe-", dir=path)
        try:
            write_at(descriptor, bytes(PROBE_BYTES), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except OSError as error:
        raise storage_error(path, error) from error
    return path


def storage_error(path: Path, error: OSError) -> StorageError:
    """The sentence for an OSError met while writing below `path`."""
    default = f"{error.strerror or error}; name another folder with --home"
    return StorageError(f"cannot write to {path}: {_REMEDIES.get(error.errno or 0, default)}")
