"""How long ranks of MatrixFSDP wait for each other, and in what memory, told without any: all else is made up."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from peerloom.optim.matrix_fsdp import RankLost, deadline, shard
from peerloom.optim.matrix_fsdp.links import Links, Pending

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


def test_groups_of_nccl_take_the_limit_that_gloo_s_waits_have(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(shard, "_set_pg_timeout", lambda timeout, group: limits.append((timeout, group)))
    for on_gloo in (False, True):
        shard._watch_over(SimpleNamespace(size=lambda: 1), [links_of(on_gloo=on_gloo)], None)  # type: ignore[arg-type]
    assert limits == [(MINUTE, "group")]
