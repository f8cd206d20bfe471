"""A base model on disk, as a peer handed it over or as one is to hand it over: its files beside its bare weights."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from blake3 import blake3

from peerloom.node.durable import fsync_dir, fsync_file, replace_file, storage_errors, write_at
from peerloom.protocol.base import ENCODINGS, TOKENIZER, BaseFiles, pack_files
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.limits import CHUNK_BYTES

FOLDER = "base"  # in the folder of a run
PACKED, WEIGHTS, ABOUT = "files", "weights", "fetched.json"
_FILES_MODE = 0o600


def fetched(run_dir: Path) -> Path | None:
    """The folder of the base that a peer handed over, whole; None where none did."""
    folder = run_dir / FOLDER
    return folder if (folder / ABOUT).is_file() else None


def tokenizer_of(folder: Path, named: str) -> str:
    """What stands for the spec's tokenizer where the base came from a peer."""
    return str(folder) if named != "bytes" and (folder / TOKENIZER).is_file() else named


def encoding_of(folder: Path) -> str:
    """How the weights are encoded; raises MalformedMessage."""
    try:
        return str(json.loads((folder / ABOUT).read_bytes())["encoding"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise MalformedMessage(f"{folder / ABOUT} cannot be read: {error}") from None


def empty(run_dir: Path) -> Path:
    """A new folder beside the run's other things."""
    with storage_errors(f"the base model in {run_dir}"):
        run_dir.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=run_dir))


def sweep(run_dir: Path) -> None:
    """Removes what an earlier life that was killed left half written."""
    for left in run_dir.glob(f".{FOLDER}-*"):
        shutil.rmtree(left, ignore_errors=True)


def write_files(folder: Path, found: BaseFiles) -> None:
    """The files themselves, for the libraries that open them, and the pack, to be handed on byte for byte."""
    with storage_errors(f"the base model in {folder}"):
        for name, content in found.files.items():
            replace_file(folder / name, content)
        replace_file(folder / PACKED, pack_files(found))


def keep(run_dir: Path, folder: Path, encoding: str, digest: str, size: int) -> Path:
    """Puts a fetched base in its place, durable; raises StorageError."""
    with storage_errors(f"the base model in {run_dir}"):
        fsync_file(folder / WEIGHTS)
        about = {"encoding": encoding, "init_digest": digest, "bytes": size}
        replace_file(folder / ABOUT, json.dumps(about).encode())
        target = run_dir / FOLDER
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder, target)
        fsync_dir(run_dir)
    return target


def discard(run_dir: Path) -> None:
    """Removes a fetched base that turned out damaged."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)


def piece_digests(data: bytes, piece_bytes: int) -> tuple[bytes, ...]:
    """As a manifest lists them."""
    return tuple(blake3(data[at : at + piece_bytes]).digest() for at in range(0, len(data), piece_bytes))


def weights_digest(path: Path, encoding: str) -> str:
    """BLAKE3 in hex over the weights as fp32, which is the base's digest; reads a piece at a time."""
    digest = blake3()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(expanded(piece, encoding))
    return digest.hexdigest()


def expanded(piece: bytes, encoding: str) -> bytes:
    """Weights as fp32."""
    if encoding == "fp32":
        return piece
    assert ENCODINGS[encoding] == 2  # ours: there are these two
    return bytes((np.frombuffer(piece, dtype="<u2").astype("<u4") << 16).data)


class WeightsFile:
    """Where pieces of weights are written as they come; `received` counts them all, those written twice too."""

    def __init__(self, path: Path) -> None:
        self.path, self.received = path, 0
        with storage_errors(f"the base model {path}"):
            self._fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, _FILES_MODE)

    def store(self, offset: int, data: bytes) -> None:
        """Writes one piece; raises StorageError."""
        self.received += len(data)
        with storage_errors(f"the base model {self.path}"):
            write_at(self._fd, data, offset)

    def close(self) -> None:
        """No more pieces."""
        os.close(self._fd)
