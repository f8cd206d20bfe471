"""What a checkpoint says of itself, when a peer or a hand wrote it: typed and within bounds, or damaged."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peerloom.node import checkpoint
from peerloom.node.checkpoint_manifest import MANIFEST, TENSORS, Damaged, fingerprint, seal
from peerloom.node.checkpoint_meta import Meta, parse_meta
from peerloom.protocol.errors import MalformedMessage

GOOD = Meta(
    round=3, step=3, tokens=9, batch_cursor=0, spec_hash="h", layout_digest="l", adam_steps=3, held_out_loss=2,
    distances=[1.5], versions={"torch": "2"}, pipeline={"stage": 1, "lane": 5, "ledger": [[5, 3, [4, 7]]]},
)  # fmt: skip
BAD: list[dict[str, Any]] = [
    {"step": "3"}, {"step": None}, {"step": 2.5}, {"step": True}, {"step": -1}, {"step": 2**60}, {"round": 3.0},
    {"round": "3"}, {"tokens": "many"}, {"held_out_loss": "x"}, {"distances": ["x"]}, {"versions": {"torch": 2}},
    {"spec_hash": 5}, {"format": 9}, {"pipeline": [1]}, {"pipeline": {"stage": 1}},
    *({"pipeline": {"stage": 1, "lane": lane, "ledger": ledger}} for lane, ledger in (
        ("x", []), (5, 7), (5, [[1]]), (5, [["a", "b", [1]]]), (5, [[1, -1, []]]), (5, [[1, 3, [2]]]),
        (5, [[1, 3, [3]]]), (5, [[1, 3, list(range(4, 5000))]]), (5, [[lane, 0, []] for lane in range(5000)]),
    )),
]  # fmt: skip


def test_what_is_written_is_read() -> None:
    assert parse_meta(json.dumps(asdict(GOOD)).encode()) == GOOD


@pytest.mark.parametrize("change", BAD)
def test_what_is_not_of_its_kind_is_damaged(change: dict[str, Any]) -> None:
    with pytest.raises(Damaged):
        parse_meta(json.dumps({**asdict(GOOD), **change}).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b"{", b"{}", b"\xff"])
def test_what_is_no_object_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        parse_meta(data)


@pytest.mark.parametrize("data", [b"7", b"[]", b'{"files": 7}', b'{"files": {"meta.json": 7}}', b"[" * 10**5])
def test_a_peer_s_copy_without_a_manifest_is_refused_and_gone(tmp_path: Path, data: bytes) -> None:
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    (incoming / MANIFEST).write_bytes(data)
    with pytest.raises(MalformedMessage, match="damaged"):
        checkpoint.take_in(tmp_path, incoming, "h", 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.int64, torch.complex64])
@pytest.mark.parametrize("file", TENSORS)
def test_a_peer_s_copy_in_numbers_that_are_not_ours_is_refused_and_gone(
    tmp_path: Path, file: str, dtype: torch.dtype
) -> None:
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    tensors = {"theta.safetensors": {"theta": torch.zeros(4), "previous": torch.empty(0)}, "optimizer.safetensors": {}}
    tensors[file]["theta" if file == TENSORS[0] else "exp_avg/x"] = torch.zeros(4).to(dtype)
    for name, content in tensors.items():
        save_file(content, incoming / name)
    seal(incoming, asdict(GOOD), {name: fingerprint(incoming / name) for name in TENSORS}, {})
    with pytest.raises(MalformedMessage, match="damaged"):
        checkpoint.take_in(tmp_path, incoming, "h", 1)
    assert not list(tmp_path.iterdir())
