"""Copies of a stage between two folders: whole, or refused without a trace."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest
import torch
from xxhash import xxh3_128

from peerloom.node import checkpoint, stage_copies
from peerloom.node.checkpoint_meta import Meta
from peerloom.node.context import Context
from peerloom.node.stage_copies import MOST_META_BYTES, most_bytes, receive_copy, send_copy
from peerloom.node.stage_keeping import StageKeeping
from peerloom.node.stage_view import StageView
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
    meta = Meta(
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


async def take(copy: Copy, rest: list[StageMessage], home: Path) -> Meta:
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


class Fed(Recorded):
    """A stream whose messages the test hands over when it likes."""

    def __init__(self, peer: str, *messages: StageMessage) -> None:
        super().__init__()
        self.peer = PeerId(peer)
        self.queue: asyncio.Queue[StageMessage | None] = asyncio.Queue()
        self.feed(*messages)

    def feed(self, *messages: StageMessage | None) -> None:
        for message in messages:
            self.queue.put_nowait(message)

    async def receive(self) -> StageMessage | None:
        return await self.queue.get()


async def moment() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_copies_of_one_stage_that_come_at_once_are_all_kept(tmp_path: Path) -> None:
    """Its hosts have the same keeper, which may begin to host it too, and whose worker clears up and saves then."""
    save(tmp_path / "a")
    header, rest = await recorded(tmp_path / "a")
    folder = checkpoint.stage_folder(tmp_path / "b", 1)
    folder.mkdir(parents=True)
    streams = [Fed("a", *rest[:3]), Fed("b", *rest[:3])]
    tasks = []
    for stream in streams:
        tasks.append(asyncio.create_task(receive_copy(stream, header, folder, SPEC, keep=2)))
        await moment()
    checkpoint.clear_leftovers(folder)
    (folder / ".new-round-00000077").mkdir()  # a save under way
    for stream, task in zip(streams, tasks, strict=True):
        stream.feed(*rest[3:])
        assert (await task).step == 30
        assert stream.sent == [Kept()]
    assert sorted(path.name for path in folder.iterdir()) == [".new-round-00000077", "round-00000030"]
    assert list(folder.parent.iterdir()) == [folder]


async def test_what_a_kill_left_of_a_copy_goes_with_the_next_and_no_other(tmp_path: Path) -> None:
    save(tmp_path / "a")
    header, rest = await recorded(tmp_path / "a")
    folder = checkpoint.stage_folder(tmp_path / "b", 1)
    left = folder.parent / "incoming-killed"
    left.mkdir(parents=True)
    (left / "theta.safetensors").write_bytes(b"half")
    await take(header, rest, tmp_path / "b")
    assert list(folder.parent.iterdir()) == [folder]


async def test_who_falls_silent_within_a_copy_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a")
    header, rest = await recorded(tmp_path / "a")
    monkeypatch.setattr(stage_copies, "SILENT_S", 0.01)
    folder = checkpoint.stage_folder(tmp_path / "b", 1)
    with pytest.raises(LinkError, match="nothing more of the copy came"):
        await receive_copy(Fed("a", *rest[:3]), header, folder, SPEC, keep=2)
    assert list(folder.parent.iterdir()) == [folder]


class Keeper(StageKeeping):
    """Of a node in `home` that knows all who ask for hosts of their stage."""

    def __init__(self, home: Path) -> None:
        self.facts = SimpleNamespace(stage_role="stands_by", stage=1, count=lambda metric: None)
        settings = SimpleNamespace(run_dir=home, keep_checkpoints=2)
        node = SimpleNamespace(facts=self.facts, settings=settings, spec=SPEC)
        swarm = SimpleNamespace(expect_host=AsyncMock(), check=AsyncMock(return_value=True))
        super().__init__(cast(Context, node), cast(StageView, swarm))


async def test_a_keeper_that_begins_to_host_the_stage_takes_no_copy_over_its_own(tmp_path: Path) -> None:
    save(tmp_path / "a", step=30)
    save(tmp_path / "b", step=50)
    header, rest = await recorded(tmp_path / "a")
    keeper, streams = Keeper(tmp_path / "b"), [Fed("a", header, *rest[:3]), Fed("b")]
    serving = [asyncio.create_task(keeper.serve_keep(stream, 1)) for stream in streams]
    await moment()
    keeper.facts.stage_role = "hosts"
    streams[0].feed(*rest[3:])
    streams[1].feed(header, *rest)
    for task in serving:
        with pytest.raises(LinkError, match="hosts stage 1 itself"):
            await task
    kept = [path.name for path in checkpoint.stage_folder(tmp_path / "b", 1).iterdir()]
    assert kept == ["round-00000050"]


async def test_a_host_fills_no_disk_with_copies_that_never_end(tmp_path: Path) -> None:
    save(tmp_path / "a")
    header, rest = await recorded(tmp_path / "a")
    keeper, first = Keeper(tmp_path / "b"), Fed("a", header, *rest[:3])
    serving = asyncio.create_task(keeper.serve_keep(first, 1))
    await moment()
    with pytest.raises(LinkError, match="another copy of stage 1 is coming from this peer"):
        await keeper.serve_keep(Fed("a", header, *rest), 1)
    first.feed(*rest[3:], header, *rest, None)
    await serving
    assert first.sent[1:] == [Kept(), Kept()]


async def test_without_a_checkpoint_there_is_nothing_to_send(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="no copy of stage 1"):
        await send_copy(Recorded(), checkpoint.stage_folder(tmp_path, 1), 1)


def test_the_limit_holds_rotated_moments_and_a_ledger() -> None:
    assert most_bytes(SPEC) > 12 * SPEC.model.parameters() + MOST_META_BYTES
    assert most_bytes(SPEC) < 200 * SPEC.model.parameters() + MOST_META_BYTES
    assert len(json.dumps([[2**48, 2**40, list(range(2**40, 2**40 + 4096))]])) * 64 < MOST_META_BYTES
