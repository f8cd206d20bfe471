"""What every part of a node shares: its settings, seams and facts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peerloom.node.facts import Facts
from peerloom.node.identity import verify
from peerloom.node.journal import Journal
from peerloom.node.phases import Phases
from peerloom.node.seams import Clock, Transport
from peerloom.node.view import SwarmView
from peerloom.node.worker_seams import WorkerSetup
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerId


def _no_key(data: bytes) -> bytes:
    raise NotImplementedError("this node was made without a key to sign with")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What belongs to this node and not to the run."""

    run_dir: Path
    cache_dir: Path
    data_source: str = ""  # instead of the spec's
    device: str = "cpu"
    devices: tuple[str, ...] = ()  # more than one, instead of `device`
    threads: int = 0
    nice: int = 0
    checkpoint_every_s: float = 60.0
    keep_checkpoints: int = 3
    donor_patience_s: float = 60.0  # a swarm that is starting has no donor yet
    first_view_s: float = 10.0  # how long a joiner waits to see anybody at all
    expect_peers: bool = False  # joined by an invite: somebody must be there
    max_rounds: int | None = None  # stop after so many; None: train on
    stage: int | None = None  # of a pipeline, to host whatever the others do; None: the least served


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Handed to the node, its trainer and its joiner."""

    settings: NodeSettings
    spec: RunSpec
    facts: Facts
    clock: Clock
    rng: random.Random
    transport: Transport
    view: SwarmView
    phases: Phases
    journal: Journal
    progress: Callable[[str, float], None]
    joinable: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda sentence: None  # to whoever started the node
    sign: Callable[[bytes], bytes] = _no_key
    verify: Callable[[PeerId, bytes, bytes], bool] = verify
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    def worker_setup(self, stage: int = 0) -> WorkerSetup:
        """What this node's worker is started with; `stage` is a pipeline's."""
        settings = self.settings
        return WorkerSetup(
            spec=self.spec,
            peer_id=self.facts.peer_id,
            run_dir=settings.run_dir,
            cache_dir=settings.cache_dir,
            data_source=settings.data_source,
            keep_checkpoints=settings.keep_checkpoints,
            device=settings.device,
            devices=settings.devices,
            threads=settings.threads,
            nice=settings.nice,
            stage=stage,
        )
