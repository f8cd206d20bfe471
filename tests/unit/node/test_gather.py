"""`peer export --from`: a node that hands nothing over, whatever it says, is passed over for the next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerloom.node import gather
from peerloom.node.observer import Observer
from peerloom.protocol.errors import LinkError, NoDonor, PeerloomError, RunMismatch, StorageError, VersionMismatch
from peerloom.protocol.types import PeerId, PeerRecord
from tests.unit.node.wire import record_of

RECORDS = [record_of(PeerId(name), (), b"x", stage=1, stage_role="hosts") for name in ("first", "second")]


def asked(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> list[str]:
    """Has each fetch fail with the next error while there are any; returns the list of those that were asked."""
    names: list[str] = []

    async def fetch(observer: Observer, record: PeerRecord, stage: int, folder: Path) -> None:
        names.append(record.peer_id)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(gather, "_fetch", fetch)
    return names


@pytest.mark.parametrize("kind", [LinkError, NoDonor, RunMismatch, VersionMismatch, TimeoutError])
async def test_a_node_that_names_an_error_is_passed_over_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    names = asked(monkeypatch, [kind("so it says")])
    assert await gather._stage(cast(Observer, None), RECORDS, 1, tmp_path)
    assert names == ["first", "second"]


async def test_a_full_disk_of_our_own_is_told_and_nobody_else_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = asked(monkeypatch, [StorageError("full")])
    with pytest.raises(StorageError):
        await gather._stage(cast(Observer, None), RECORDS, 1, tmp_path)
    assert names == ["first"]


async def test_what_the_transport_raises_for_a_node_of_another_version_comes_this_way(tmp_path: Path) -> None:
    async def refuse(*_: Any) -> PeerloomError:
        raise VersionMismatch("it speaks 7 to 9")

    observer = cast(Observer, SimpleNamespace(transport=SimpleNamespace(open=refuse)))
    assert not await gather._stage(observer, RECORDS, 1, tmp_path)
