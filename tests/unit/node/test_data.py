"""Data: sources and their faults, one tokenization for all nodes, batches that never repeat."""

from __future__ import annotations

import builtins
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peerloom.node.worker import data
from peerloom.node.worker.data import Batches, check_enough, prepare
from peerloom.node.worker.sources import documents
from peerloom.node.worker.tokenizer import ByteTokenizer
from peerloom.protocol.errors import DataError, StorageError
from peerloom.protocol.runspec import DataSpec
from tests.unit.node.tiny import write_text


def quiet(what: str, share: float) -> None:
    """No progress shown."""


def texts(spec: DataSpec) -> list[bytes]:
    return [document.text for document in documents(spec)]


def test_all_text_lands_in_one_split_or_the_other(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    shards = prepare(DataSpec(source=str(source), held_out=0.2), ByteTokenizer(), tmp_path / "cache", quiet)
    written = sorted(path.read_bytes() for path in source.iterdir())
    read = [bytes(split).split(b"\0")[:-1] for split in (shards.train, shards.held_out)]
    assert sorted(read[0] + read[1]) == written
    assert 4 <= len(read[1]) <= 22  # 12 of 60 expected


def test_the_second_node_does_not_tokenize(tmp_path: Path) -> None:
    spec = DataSpec(source=str(write_text(tmp_path / "text")))
    seen: list[str] = []
    first = prepare(spec, ByteTokenizer(), tmp_path / "cache", lambda what, share: seen.append(what))
    assert "tokenizing" in seen
    seen.clear()
    second = prepare(spec, ByteTokenizer(), tmp_path / "cache", lambda what, share: seen.append(what))
    assert seen == []
    assert np.array_equal(first.train, second.train)


def test_changed_text_is_tokenized_anew(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text")
    spec = DataSpec(source=str(source))
    before = prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    (source / "000.txt").write_text("something else " * 200)
    after = prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    assert len(before.train) + len(before.held_out) != len(after.train) + len(after.held_out)


def test_nodes_that_start_at_once_tokenize_once(tmp_path: Path) -> None:
    spec = DataSpec(source=str(write_text(tmp_path / "text")))
    code = (
        "import sys; from pathlib import Path; from peerloom.node.worker.data import prepare;"
        "from peerloom.node.worker.tokenizer import ByteTokenizer; from peerloom.protocol.runspec import DataSpec;"
        "prepare(DataSpec(source=sys.argv[1]), ByteTokenizer(), Path(sys.argv[2]), lambda what, share: print(what))"
    )
    command = [sys.executable, "-c", code, spec.source, str(tmp_path / "cache")]
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0]
    assert sum("tokenizing" in out for out in said) == 1
    assert sum(path.is_dir() for path in (tmp_path / "cache").iterdir()) == 1


def _empty(shards: Path) -> None:
    (shards / "train.bin").write_bytes(b"")


def _cut(shards: Path) -> None:
    with (shards / "held_out.bin").open("r+b") as file:
        file.truncate(11)


def _flip(shards: Path) -> None:
    content = bytearray((shards / "train.bin").read_bytes())
    content[100] ^= 1
    (shards / "train.bin").write_bytes(content)


def _lose(shards: Path) -> None:
    (shards / "held_out.bin").unlink()


def _lose_the_manifest(shards: Path) -> None:
    (shards / "manifest.json").unlink()


def _tear_the_manifest(shards: Path) -> None:
    (shards / "manifest.json").write_bytes((shards / "manifest.json").read_bytes()[:20])


def _a_file_instead(shards: Path) -> None:
    shutil.rmtree(shards)
    shards.write_text("a file")


@pytest.mark.parametrize(
    "damage", [_empty, _cut, _flip, _lose, _lose_the_manifest, _tear_the_manifest, _a_file_instead]
)
def test_damaged_shards_are_made_anew(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    spec = DataSpec(source=str(write_text(tmp_path / "text")), held_out=0.2)
    first = prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    expected = first.train.copy(), first.held_out.copy()
    (shards,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    damage(shards)
    again = prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    assert np.array_equal(again.train, expected[0]) and np.array_equal(again.held_out, expected[1])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # hivemind renames the level
    assert str(shards) in caplog.text and "is made anew" in caplog.text
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {shards.name, f"{shards.name}.lock"}
    caplog.clear()
    prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    assert not caplog.records


def test_of_large_shards_only_the_sizes_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DataSpec(source=str(write_text(tmp_path / "text")))
    prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)

    def unread(path: Path) -> str:
        raise AssertionError(path)

    monkeypatch.setattr(data, "DIGEST_UP_TO", 1000)
    monkeypatch.setattr(data, "_digest", unread)
    assert len(prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet).train) > 1000


def test_shards_that_may_not_be_read_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DataSpec(source=str(write_text(tmp_path / "text")))
    prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    before = sorted((tmp_path / "cache").rglob("*"))

    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(data, "_digest", refuse)
    with pytest.raises(DataError, match=r"cannot read the tokenized data in .* \(Permission denied\)"):
        prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    assert sorted((tmp_path / "cache").rglob("*")) == before


def test_a_killed_tokenization_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DataSpec(source=str(write_text(tmp_path / "text")))

    def fails(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(KeyboardInterrupt):
        prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    monkeypatch.undo()
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())
    assert len(prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet).train) > 1000


def test_stdlib_is_a_few_megabytes_of_sources() -> None:
    sizes = [len(text) for text in texts(DataSpec())]
    assert 2e6 < sum(sizes) < 2e7 and len(sizes) > 100


