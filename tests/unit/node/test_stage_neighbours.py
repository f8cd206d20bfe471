"""A link to the next stage whose other end names an error of its own: it ends, and the node goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peerloom.node import stage_neighbours
from peerloom.node.stage_neighbours import StageNeighbours
from peerloom.node.virtual_time import run_virtual
from peerloom.node.worker_seams import WorkerDied
from peerloom.protocol.errors import LinkError, NoDonor, PeerloomError, RunMismatch, VersionMismatch
from peerloom.protocol.stage_messages import StageOpened
from peerloom.protocol.types import PeerId


def link(error: PeerloomError) -> list[str]:
    """What is done about one link on which serving, or the peer, raises `error`."""
    done: list[str] = []

    async def ended(driver_or_stream: object) -> None:
        raise error

    async def note(*what: object) -> Any:
        done.append("checked" if len(what) == 1 else "closed")

    async def sent(body: object) -> None:
        return None

    async def received() -> StageOpened:
        return StageOpened()

    async def opened(record: object, service: object) -> Any:
        return SimpleNamespace(send=sent, receive=received, close=note)

    context: Any = SimpleNamespace(transport=SimpleNamespace(open=opened))
    neighbours = StageNeighbours(context, SimpleNamespace(check=note), SimpleNamespace(wake=lambda: None))  # type: ignore[arg-type]
    driver: Any = SimpleNamespace(machine=SimpleNamespace(stage=0), serve_downstream=ended)
    record: Any = SimpleNamespace(peer_id=PeerId("peer"))
    run_virtual(lambda: neighbours._link(driver, record))
    return done


@pytest.mark.parametrize("error", [LinkError("x"), NoDonor("x"), RunMismatch("x"), VersionMismatch("x")])
def test_what_a_peer_names_ends_the_link_alone(error: PeerloomError) -> None:
    assert link(error) == ["closed", "checked"]


def test_an_end_of_ones_own_is_no_peer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_neighbours, "TICK_S", 0.0)
    with pytest.raises(WorkerDied):
        link(WorkerDied("x"))
