"""A swarm of real nodes in one process and in virtual time, with faults on cue and a log of all that was decided.

Everything below the seams is in memory; nodes, trainers, drivers and machines are those of the product. The log holds
each event and effect of each gossip machine, each change of state and each line of a journal, as text with its time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from blake3 import blake3

from peerloom.node import trainer
from peerloom.node.context import Context, NodeSettings
from peerloom.node.facts import Facts
from peerloom.node.journal import Journal
from peerloom.node.memory_discovery import MemoryDiscovery, MemoryRegistry
from peerloom.node.memory_transport import MemoryHub, MemoryTransport
from peerloom.node.memory_worker import MemoryDisk, MemoryWorker
from peerloom.node.node import Node
from peerloom.node.phases import Phases
from peerloom.node.view import SwarmView
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.protocol.effects import Effect
from peerloom.protocol.errors import PeerloomError
from peerloom.protocol.events import Event, PeersChanged
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.peer_id import peer_id_of
from peerloom.protocol.runspec import RunSpec, TrainSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId

LOCAL_STEPS, STEP_S = 10, 0.2  # a round trains two seconds
TIMEOUT_S = 4.0
NOWHERE = Path("nowhere")


def spec(seed: int = 1, **gasloc: Any) -> RunSpec:
    """A run's spec with short rounds."""
    table = {"local_steps": LOCAL_STEPS, "match_timeout_s": TIMEOUT_S, "max_round_skew": 3, **gasloc}
    return RunSpec(seed=seed, train=TrainSpec(eval_every_rounds=1), gasloc=GaslocSpec(**table))


def identity(index: int) -> PeerId:
    """Node `index`'s peer id: well formed, and the same each time."""
    return peer_id_of(hashlib.sha256(f"node {index}".encode()).digest())


@dataclass(kw_only=True)
class Plan:
    """What a swarm is made of; the functions are of a node's index."""

    count: int
    seed: int = 1
    spec: RunSpec = field(default_factory=spec)
    step_s: Callable[[int], float] = lambda index: STEP_S
    start_s: Callable[[int], float] = lambda index: 0.0  # when start_all() starts it
    worker: Callable[..., MemoryWorker] = MemoryWorker
    worker_start_s: float = 0.5
    latency_s: float = 0.02
    bandwidth: float | None = None
    checkpoint_every_s: float = 10.0
    donor_patience_s: float = 60.0
    home: Path = NOWHERE  # of what workers leave on a real disk


@dataclass(kw_only=True)
class Member:
    """One identity over all its lives: what its disk and its journal hold, and its present life."""

    index: int
    peer_id: PeerId
    clock: VirtualClock
    disk: MemoryDisk = field(default_factory=MemoryDisk)
    lives: int = 0
    rounds: list[dict[str, Any]] = field(default_factory=list)
    adopted: list[dict[str, Any]] = field(default_factory=list)
    states: list[tuple[float, str]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)  # of the lives that are over
    workers: list[MemoryWorker] = field(default_factory=list)
    failure: BaseException | None = None
    context: Context = None  # type: ignore[assignment]  # set with the first life
    node: Node = None  # type: ignore[assignment]
    transport: MemoryTransport = None  # type: ignore[assignment]
    running: asyncio.Task[None] | None = None

    @property
    def facts(self) -> Facts:
        return self.context.facts

    @property
    def worker(self) -> MemoryWorker:
        """The newest."""
        return self.workers[-1]

    def count(self, metric: str) -> float:
        """A counter, summed over all lives."""
        return self.counters[metric] + (self.facts.counters.get(metric, 0.0) if self.running else 0.0)


