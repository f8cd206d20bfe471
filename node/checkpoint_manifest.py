"""What names the files of a checkpoint and vouches for them: `manifest.json`, a size and a BLAKE3 digest for each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from peerloom.node.durable import fsync_dir, fsync_file

FORMAT = 1
MANIFEST, META = "manifest.json", "meta.json"
TENSORS = ("theta.safetensors", "optimizer.safetensors")  # of a state that one process wrote
FILES = (*TENSORS, META)
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_PART = re.compile(r"[a-z]+-\d{5}-of-\d{5}\.safetensors", re.ASCII)


class Damaged(Exception):
    """One checkpoint does not verify; the message says why."""


File = Mapping[str, Any]  # "bytes" and "blake3"


def seal(folder: Path, meta: Mapping[str, Any], files: Mapping[str, File], more: Mapping[str, Any]) -> None:
    """Adds meta and manifest to a folder whose other files, given with their `fingerprint`s, are durable.

    `more` stands in the manifest too. Raises OSError.
    """
    (folder / META).write_text(json.dumps(meta, indent=1))
    vouched = {**files, META: fingerprint(folder / META)}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, **more, "files": vouched}, indent=1))
    for name in (META, MANIFEST):
        fsync_file(folder / name)
    fsync_dir(folder)


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint all of whose files are there and as they were written; raises Damaged."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
        files = manifest["files"]
        for name in _expected(manifest):
            size, digest = files[name]["bytes"], files[name]["blake3"]
            if (found := (path / name).stat().st_size) != size:
                raise Damaged(f"{name} has {found} bytes instead of {size}")
            if fingerprint(path / name)["blake3"] != digest:
                raise Damaged(f"{name} does not match its digest")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    return manifest


def fingerprint(path: Path, threads: int = blake3.AUTO) -> dict[str, Any]:
    """Size and digest of a file; raises OSError."""
    return {"bytes": path.stat().st_size, "blake3": blake3(max_threads=threads).update_mmap(path).hexdigest()}


def in_parts(manifest: Mapping[str, Any]) -> bool:
    """Whether several ranks wrote the checkpoint: it names the parameters then, in their order."""
    return "parameters" in manifest


def _expected(manifest: Mapping[str, Any]) -> list[str]:
    """The files of a checkpoint; raises ValueError for a name that none of them has: a copy may be a peer's."""
    if not in_parts(manifest):
        return list(FILES)
    names = list(manifest["files"])
    for name in names:
        if name not in (META, CONFIG, INDEX) and not _PART.fullmatch(name):
            raise ValueError(f"no file of a checkpoint is called {name!r:.80}")
    return [META, *(name for name in names if name != META)]
