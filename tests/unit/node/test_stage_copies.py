"""Copies of a stage between two folders: whole, or refused without a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_128

from peerloom.node import checkpoint
from peerloom.node.stage_copies import MOST_META_BYTES, most_bytes, receive_copy, send_copy
from peerloom.protocol.errors import DigestMismatch, LimitExceeded, LinkError, MalformedMessage, ProtocolError
from peerloom.protocol.messages import Chunk, PayloadEnd
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.stage_messages import Copy, Kept, StageMessage
from peerloom.protocol.types import PeerId

SPEC = RunSpec(method="pipeline")


class Recorded:
    """A stream that plays what another wrote."""

    peer = PeerId("peer")
    chunk_bytes = 100

    def __init__(self, incoming: list[StageMessage] | None = None) -> None:
        self.sent: list[StageMessage] = []
        self.incoming = incoming or []

    async def send(self, message: StageMessage) -> None:
        self.sent.append(message)

    async def receive(self) -> StageMessage | None:
        return self.incoming.pop(0) if self.incoming else None

    async def close(self) -> None:
        return


def save(folder: Path, stage: int = 1, step: int = 30, spec_hash: str = "") -> Path:
    meta = checkpoint.Meta(
        round=step, step=step, tokens=0, batch_cursor=0, spec_hash=spec_hash or SPEC.spec_hash(), layout_digest="ab",
        adam_steps=step, pipeline={"stage": stage, "lane": 7, "ledger": [[7, step, []]]},
    )  # fmt: skip
    theta = torch.arange(500, dtype=torch.float32)
    state = checkpoint.Checkpoint(meta=meta, theta=theta, previous=torch.empty(0), optimizer={"exp_avg/w": theta / 3})
    return checkpoint.save(checkpoint.stage_folder(folder, stage), state)


async def recorded(folder: Path, stage: int = 1) -> tuple[Copy, list[StageMessage]]:
    stream = Recorded()
    await send_copy(stream, checkpoint.stage_folder(folder, stage), stage)
    header, *rest = stream.sent
    assert isinstance(header, Copy)
    return header, rest


async def take(copy: Copy, rest: list[StageMessage], home: Path) -> checkpoint.Meta:
    stream = Recorded(list(rest))
    meta = await receive_copy(stream, copy, checkpoint.stage_folder(home, copy.stage), SPEC, keep=2)
    assert stream.sent == [Kept()]
    return meta


async def test_a_copy_is_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a")
    meta = await take(*await recorded(tmp_path / "a"), tmp_path / "b")
    assert (meta.step, meta.pipeline) == (30, {"stage": 1, "lane": 7, "ledger": [[7, 30, []]]})
    ours, _ = checkpoint.newest_intact(checkpoint.stage_folder(tmp_path / "a", 1))
    theirs, _ = checkpoint.newest_intact(checkpoint.stage_folder(tmp_path / "b", 1))
    assert ours is not None and theirs is not None and torch.equal(ours.theta, theirs.theta)


async def test_older_copies_go_when_newer_ones_come(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path / "a", step=step)
        await take(*await recorded(tmp_path / "a"), tmp_path / "b")
    kept = sorted(path.name for path in checkpoint.stage_folder(tmp_path / "b", 1).glob("round-*"))
    assert kept == ["round-00000020", "round-00000030"]


def altered(rest: list[StageMessage]) -> list[StageMessage]:
    """One byte of theta is another, and the digests on the way fit."""
    out, digest, changed = [], xxh3_128(), False
    for message in rest:
        if isinstance(message, Chunk):
            data = bytearray(message.data)
            if not changed:
                data[-1] ^= 1
                changed = True
            digest.update(bytes(data))
            message = Chunk(message.offset, bytes(data))
        elif isinstance(message, PayloadEnd):
            message, digest = PayloadEnd(digest.digest()), xxh3_128()
        out.append(message)
    return out


async def test_what_is_wrong_with_a_copy_is_told_and_nothing_stays(tmp_path: Path) -> None:
    save(tmp_path / "a")
    header, rest = await recorded(tmp_path / "a")
    save(tmp_path / "other", spec_hash="0" * 64)
    cases: list[tuple[Copy, list[StageMessage], type[ProtocolError | LinkError], str]] = [
        (header, altered(rest), MalformedMessage, "damaged"),
        (header, [*rest[:1], PayloadEnd(b"d" * 16)], MalformedMessage, "no place at byte"),
        (header, rest[:-1], LinkError, "before it was whole"),
        (header, [Chunk(5, b"abc")], MalformedMessage, "no place at byte 0"),
        (Copy(1, 30, header.files[:-1]), rest, MalformedMessage, "other files"),
        (Copy(1, 30, (*header.files[:-1], ("../evil", 3))), rest, MalformedMessage, "other files"),
        (Copy(1, 30, ((header.files[0][0], 1 << 40), *header.files[1:])), rest, LimitExceeded, "the limit is"),
        (Copy(2, 30, header.files), rest, MalformedMessage, "no copy of stage 2"),
        (*await recorded(tmp_path / "other"), MalformedMessage, "no copy of stage 1 of this run"),
    ]
    last = next(i for i, message in enumerate(rest) if isinstance(message, PayloadEnd))
    cases.append((header, [*rest[:last], PayloadEnd(b"d" * 16)], DigestMismatch, "not what was announced"))
    for number, (copy, messages, error, says) in enumerate(cases):
        with pytest.raises(error, match=says):
            await take(copy, messages, tmp_path / str(number))
        assert not list((tmp_path / str(number)).rglob("*.safetensors"))


async def test_without_a_checkpoint_there_is_nothing_to_send(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="no copy of stage 1"):
        await send_copy(Recorded(), checkpoint.stage_folder(tmp_path, 1), 1)


def test_the_limit_holds_rotated_moments_and_a_ledger() -> None:
    assert most_bytes(SPEC) > 12 * SPEC.model.parameters() + MOST_META_BYTES
    assert most_bytes(SPEC) < 200 * SPEC.model.parameters() + MOST_META_BYTES
    assert len(json.dumps([[2**48, 2**40, list(range(2**40, 2**40 + 4096))]])) * 64 < MOST_META_BYTES
