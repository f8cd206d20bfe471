"""Who hears how a node of this process fares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peerloom.protocol.types import NodeStatus, PeerId, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Where a node can be found."""

    peer_id: PeerId
    run_id: RunId
    invites: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """`on_joinable` is called when others can join, `on_started` after the first optimizer step with the seconds of
    each phase, `on_said` with a sentence for the terminal, as of what joining cost."""

    on_joinable: Callable[[NodeInfo], None]
    on_started: Callable[[list[tuple[str, float]]], None]
    on_status: Callable[[NodeStatus], None]
    on_said: Callable[[str], None] = lambda sentence: None