class Swarm:
    """Makes, starts, kills, drains nodes; `log` grows, `errors` must stay empty."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.log: list[str] = []
        self.errors: list[str] = []
        self.loop = asyncio.get_running_loop()
        self.clock = VirtualClock(self.loop)
        self.hub = MemoryHub(
            self.clock, random.Random(f"{plan.seed}:hub"), latency_s=plan.latency_s, bandwidth=plan.bandwidth
        )
        self.registry = MemoryRegistry(self.clock)
        self.members = [self._member(index) for index in range(plan.count)]
        self._starting: list[asyncio.Task[None]] = []

    def _member(self, index: int) -> Member:
        return Member(index=index, peer_id=identity(index), clock=VirtualClock(self.loop))

    # the log

    def note(self, peer: PeerId, kind: str, what: object) -> None:
        """Adds a line."""
        self.log.append(f"{self.clock.monotonic():.6f} {peer[-6:]} {kind} {what}")

    def handled(self, peer: PeerId, event: Event, effects: Iterable[Effect]) -> None:
        """Adds an event of a machine, and its effects."""
        if isinstance(event, PeersChanged):
            view = " ".join(f"{seen.peer[-6:]}:{seen.round}" for seen in event.peers)
            self.note(peer, "event", f"PeersChanged {view}")
        else:
            self.note(peer, "event", event)
        for effect in effects:
            self.note(peer, "effect", effect)

    def text(self) -> str:
        return "\n".join(self.log) + "\n"

    def digest(self) -> str:
        """BLAKE3 of the log."""
        return blake3(self.text().encode()).hexdigest()

    # lives

    def _live(self, member: Member, **settings: Any) -> None:
        plan, member.lives = self.plan, member.lives + 1
        rng = random.Random(f"{plan.seed}:{member.index}:{member.lives}")
        run_id, spec_hash = plan.spec.run_id, plan.spec.spec_hash()
        member.transport = self.hub.transport(member.peer_id, run_id=run_id, spec_hash=spec_hash)
        facts = Facts(
            peer_id=member.peer_id,
            name=f"node-{member.index}",
            role="trainer",
            version="0",
            instance=rng.randbytes(8).hex(),
            cert_der=member.transport.cert_der,
            clock=member.clock,
            bytes_moved=member.transport.bytes_moved,
            started_at=member.clock.wall(),
        )
        discovery = MemoryDiscovery(self.registry, member.peer_id, run_id)
        view = SwarmView(discovery, facts, plan.spec, member.clock)
        facts.changed = lambda: self._changed(member, view)
        member.context = Context(
            settings=NodeSettings(
                run_dir=plan.home / str(member.index),
                cache_dir=NOWHERE,
                checkpoint_every_s=plan.checkpoint_every_s,
                donor_patience_s=plan.donor_patience_s,
                **settings,
            ),
            spec=plan.spec,
            facts=facts,
            clock=member.clock,
            rng=rng,
            transport=member.transport,
            view=view,
            phases=Phases(member.clock),
            journal=_LoggedJournal(self, member),
            progress=lambda what, share: None,
        )
        member.node = Node(member.context, discovery, lambda: self._worker(member))

    def _worker(self, member: Member) -> MemoryWorker:
        plan = self.plan
        worker = plan.worker(step_s=plan.step_s(member.index), start_s=plan.worker_start_s, disk=member.disk)
        member.workers.append(worker)
        return worker

    def _changed(self, member: Member, view: SwarmView) -> None:
        facts = member.facts
        member.states.append((self.clock.monotonic(), facts.state))
        self.note(member.peer_id, "state", f"{facts.state} round {facts.round}: {facts.reason}")
        view.tell()

    async def _run(self, member: Member) -> None:
        try:
            await member.node.run()
        except PeerloomError as error:
            member.failure = error
        except Exception as error:
            member.failure = error
            self.errors.append("".join(traceback.format_exception(error)))
        finally:
            await member.transport.stop()
            member.counters.update(member.facts.counters)
            self.note(member.peer_id, "end", f"{member.facts.state} round {member.facts.round} {member.failure!r}")
            member.running = None

    # what a scenario calls

    def start(self, index: int, **settings: Any) -> Member:
        """A new life of node `index`; it expects peers unless told otherwise."""
        member = self.members[index]
        assert member.running is None, f"node {index} runs already"
        self.registry.cut.discard(member.peer_id)
        self._live(member, **{"expect_peers": index > 0, **settings})
        member.running = asyncio.create_task(self._run(member), name=f"node-{index}")
        return member

    def start_all(self) -> None:
        """Each at its time."""
        for member in self.members:
            self.loop.call_later(self.plan.start_s(member.index), self.start, member.index)

    async def kill(self, index: int) -> None:
        """A kill -9: streams reset, nothing saved, nothing withdrawn."""
        member = self.members[index]
        self.registry.cut.add(member.peer_id)
        self.hub.kill(member.peer_id)
        await self._cancel(member)

    async def drain(self, *indices: int) -> None:
        """What SIGTERM does; returns when the nodes have ended."""
        members = [self.members[index] for index in (indices or range(self.plan.count))]
        running = [member.running for member in members if member.running is not None]
        for member in members:
            if member.running is not None:
                member.node.drain()
        if running:
            await asyncio.wait(running)

    async def _cancel(self, member: Member) -> None:
        if member.running is not None:
            running = member.running
            running.cancel()
            await asyncio.wait((running,))

    def part(self, left: Iterable[int], right: Iterable[int], *, healed: bool = False) -> None:
        """Parts two groups from each other, or heals them; records still reach both, as over a DHT's third node."""
        change = self.hub.heal if healed else self.hub.partition
        for a in left:
            for b in right:
                change(identity(a), identity(b))

    async def until(
        self, what: str, holds: Callable[[], bool], *, within_s: float = 600.0, every_s: float = 0.25
    ) -> None:
        """Waits for a condition; fails after `within_s` of virtual time."""
        end = self.clock.monotonic() + within_s
        while not holds():
            assert not self.errors, self.errors[0]
            assert self.clock.monotonic() < end, f"not within {within_s:g} s: {what}; {self.summary()}"
            await asyncio.sleep(every_s)

    async def until_round(self, round: int, *indices: int, within_s: float = 600.0) -> None:
        """Waits until each of these nodes (default: all) has finished `round` rounds."""
        members = [self.members[index] for index in (indices or range(self.plan.count))]
        await self.until(
            f"round {round}",
            lambda: all(member.running is not None and member.facts.round >= round for member in members),
            within_s=within_s,
        )

    def summary(self) -> str:
        """One line for a failed assertion."""
        lived = [member for member in self.members if member.lives]
        return "; ".join(f"{m.index}: {m.facts.state}/{m.facts.round} {m.failure or ''}" for m in lived)

    # what a test reads

    def spread(self) -> float:
        """Largest minus smallest held-out loss."""
        losses = [member.facts.loss or 0.0 for member in self.members]
        return max(losses) - min(losses)

    def alone_share(self, first: int = 0, last: int = 10**9) -> float:
        """Share of rounds `first` to `last` - 1 that went without a partner."""
        rounds = [line for member in self.members for line in member.rounds if first <= line["round"] < last]
        return sum(line["partner"] is None for line in rounds) / len(rounds)

    def longest_wait(self) -> float:
        """The longest time that any node stood at an exchange point."""
        return max((line["exchange_s"] for member in self.members for line in member.rounds), default=0.0)

    def one_sided(self) -> int:
        """Edges that stand in one node's journal alone."""
        edges: Counter[tuple[PeerId, int, PeerId, int]] = Counter()
        for member in self.members:
            for line in member.rounds:
                if line["partner"] is not None:
                    edges[(member.peer_id, line["round"], line["partner"], line["partner_round"])] += 1
        return sum(abs(n - edges[(b, q, a, r)]) for (a, r, b, q), n in list(edges.items()))

    def total(self, metric: str) -> float:
        """A counter over all nodes."""
        return sum(member.count(metric) for member in self.members)

    async def finish(self) -> None:
        """Ends whatever runs, and finds out what was left behind."""
        for member in self.members:
            await self._cancel(member)
        await asyncio.sleep(60.0)  # what waits for a timeout ends by then
        left = sorted(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())
        self.errors += [f"task left: {name}" for name in left]


