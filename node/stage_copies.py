"""Copies of a stage's checkpoint between nodes, over Stage.Run: file after file, and verified before it is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from peerloom.node import checkpoint
from peerloom.node.digest import link_digest
from peerloom.node.durable import remove, storage_errors
from peerloom.node.payload import Pace
from peerloom.node.seams import MessageStream
from peerloom.protocol.errors import DigestMismatch, LimitExceeded, LinkError, MalformedMessage
from peerloom.protocol.limits import CHUNK_BYTES
from peerloom.protocol.messages import Chunk, PayloadEnd
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.stage_messages import Copy, Kept, StageMessage

log = logging.getLogger(__name__)

Stream = MessageStream[StageMessage]

MAX_STATE_SHARE = 24  # bytes of state a parameter of the whole model: fp32 weights, moments, and bases of wide matrices
MOST_META_BYTES = 4 << 20
SILENT_S = 60.0  # within a copy; a chunk may take long on a slow line
INCOMING = "incoming-"
FILES = {"theta.safetensors", "optimizer.safetensors", "meta.json", "manifest.json"}
_under_way: set[Path] = set()  # the folders that copies come into now; one process alone writes to a run's folder


def most_bytes(spec: RunSpec) -> int:
    """How large a stage's copy may be; of a stored model the sizes are not in the spec, and disk space is the limit."""
    if spec.model.path:
        return 1 << 42
    sides = spec.model.layers * (8 * spec.model.hidden_size**2 + 6 * spec.model.intermediate_size**2)  # of bases
    untied = spec.model.parameters() + spec.model.vocab_size * spec.model.hidden_size
    return MAX_STATE_SHARE * untied + 16 * sides + MOST_META_BYTES


async def send_copy(stream: Stream, folder: Path, stage: int) -> int:
    """Sends the newest checkpoint of a stage that lies in `folder`; returns its update.

    Raises LinkError without one, or when it goes while it is read.
    """
    found = checkpoint.newest_files(folder)
    if found is None:
        raise LinkError(f"no copy of stage {stage} is here")
    update, files = found
    try:
        await stream.send(Copy(stage, update, tuple((file.name, file.stat().st_size) for file in files)))
        for file in files:
            await _send_file(stream, file)
    except OSError as error:
        raise LinkError(f"the copy of stage {stage} cannot be read: {error.strerror}") from error
    return update


async def _send_file(stream: Stream, path: Path) -> None:
    digest, offset, size = link_digest(), 0, Pace(stream.chunk_bytes)
    with path.open("rb") as file:
        while data := file.read(min(size.chunk_bytes, CHUNK_BYTES)):
            digest.update(data)
            await stream.send(Chunk(offset, data))
            offset += len(data)
            size.sent(0.0)
    await stream.send(PayloadEnd(digest.digest()))


async def receive_copy(
    stream: Stream,
    copy: Copy,
    folder: Path,
    spec: RunSpec,
    *,
    keep: int,
    admit: Callable[[], None] = lambda: None,
) -> checkpoint.Meta:
    """Receives the copy that its header announces into `folder`, verifies it and says so.

    `admit` is asked before it is put there, and raises LinkError where it is not wanted any more. Raises ProtocolError
    for what is wrong with it, LinkError, StorageError.
    """
    if {name for name, _ in copy.files} != FILES or len(copy.files) != len(FILES):
        raise MalformedMessage("a stage's copy holds other files than a checkpoint's")
    total, limit = sum(size for _, size in copy.files), most_bytes(spec)
    if total > limit:
        raise LimitExceeded(f"the copy of stage {copy.stage} has {total} bytes; the limit is {limit}")
    with _incoming(folder) as incoming:
        for name, size in copy.files:
            await _receive_file(stream, incoming / name, size)
        admit()
        meta = checkpoint.take_in(folder, incoming, spec.spec_hash(), copy.stage, keep=keep)
    if meta.step != copy.update:
        log.info("the copy of stage %d was announced as of update %d", copy.stage, copy.update)
    await stream.send(Kept())
    return meta


@contextmanager
def _incoming(folder: Path) -> Iterator[Path]:
    """A folder to receive one copy in, which no other receiver touches, nor a worker that tidies `folder`, beside it.

    Those that a kill left are removed first. Raises StorageError.
    """
    with storage_errors(f"the copy in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f"{INCOMING}*"):
            if left not in _under_way:
                remove(left)
        incoming = Path(mkdtemp(prefix=INCOMING, dir=folder.parent))
    _under_way.add(incoming)
    try:
        yield incoming
    finally:
        rmtree(incoming, ignore_errors=True)
        _under_way.discard(incoming)


async def _receive_file(stream: Stream, path: Path, size: int) -> None:
    digest, offset = link_digest(), 0
    with storage_errors(f"the copy {path}"), path.open("wb") as file:
        while True:
            message = await _next(stream)
            match message:
                case Chunk(at, data) if at == offset and offset + len(data) <= size:
                    digest.update(data)
                    file.write(data)
                    offset += len(data)
                case PayloadEnd(theirs) if offset == size:
                    if theirs != digest.digest():
                        raise DigestMismatch(f"{path.name} is not what was announced")
                    return
                case None:
                    raise LinkError("the copy ended before it was whole")
                case _:
                    raise MalformedMessage(f"a {type(message).__name__} has no place at byte {offset} of {path.name}")


async def _next(stream: Stream) -> StageMessage | None:
    try:
        async with asyncio.timeout(SILENT_S):
            return await stream.receive()
    except TimeoutError:
        raise LinkError(f"nothing more of the copy came for {SILENT_S:g} s") from None
