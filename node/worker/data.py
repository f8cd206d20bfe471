"""Text tokenized once into memory-mapped shards, shared by all nodes of a machine, and batches drawn from them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from peerloom.node.durable import fsync_dir, remove, replace_file, storage_errors
from peerloom.node.worker.sources import description, documents, python_version
from peerloom.node.worker.tokenizer import Tokenizer
from peerloom.protocol.errors import DataError
from peerloom.protocol.runspec import DataSpec

log = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int64]
Progress = Callable[[str, float], None]

CODE_VERSION = 1  # part of the cache key: raise it when the shards would come out differently
WHOLE_BYTES = 64 << 10  # a longer document is cut, so that one large file still gives both splits
PIECE_BYTES = 8 << 10
DIGEST_UP_TO = 256 << 20  # bytes of both shards that are read through at every start; of larger ones only the sizes
_SPLITS = ("train", "held_out")
_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Shards:
    """Token streams, memory-mapped: documents one after the other, each ended by the tokenizer's separator."""

    train: npt.NDArray[Any]
    held_out: npt.NDArray[Any]


def prepare(spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path, progress: Progress) -> Shards:
    """The shards of a source, tokenized now if no node on this machine has done it.

    Nodes that start at once wait for the first. Damaged shards are made anew. Raises DataError or StorageError.
    """
    target = cache_dir / _key(spec, tokenizer)
    if not target.exists() or _damage(target):
        with storage_errors(f"tokenized data in {cache_dir}"):
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _locked(cache_dir / f"{target.name}.lock", progress):
                _make_sound(spec, tokenizer, target, progress)
    return Shards(*(_map(target / f"{split}.bin", tokenizer.dtype) for split in _SPLITS))


def content_digest(spec: DataSpec, tokenizer: Tokenizer, cache_dir: Path) -> str:
    """BLAKE3 in hex over what `prepare` left: equal where the tokens are; raises DataError when it is gone."""
    manifest = cache_dir / _key(spec, tokenizer) / _MANIFEST
    try:
        files = json.loads(manifest.read_bytes())
        return blake3(json.dumps([files[f"{split}.bin"] for split in _SPLITS], sort_keys=True).encode()).hexdigest()
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot read the tokenized data {manifest.parent} ({error}); start again") from error


def check_enough(shards: Shards, spec: DataSpec, batch: int) -> None:
    """Raises DataError when a split cannot fill a batch."""
    window = spec.sequence_length + 1
    for name, tokens, needed in (("training", shards.train, window * batch), ("held-out", shards.held_out, window)):
        if len(tokens) < needed:
            raise DataError(
                f"the data source {spec.source} holds too little text: {len(tokens)} {name} tokens where one batch "
                f"takes {needed}; add text, or lower data.sequence_length or train.batch_size"
            )