class _LoggedJournal(Journal):
    """Writes into the swarm's log and the member's books."""

    def __init__(self, swarm: Swarm, member: Member) -> None:
        super().__init__(None, member.clock.wall)
        self._swarm, self._member = swarm, member

    def write(self, kind: str, **values: Any) -> None:
        self._swarm.note(self._member.peer_id, "journal", f"{kind} {values}")
        if kind == "round":
            self._member.rounds.append({"at": self._swarm.clock.monotonic(), "life": self._member.lives, **values})
        elif kind == "adopted":
            self._member.adopted.append({"at": self._swarm.clock.monotonic(), **values})


class _ErrorLog(logging.Handler):
    """Errors that are logged and not raised are errors all the same."""

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(logging.ERROR)
        self._swarm = swarm

    def emit(self, record: logging.LogRecord) -> None:
        self._swarm.errors.append(logging.Formatter().format(record))


def _tapped(swarm: Swarm) -> type[GossipMachine]:
    class Tapped(GossipMachine):
        def handle(self, event: Event, now: float) -> list[Effect]:
            effects = super().handle(event, now)
            self.check_invariants()
            swarm.handled(self._self_id, event, effects)
            return effects

    return Tapped


def play(plan: Plan, scenario: Callable[[Swarm], Awaitable[None]], kind: type[Swarm] = Swarm) -> Swarm:
    """Runs a scenario on a fresh swarm to its end; fails on any error nobody raised and on any task left."""

    async def main() -> Swarm:
        swarm = kind(plan)
        swarm.loop.set_exception_handler(lambda loop, context: swarm.errors.append(str(context)))
        handler = _ErrorLog(swarm)
        logging.getLogger("peerloom").addHandler(handler)
        try:
            with patch.object(trainer, "GossipMachine", _tapped(swarm)):
                await scenario(swarm)
                await swarm.finish()
        finally:
            logging.getLogger("peerloom").removeHandler(handler)
        return swarm

    swarm = run_virtual(main)
    assert not swarm.errors, "\n".join(swarm.errors[:5])
    return swarm
