"""A swarm of real SeedFlow nodes in one process and in virtual time; only seams, keys and the model are in memory."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from peerloom.node.context import Context, NodeSettings
from peerloom.node.facts import Facts
from peerloom.node.flood_log import FloodLog
from peerloom.node.journal import Journal
from peerloom.node.memory_discovery import MemoryDiscovery, MemoryRegistry
from peerloom.node.memory_seedflow import MemorySeedflow, Place, add, written
from peerloom.node.memory_transport import MemoryHub, MemoryTransport
from peerloom.node.node import Node
from peerloom.node.phases import Phases
from peerloom.node.view import SwarmView
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.protocol.errors import PeerloomError
from peerloom.protocol.flood_messages import Segment
from peerloom.protocol.peer_id import peer_id_of
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.types import PeerId


def identity(index: int) -> PeerId:
    return peer_id_of(hashlib.sha256(f"node {index}".encode()).digest())


def sign_as(owner: PeerId, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=64, key=owner.encode()[:64]).digest()


def verify(owner: PeerId, data: bytes, signature: bytes) -> bool:
    return signature == sign_as(owner, data)


def spec(**seedflow: Any) -> RunSpec:
    table = {"max_steps": 200, "period": 50, "eval_every_steps": 50, "rate_limit": 1000.0, **seedflow}
    return RunSpec(method="seedflow", seedflow=SeedflowSpec(**table))


class Member:
    """One identity over its lives; its folder is its disk."""

    def __init__(self, swarm: FloodSwarm, index: int) -> None:
        self.swarm, self.index, self.peer_id = swarm, index, identity(index)
        self.folder = swarm.folder / f"node-{index}"
        self.folder.mkdir()
        self.clock = VirtualClock()
        self.counters: Counter[str] = Counter()
        self.journal: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.failure: BaseException | None = None
        self.running: asyncio.Task[None] | None = None
        self.lives = 0
        self.workers: list[MemorySeedflow] = []
        self.node: Node
        self.facts: Facts
        self.transport: MemoryTransport

    def start(self, **settings: Any) -> None:
        """A new life."""
        swarm, self.lives = self.swarm, self.lives + 1
        swarm.registry.cut.discard(self.peer_id)
        rng = random.Random(f"{self.index}:{self.lives}")
        spec = swarm.spec
        self.transport = swarm.hub.transport(self.peer_id, run_id=spec.run_id, spec_hash=spec.spec_hash())
        self.facts = Facts(
            peer_id=self.peer_id,
            name=f"node-{self.index}",
            role="trainer",
            version="0",
            instance=rng.randbytes(8).hex(),
            cert_der=self.transport.cert_der,
            clock=self.clock,
            bytes_moved=self.transport.bytes_moved,
            started_at=self.clock.wall(),
        )
        discovery = MemoryDiscovery(swarm.registry, self.peer_id, spec.run_id)
        view = SwarmView(discovery, self.facts, spec, self.clock)
        self.facts.changed = view.tell
        context = Context(
            settings=NodeSettings(
                run_dir=self.folder, cache_dir=self.folder, expect_peers=self.index > 0, **settings
            ),
            spec=spec,
            facts=self.facts,
            clock=self.clock,
            rng=rng,
            transport=self.transport,
            view=view,
            phases=Phases(self.clock),
            journal=_Journal(self),
            progress=lambda what, share: None,
            say=self.said.append,
            sign=lambda data: sign_as(self.peer_id, data),
            verify=verify,
        )
        self.node = Node(context, discovery, self._worker)
        self.running = asyncio.create_task(self._run(), name=f"node-{self.index}")

    def _worker(self) -> MemorySeedflow:
        step_s, salt = self.swarm.step_s(self.index), str(self.lives)  # no life repeats another's scalars
        self.workers.append(MemorySeedflow(step_s=step_s, start_s=0.5, salt=salt, bare=self.index in self.swarm.bare))
        return self.workers[-1]

    async def _run(self) -> None:
        try:
            await self.node.run()
        except PeerloomError as error:
            self.failure = error
        except Exception as error:
            self.swarm.errors.append("".join(traceback.format_exception(error)))
        finally:
            await self.transport.stop()
            self.counters.update(self.facts.counters)
            self.running = None

    async def kill(self) -> None:
        """A kill -9."""
        self.swarm.registry.cut.add(self.peer_id)
        self.swarm.hub.kill(self.peer_id)
        if (running := self.running) is not None:
            running.cancel()
            await asyncio.wait((running,))

    def items(self) -> list[Segment]:
        """What its log holds of its own."""
        log = FloodLog(self.folder, self.swarm.spec.run_id, self.peer_id)
        log.close()
        return [item for item in log.items if isinstance(item, Segment) and item.batch.origin == self.peer_id]


class _Journal(Journal):
    def __init__(self, member: Member) -> None:
        super().__init__(None, member.clock.wall)
        self._member = member

    def write(self, kind: str, **values: Any) -> None:
        self._member.journal.append((kind, values))


class FloodSwarm:
    """`step_s` is of a node's index."""

    def __init__(
        self, folder: Path, count: int, spec: RunSpec, step_s: Callable[[int], float] = lambda index: 0.2
    ) -> None:
        self.folder, self.spec, self.step_s = folder, spec, step_s
        self.clock = VirtualClock()
        self.hub = MemoryHub(self.clock, random.Random(1), latency_s=0.02)
        self.registry = MemoryRegistry(self.clock)
        self.errors: list[str] = []
        self.bare: set[int] = set()  # who has no base model
        self.members = [Member(self, index) for index in range(count)]

    def central(self, without: tuple[int, ...] = ()) -> str:
        """The state hash of one run over all messages that their origins have in their logs."""
        sums: Counter[Place] = Counter()
        for member in [member for member in self.members if member.index not in without]:
            add(sums, [item.batch for item in member.items()], self.spec.seedflow.period)
        return hashlib.sha256(written(sums)).hexdigest()

    async def until(self, what: str, holds: Callable[[], bool], within_s: float = 600.0) -> None:
        """Waits for a condition."""
        end = self.clock.monotonic() + within_s
        while not holds():
            assert not self.errors, self.errors[0]
            states = [(m.facts.state, m.facts.step, m.facts.messages, m.failure) for m in self.members if m.lives]
            assert self.clock.monotonic() < end, f"not within {within_s:g} s: {what}; {states}"
            await asyncio.sleep(0.25)

    async def finish(self) -> None:
        """Ends whatever runs; fails when something is left."""
        for member in self.members:
            if member.running is not None:
                member.running.cancel()
                await asyncio.wait((member.running,))
        await asyncio.sleep(60.0)
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left
        assert not self.errors, self.errors[0]


class _Errors(logging.Handler):
    def __init__(self, swarm: FloodSwarm) -> None:
        super().__init__(logging.ERROR)
        self._swarm = swarm

    def emit(self, record: logging.LogRecord) -> None:
        self._swarm.errors.append(logging.Formatter().format(record))


def play(make: Callable[[], FloodSwarm], scenario: Callable[[FloodSwarm], Awaitable[None]]) -> FloodSwarm:
    """Runs a scenario in virtual time; fails on any error nobody raised and on any task left."""

    async def main() -> FloodSwarm:
        swarm = make()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: swarm.errors.append(str(context)))
        handler = _Errors(swarm)
        logging.getLogger("peerloom").addHandler(handler)
        try:
            with patch("os.fsync"):  # no power cuts here, and a disk's time is not virtual
                await scenario(swarm)
                await swarm.finish()
        finally:
            logging.getLogger("peerloom").removeHandler(handler)
        return swarm

    return run_virtual(main)
