"""The flood's log: what was appended is there again, whatever was torn off or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerloom.node.flood_log import FloodLog
from peerloom.protocol.errors import StorageError
from peerloom.protocol.flood_messages import Batch, Mark, Proof, Segment, Snapshot
from tests.unit.protocol.flood_fabric import RUN, peer

OWN = peer(0)
ITEMS = [Segment(Batch(peer(at % 3), at, at, (at, -at)), bytes([at]) * 64, bytes(16)) for at in range(10)]
PROOF = Proof(ITEMS[0], ITEMS[3])
SNAPSHOT = Snapshot((Mark(peer(1), 5, 5, bytes(16), bytes(64)),))


def written(folder: Path, *items: Segment | Proof) -> Path:
    log = FloodLog(folder, RUN, OWN)
    for item in items:
        log.append(item)
    log.sync()
    log.close()
    return folder / "flood.log"


def read(folder: Path) -> FloodLog:
    log = FloodLog(folder, RUN, OWN)
    log.close()
    return log


def test_a_log_gives_back_what_was_appended_over_several_lives(tmp_path: Path) -> None:
    written(tmp_path, *ITEMS[:5], PROOF)
    written(tmp_path, *ITEMS[5:])
    log = read(tmp_path)
    assert log.items == [*ITEMS[:5], PROOF, *ITEMS[5:]]
    assert (log.state, log.note) == (None, "")


def test_a_log_torn_at_any_byte_keeps_all_whole_records_and_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path, *ITEMS[:3])
    whole = path.read_bytes()
    ends = []
    for count in range(4):
        folder = tmp_path / str(count)
        folder.mkdir()
        ends.append(len(written(folder, *ITEMS[:count]).read_bytes()))
    for cut in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:cut])
        log = FloodLog(tmp_path, RUN, OWN)
        kept = sum(end <= cut for end in ends) - 1
        assert log.items == ITEMS[:kept]
        assert bool(log.note) == (cut not in ends)
        log.append(ITEMS[9])
        log.close()
        assert read(tmp_path).items == [*ITEMS[:kept], ITEMS[9]]


def test_a_flipped_byte_ends_the_log_before_it(tmp_path: Path) -> None:
    path = written(tmp_path, *ITEMS)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    log = read(tmp_path)
    assert 0 < len(log.items) < 10 and log.items == ITEMS[: len(log.items)]
    assert "torn" in log.note


@pytest.mark.parametrize("content", [b"", b"nonsense" * 100])
def test_a_log_of_no_use_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "flood.log"
    path.write_bytes(content)
    assert read(tmp_path).items == []
    assert path.with_suffix(".damaged").exists() == bool(content)
    written(tmp_path, ITEMS[0])
    assert read(tmp_path).items == ITEMS[:1]


def test_another_nodes_log_is_not_ours(tmp_path: Path) -> None:
    written(tmp_path, *ITEMS)
    log = FloodLog(tmp_path, RUN, peer(1))
    log.close()
    assert log.items == [] and "another node's" in log.note


def test_an_adopted_state_comes_back_and_replaces_the_one_before(tmp_path: Path) -> None:
    log = FloodLog(tmp_path, RUN, OWN)
    log.append(ITEMS[0])
    log.adopt(SNAPSHOT, b"first")
    log.append(ITEMS[1])
    log.adopt(SNAPSHOT, b"second")
    log.append(ITEMS[2])
    log.close()
    again = read(tmp_path)
    assert again.items == [ITEMS[0], SNAPSHOT, ITEMS[1], SNAPSHOT, ITEMS[2]]
    assert again.state == b"second"
    assert len(list(tmp_path.glob("*.state"))) == 1


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_log_whose_state_is_lost_is_of_no_use(tmp_path: Path, damage: str) -> None:
    log = FloodLog(tmp_path, RUN, OWN)
    log.adopt(SNAPSHOT, b"sums")
    log.append(ITEMS[0])
    log.close()
    (state,) = tmp_path.glob("*.state")
    state.unlink() if damage == "gone" else state.write_bytes(b"sumz")
    again = read(tmp_path)
    assert again.items == [] and "missing or damaged" in again.note


def test_what_a_disk_takes_in_parts_is_written_whole(tmp_path: Path) -> None:
    log = FloodLog(tmp_path, RUN, OWN)

    class Slow:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def write(self, data: bytes) -> int:
            return self._inner.write(data[:7])  # type: ignore[attr-defined,no-any-return]

    inner, log._file = log._file, Slow(log._file)  # type: ignore[assignment]
    log.append(ITEMS[0])
    log._file = inner
    log.append(ITEMS[1])
    log.close()
    assert read(tmp_path).items == list(ITEMS[:2])


def test_a_disk_that_refuses_is_named_and_half_a_record_does_not_stay(tmp_path: Path) -> None:
    log = FloodLog(tmp_path, RUN, OWN)
    log.append(ITEMS[0])

    class Full:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def write(self, data: bytes) -> int:
            self._inner.write(data[: len(data) // 2])  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")

    inner, log._file = log._file, Full(log._file)  # type: ignore[assignment]
    with pytest.raises(StorageError, match="flood.log: the disk is full"):
        log.append(ITEMS[1])
    log._file = inner
    log.append(ITEMS[2])
    log.close()
    assert read(tmp_path).items == [ITEMS[0], ITEMS[2]]
