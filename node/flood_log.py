"""What a node keeps of the flood: an append-only log, each record checksummed; a torn end is dropped.

A file of records: length (4 bytes, little-endian), kind (1), content, BLAKE3 of kind and content (8). The first record
names the run and the node. A state that was adopted from a peer lies beside it in a file of its own, named by the log.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from peerloom.node.durable import fsync_dir, replace_file, storage_errors
from peerloom.protocol import codec_flood
from peerloom.protocol.errors import ProtocolError
from peerloom.protocol.flood_messages import Proof, Segment, Snapshot
from peerloom.protocol.types import PeerId, RunId

Item = Segment | Proof | Snapshot

_HEAD = struct.Struct("<IB")
_CHECK_BYTES = 8
_MAX_RECORD = 64 << 20  # a snapshot of all origins, with all proofs that could be
_NAME, _SEGMENT, _PROOF, _SNAPSHOT = range(4)


class FloodLog:
    """The log of one node in one run, in `folder`; all methods that write raise StorageError.

    `items` are the records found, in order, and `state` the bytes of the last snapshot's state among them, None without
    one. `note` says what was dropped, if anything was.
    """

    def __init__(self, folder: Path, run_id: RunId, own: PeerId) -> None:
        self._folder = folder
        self._path = folder / "flood.log"
        self._name = f"{run_id} {own}".encode()
        self.items: list[Item] = []
        self.state: bytes | None = None
        self.note = ""
        with storage_errors(f"the log {self._path}"):
            self._file = self._open()

    def append(self, item: Segment | Proof) -> None:
        """Writes a record; a kill cannot lose it any more, a power cut can until sync()."""
        kind, content = (
            (_PROOF, codec_flood.encode_proof(item))
            if isinstance(item, Proof)
            else (_SEGMENT, codec_flood.encode_segment(item))
        )
        self._write(_record(kind, content))

    def adopt(self, snapshot: Snapshot, state: bytes) -> None:
        """Makes a state durable that counts the snapshot's messages; what is appended from now on goes beyond it."""
        digest = blake3(state).digest()
        with storage_errors(f"the state in {self._folder}"):
            replace_file(self._state_path(digest), state)
        self._write(_record(_SNAPSHOT, codec_flood.encode_snapshot(snapshot, digest)))
        self.sync()
        for path in self._folder.glob("flood-*.state"):
            if path != self._state_path(digest):
                path.unlink(missing_ok=True)

    def sync(self) -> None:
        """Makes all that was appended survive a power cut."""
        with storage_errors(f"the log {self._path}"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()

    def _write(self, record: bytes) -> None:
        with storage_errors(f"the log {self._path}"):
            end = self._file.tell()
            try:
                left = memoryview(record)
                while left:  # a disk nearly full takes a part, and says why when asked to take the rest
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(end)  # half a record would hide all that come after it
                self._file.seek(end)
                raise

    def _open(self) -> BinaryIO:
        found = self._path.read_bytes() if self._path.exists() else b""
        good = self._read(found) if found else 0
        if not good:
            self.items = []
            if found:
                self._path.rename(self._path.with_suffix(".damaged"))
            replace_file(self._path, _record(_NAME, self._name))
            good = self._path.stat().st_size
        elif good < len(found):
            self.note = f"the log {self._path} was torn: its last {len(found) - good} bytes were dropped"
        file = open(self._path, "r+b", buffering=0)
        file.truncate(good)
        file.seek(good)
        fsync_dir(self._folder)
        return file

    def _read(self, data: bytes) -> int:
        """Fills items and state; returns where the good records end, 0 where the log is of no use."""
        end = 0
        for kind, content, after in _records(data):
            if end == 0 and (kind, content) != (_NAME, self._name):
                self.note = f"the log {self._path} is damaged or another node's; it was set aside"
                return 0
            try:
                self._item(kind, content)
            except ProtocolError:
                break
            end = after
        if not end:
            self.note = f"the log {self._path} is damaged; it was set aside"
        elif self.state is None and any(isinstance(item, Snapshot) for item in self.items):
            self.note = f"the state that the log {self._path} goes on from is missing or damaged; it was set aside"
            return 0
        return end

    def _item(self, kind: int, content: bytes) -> None:
        if kind == _SEGMENT:
            self.items.append(codec_flood.decode_segment(content))
        elif kind == _PROOF:
            self.items.append(codec_flood.decode_proof(content))
        elif kind == _SNAPSHOT:
            snapshot, digest = codec_flood.decode_snapshot(content)
            self.state = self._read_state(digest)
            self.items.append(snapshot)

    def _read_state(self, digest: bytes) -> bytes | None:
        """The state; None for one that is gone, as all but the last are, or damaged."""
        path = self._state_path(digest)
        state = path.read_bytes() if path.exists() else b""
        return state if blake3(state).digest() == digest else None

    def _state_path(self, digest: bytes) -> Path:
        return self._folder / f"flood-{digest.hex()[:32]}.state"


def _record(kind: int, content: bytes) -> bytes:
    return _HEAD.pack(len(content), kind) + content + _check(kind, content)


def _check(kind: int, content: bytes) -> bytes:
    return blake3(bytes([kind]) + content).digest()[:_CHECK_BYTES]


def _records(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Kind, content and end of each record, up to the first that does not check."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, kind = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length + _CHECK_BYTES
        if length > _MAX_RECORD or end > len(data):
            return
        content = data[at + _HEAD.size : end - _CHECK_BYTES]
        if data[end - _CHECK_BYTES : end] != _check(kind, content):
            return
        yield kind, content, end
        at = end