class Batches:
    """Batch `index` of one peer: windows of `length + 1` tokens, a pure function of (run seed, peer id, index)."""

    def __init__(self, tokens: npt.NDArray[Any], run_seed: int, who: str, batch: int, length: int) -> None:
        digest = hashlib.sha256(f"peerloom-batches-1\0{run_seed}\0{who}".encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
        self._tokens = tokens
        self._batch = batch
        self._window = np.arange(length + 1)

    def __getitem__(self, index: int) -> Tokens:
        """(batch, length + 1) token ids; any index from 0 to 2^64 - 1, in any order."""
        counter = np.array([0, index, 0, 0], dtype=np.uint64)
        draws = np.random.Philox(key=self._key, counter=counter).random_raw(self._batch)
        starts = (draws % np.uint64(len(self._tokens) - len(self._window) + 1)).astype(np.int64)
        windows: Tokens = self._tokens[starts[:, None] + self._window].astype(np.int64)
        return windows


def _key(spec: DataSpec, tokenizer: Tokenizer) -> str:
    about = {
        "version": CODE_VERSION,
        "python": python_version() if spec.source == "stdlib" else "",
        "source": description(spec),
        "tokenizer": tokenizer.identity,
        "held_out": spec.held_out,
    }
    return blake3(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds an flock, which ends with the process however it ends."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another node to tokenize", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_sound(spec: DataSpec, tokenizer: Tokenizer, target: Path, progress: Progress) -> None:
    """Leaves intact shards in `target`; under the lock, so what another node has just made is seen."""
    if target.exists():
        damage = _damage(target)
        if not damage:
            return
        log.warning("the tokenized data in %s is damaged (%s) and is made anew", target, damage)
        target.rename(target.with_name(f".{target.name}.damaged"))  # nodes that have it mapped keep what they have
    _tokenize(spec, tokenizer, target, progress)


def _damage(folder: Path) -> str:
    """What is wrong with the shards in a folder, "" if nothing; raises DataError when they may not be read."""
    try:
        files = json.loads((folder / _MANIFEST).read_bytes())
        expected = {f"{split}.bin": files[f"{split}.bin"] for split in _SPLITS}
        for name, about in expected.items():
            if (size := (folder / name).stat().st_size) != about["bytes"]:
                return f"{name} has {size} bytes instead of {about['bytes']}"
        if sum(about["bytes"] for about in expected.values()) <= DIGEST_UP_TO:
            for name, about in expected.items():
                if _digest(folder / name) != about["blake3"]:
                    return f"{name} does not match its digest"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{error.filename} is missing"
    except OSError as error:
        raise DataError(
            f"cannot read the tokenized data in {folder} ({error.strerror}); make it readable, or remove it"
        ) from error
    except (ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is not readable"
    return ""


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _tokenize(spec: DataSpec, tokenizer: Tokenizer, target: Path, progress: Progress) -> None:
    """Fills a temporary folder and renames it to `target`; what killed nodes left behind goes first."""
    for leftover in target.parent.glob(f".{target.name}.*"):
        remove(leftover)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_splits(spec, tokenizer, temporary, progress)
        _write_manifest(temporary)
        temporary.chmod(0o755)
        temporary.rename(target)
        fsync_dir(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already unless something above failed


def _write_splits(spec: DataSpec, tokenizer: Tokenizer, folder: Path, progress: Progress) -> None:
    limit = int(spec.held_out * 2**64)
    shown, any_text = -1, False
    with (folder / "train.bin").open("wb") as train, (folder / "held_out.bin").open("wb") as held_out:
        for document in documents(spec):
            any_text = True
            for piece in _pieces(document.text):
                chosen = int.from_bytes(blake3(piece).digest()[:8], "big") < limit
                (held_out if chosen else train).write(tokenizer.encode(piece).tobytes())
            if (percent := int(document.done * 100)) > shown:
                shown = percent
                progress("tokenizing", document.done)
        for file in (train, held_out):
            file.flush()
            os.fsync(file.fileno())
    if not any_text:
        raise DataError(f"the data source {spec.source} holds no text; point data.source at a file or folder with some")


def _write_manifest(folder: Path) -> None:
    names = [f"{split}.bin" for split in _SPLITS]
    files = {name: {"bytes": (folder / name).stat().st_size, "blake3": _digest(folder / name)} for name in names}
    replace_file(folder / _MANIFEST, json.dumps(files, indent=1).encode())


def _pieces(text: bytes) -> Iterator[bytes]:
    """A document whole, or in pieces that end at line ends where there are any."""
    if len(text) <= WHOLE_BYTES:
        yield text
        return
    start = 0
    while start < len(text):
        end = min(start + PIECE_BYTES, len(text))
        if end < len(text) and (line := text.rfind(b"\n", start, end)) > start:
            end = line + 1
        while end < len(text) and text[end] & 0xC0 == 0x80:  # not within a UTF-8 character
            end += 1
        yield text[start:end]
        start = end


def _map(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read the tokenized data {path} ({error}); remove its folder to make it anew"
        ) from error
