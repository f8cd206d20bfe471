"""How long ranks of MatrixFSDP wait for each other, and in what memory, told without any: all else is made up."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerloom.optim.matrix_fsdp import RankLost, deadline, host, shard
from peerloom.optim.matrix_fsdp.links import Links, Pending
from peerloom.optim.matrix_fsdp.words import Words, close_all

MINUTE = timedelta(seconds=60)


def links_of(*, on_gloo: bool) -> Links:
    """Of rank 7 with rank 5, without a group."""
    links = Links.__new__(Links)
    links.timeout, links.on_gloo, links.ranks, links.group = MINUTE, on_gloo, [5, 7], "group"  # type: ignore[assignment]
    links._lifeline = None
    return links


def test_transfers_of_one_wait_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [100.0], list[float]()
    monkeypatch.setattr(deadline, "monotonic", lambda: now[0])

    class Slow:
        def wait(self, timeout: timedelta) -> None:
            given.append(timeout.total_seconds())
            if given[-1] < 20:
                raise RuntimeError("Timed out")
            now[0] += 20

    with pytest.raises(RankLost, match="rank 5 did not answer in gathering: .*Timed out"):
        Pending(links_of(on_gloo=True), "gathering", [(0, Slow()) for _ in range(6)]).wait()
    assert given == [50, 30, 10], "what is left of the minute is for the roll call"


def test_what_another_process_has_open_is_looked_at_before_it_is_opened(tmp_path: Path) -> None:
    """Opening the FIFO would wait for its other end for ever."""
    os.mkfifo(tmp_path / "pipe")
    waiting = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="is not what another rank has: it runs on another host or in a container"):
            host._open(os.getpid(), waiting, "/memfd:peerloom-board (deleted)", os.O_WRONLY)
    finally:
        os.close(waiting)
    own, other = host._Ends(), host._Ends()
    group: Any = SimpleNamespace(rank=0, world_size=2)
    try:
        own.make(group)
        other.make(group)
        offer = json.loads(own.offer())
        with pytest.raises(OSError, match="the first rank's memory is another"):
            host._Ends().open([offer | {"nonce": other.nonce}, {}], 1)
    finally:
        for ends in (own, other):
            close_all([ends.file, *ends.incoming.values(), *ends.offered.values()])


def test_a_word_that_does_not_come_or_is_another_is_a_loss() -> None:
    links = links_of(on_gloo=True)
    links.timeout = timedelta(seconds=0.06)
    ours, theirs = os.pipe(), os.pipe()
    words = Words(links, {0: ours[0]}, {0: theirs[1]})
    with pytest.raises(RankLost, match="rank 5 did not answer in a pass: .*it said nothing in time"):
        words.meet(3, "a pass")
    assert os.read(theirs[0], 2) == b"\x03"
    os.write(ours[1], b"\x03\x04")
    words.hear(3, "a pass")
    with pytest.raises(RankLost, match="rank 5 is at another point of its pass"):
        words.hear(3, "a pass")
    os.close(ours[1])
    with pytest.raises(RankLost, match="it has closed its end"):
        words.hear(3, "a pass")
    os.close(theirs[0])
    with pytest.raises(RankLost, match="Broken pipe"):
        words.say(3, "a pass")
    words.close()
    for speak in (words.say, words.hear):
        with pytest.raises(RankLost, match="Bad file descriptor"):
            speak(3, "a pass")


def test_groups_of_nccl_take_the_limit_that_gloo_s_waits_have(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(shard, "_set_pg_timeout", lambda timeout, group: limits.append((timeout, group)))
    for on_gloo in (False, True):
        shard._watch_over(SimpleNamespace(size=lambda: 1), [links_of(on_gloo=on_gloo)], None)  # type: ignore[arg-type]
    assert limits == [(MINUTE, "group")]