def test_one_large_file_still_gives_both_splits(tmp_path: Path) -> None:
    text = "".join(f"line {number} is here\n" for number in range(20_000))
    (tmp_path / "big.txt").write_text(text)
    spec = DataSpec(source=str(tmp_path / "big.txt"), held_out=0.1)
    shards = prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    assert len(shards.held_out) > 1000
    pieces = bytes(shards.train).split(b"\0")[:-1] + bytes(shards.held_out).split(b"\0")[:-1]
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert sum(map(len, pieces)) == len(text)


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def _no_text_folder(tmp: Path) -> str:
    (tmp / "pictures").mkdir()
    (tmp / "pictures" / "a.png").write_bytes(b"\x89PNG")
    return str(tmp / "pictures")


FAULTS: list[tuple[Callable[[Path], str], str]] = [
    (lambda tmp: str(tmp / "nowhere"), r"nowhere does not exist; correct data\.source or --data"),
    (_no_text_folder, r"pictures holds no \.txt, \.md, .* file; point data\.source at text"),
    (lambda tmp: _write(tmp / "a.csv", b"x"), r"a\.csv is none of \.txt"),
    (lambda tmp: _write(tmp / "empty.txt", b" \n"), r"empty\.txt holds no text"),
    (
        lambda tmp: _write(tmp / "a.jsonl", b'{"text": "x"}\n{"body": "x"}\n'),
        r'a\.jsonl, line 2: no field "text" \(found: body',
    ),
    (lambda tmp: _write(tmp / "a.jsonl", b'{"text": 3}\n'), r"line 1: field \"text\" is int, not text"),
    (lambda tmp: _write(tmp / "a.jsonl", b'{"text": "\xff"}\n'), r"line 1: not UTF-8 \(byte 11\)"),
    (lambda tmp: _write(tmp / "a.jsonl", b"oops\n"), r"line 1: not JSON"),
    (lambda tmp: _write(tmp / "a.jsonl", b"[1]\n"), r"line 1: no field"),
    (lambda tmp: _write(tmp / "a.parquet", b"oops"), r"a\.parquet: not a readable Parquet file"),
]


@pytest.mark.parametrize(("source", "sentence"), FAULTS)
def test_a_fault_of_the_source_is_one_sentence(tmp_path: Path, source: Callable[[Path], str], sentence: str) -> None:
    path = source(tmp_path)
    if path.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=sentence) as caught:
        prepare(DataSpec(source=path), ByteTokenizer(), tmp_path / "cache", quiet)
    assert "\n" not in str(caught.value)
    assert not any(path.is_dir() for path in (tmp_path / "cache").glob("*"))


def test_jsonl_gives_its_rows(tmp_path: Path) -> None:
    rows = ["one", "zwei é", "three"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": row}) for row in rows), encoding="utf-8")
    assert texts(DataSpec(source=str(tmp_path / "a.jsonl"), text_field="body")) == [row.encode() for row in rows]


def test_parquet_gives_its_rows(tmp_path: Path) -> None:
    rows = ["one", "zwei é", "three"]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": rows}), tmp_path / "a.parquet")
    found = texts(DataSpec(source=str(tmp_path / "a.parquet"), text_field="body"))
    assert found == [row.encode() for row in rows]


@pytest.mark.parametrize(("name", "source"), [("datasets", "datasets:some/name"), ("pyarrow", "a.parquet")])
def test_a_missing_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x")
    real = builtins.__import__

    def without(wanted: str, *args: Any, **kwargs: Any) -> Any:
        if wanted.split(".")[0] == name:
            raise ImportError(f"No module named {name!r}")
        return real(wanted, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    where = source if source.startswith("datasets:") else str(tmp_path / source)
    with pytest.raises(DataError, match=r'pip install "peerloom\[datasets\]"'):
        texts(DataSpec(source=where))


def test_too_little_text_names_the_numbers(tmp_path: Path) -> None:
    spec = DataSpec(source=str(write_text(tmp_path / "text", documents=6)), sequence_length=2000, held_out=0.4)
    shards = prepare(spec, ByteTokenizer(), tmp_path / "cache", quiet)
    with pytest.raises(DataError, match=r"too little text: \d+ training tokens where one batch takes 16008"):
        check_enough(shards, spec, batch=8)
    check_enough(shards, replace(spec, sequence_length=16), batch=2)


def test_a_cache_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match="cannot write tokenized data"):
        prepare(DataSpec(source=str(write_text(tmp_path / "text"))), ByteTokenizer(), tmp_path / "cache", quiet)


TOKENS = np.arange(5000, dtype=np.uint16)


def test_a_batch_is_a_function_of_seed_peer_and_index() -> None:
    batches = Batches(TOKENS, 7, "peer-a", batch=4, length=16)
    assert batches[3].shape == (4, 17) and batches[3].dtype == np.int64
    assert np.array_equal(batches[3], Batches(TOKENS, 7, "peer-a", batch=4, length=16)[3])
    assert all(np.array_equal(np.diff(row), np.ones(16)) for row in batches[3])
    others = [batches[4], Batches(TOKENS, 8, "peer-a", 4, 16)[3], Batches(TOKENS, 7, "peer-b", 4, 16)[3]]
    assert not any(np.array_equal(batches[3], other) for other in others)


def test_batches_are_the_same_on_every_machine() -> None:
    starts = Batches(TOKENS, 1, "peer-a", batch=3, length=4)[2**40][:, 0]
    assert starts.tolist() == [1989, 4632, 4554]


def test_windows_reach_both_ends() -> None:
    batches = Batches(TOKENS[:20], 1, "peer-a", batch=8, length=16)
    starts = {int(row[0]) for index in range(20) for row in batches[index]}
    assert starts == {0, 1, 2, 3}
