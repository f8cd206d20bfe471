"""A pipeline of stage machines without tensors; frames arrive and work ends in any order that is lawful."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from peerloom.protocol import stage_effects as effects
from peerloom.protocol import stage_events as events
from peerloom.protocol.ledger import Ledger, Microbatch
from peerloom.protocol.spec_pipeline import PipelineSpec
from peerloom.protocol.stages import StageMachine
from peerloom.protocol.types import PeerId


def name(stage: int, replica: int = 0) -> PeerId:
    """The peer that hosts a stage."""
    return PeerId(f"stage-{stage}-{replica}")


@dataclass
class Host:
    """One node: its machine and what the fabric saw it do."""

    peer: PeerId
    machine: StageMachine
    alive: bool = True
    running: effects.StageEffect | None = None
    trained: Counter[Microbatch] = field(default_factory=Counter)
    versions: list[tuple[int, int]] = field(default_factory=list)  # (update, version), in order
    reports: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    blamed: list[effects.Blame] = field(default_factory=list)
    pending: dict[int, list[Microbatch]] = field(default_factory=dict)
    saved: tuple[int, dict[int, tuple[int, list[int]]]] = (0, {})


class Fabric:
    """All hosts of a run; frames of a link arrive in order, everything else as `rng` says."""

    def __init__(self, spec: PipelineSpec, *, limit: int | None = None, held_out: int = 0, seed: int = 0) -> None:
        self.spec, self.limit, self.held_out = spec, limit, held_out
        self.rng = random.Random(seed)
        self.now = 0.0
        self.hosts: dict[PeerId, Host] = {}
        self.links: dict[tuple[PeerId, PeerId], deque[events.StageEvent]] = {}  # (from, to)
        self.lose: Callable[[events.StageEvent], bool] = lambda event: False
        self.twice: Callable[[events.StageEvent], bool] = lambda event: False

    def add(self, stage: int, replica: int = 0, *, version: int = 0, ledger: Ledger | None = None) -> Host:
        """A node takes a stage and is linked to its neighbours."""
        peer = name(stage, replica)
        machine = StageMachine(
            self.spec,
            stage,
            first_version=version,
            ledger=ledger,
            lane=replica if stage == 0 else 0,
            held_out=self.held_out,
            limit=self.limit,
            updates=self.limit,
        )
        host = self.hosts[peer] = Host(peer, machine)
        for other in list(self.hosts.values()):
            if not other.alive:
                continue
            if other.machine.stage == stage - 1:
                self.link(other.peer, peer)
            elif other.machine.stage == stage + 1:
                self.link(peer, other.peer)
        self.feed(peer, events.Ticked())
        return host

    def link(self, up: PeerId, down: PeerId) -> None:
        """Opens, or opens again, the link from a host to one of the next stage."""
        self.links[up, down], self.links[down, up] = deque(), deque()
        self.feed(up, events.DownstreamOpened(down, 0))
        self.feed(down, events.UpstreamOpened(up))

    def cut(self, up: PeerId, down: PeerId) -> None:
        """Breaks a link: what is on the way is lost."""
        if self.links.pop((up, down), None) is not None:
            del self.links[down, up]
            self.feed(up, events.DownstreamLost(down))
            self.feed(down, events.UpstreamLost(up))

    def kill(self, peer: PeerId) -> Host:
        """Ends a host and its links."""
        host = self.hosts.pop(peer)
        host.alive = False
        for up, down in list(self.links):
            if peer in (up, down) and (up, down) in self.links:
                del self.links[up, down]
                other = down if up == peer else up
                if other in self.hosts:
                    lost = events.UpstreamLost(peer) if up == peer else events.DownstreamLost(peer)
                    self.feed(other, lost)
        return host

    def feed(self, peer: PeerId, event: events.StageEvent) -> list[effects.StageEffect]:
        """Gives a host an event and carries out what it asks for."""
        host = self.hosts.get(peer)
        if host is None:
            return []
        out = host.machine.handle(event, self.now)
        for effect in out:
            self._perform(host, effect)
        return out

    def _perform(self, host: Host, effect: effects.StageEffect) -> None:
        match effect:
            case effects.RunForward(_, version, update):
                if update is not None:
                    host.versions.append((update, version))
                host.running = effect
            case effects.RunBackward() | effects.RunUpdate() | effects.RunSave():
                host.running = effect
            case effects.SendActivation(peer, microbatch, version):
                self._send(host.peer, peer, events.ActivationReceived(host.peer, microbatch, version))
            case effects.SendGradient(peer, microbatch, version, loss):
                self._send(host.peer, peer, events.GradientReceived(host.peer, microbatch, version, loss))
            case effects.SendScore(peer, microbatch, version, loss):
                self._send(host.peer, peer, events.ScoreReceived(host.peer, microbatch, version, loss))
            case effects.SendCredit(peer, count):
                self._send(host.peer, peer, events.CreditReceived(host.peer, count))
            case effects.Blame():
                host.blamed.append(effect)
            case effects.ReportTrained(_, loss):
                host.reports.append(loss)
            case effects.ReportHeldOut(loss):
                host.held_out.append(loss)

    def _send(self, sender: PeerId, to: PeerId, event: events.StageEvent) -> None:
        queue = self.links.get((sender, to))
        if queue is not None and not self.lose(event):
            queue.append(event)
            if self.twice(event):
                queue.append(event)

    def step(self) -> bool:
        """One arrival or one end of work, chosen at random; False when nothing can happen."""
        arrivals = [pair for pair, queue in self.links.items() if queue]
        workers = [host for host in self.hosts.values() if host.running is not None]
        if not arrivals and not workers:
            return False
        choice = self.rng.randrange(len(arrivals) + len(workers))
        self.now += 0.001
        if choice < len(arrivals):
            self._arrive(*arrivals[choice])
        else:
            self._finish(workers[choice - len(arrivals)])
        return True

    def _arrive(self, sender: PeerId, to: PeerId) -> None:
        """The next frame of a link; an answer has gone out when it is taken, and one that comes twice went out once."""
        queue = self.links[sender, to]
        event = queue.popleft()
        if isinstance(event, events.GradientReceived | events.ScoreReceived) and event not in list(queue)[:1]:
            self.feed(sender, events.AnswerSent(to))
        self.feed(to, event)

    def _finish(self, host: Host) -> None:
        running, host.running = host.running, None
        match running:
            case effects.RunForward(microbatch, _, update):
                last = host.machine.stage == self.spec.stages - 1
                if update is not None:
                    host.pending.setdefault(update, []).append(microbatch)
                self.feed(host.peer, events.ForwardDone(microbatch, 1.0 + microbatch.index if last else None))
            case effects.RunBackward(microbatch):
                self.feed(host.peer, events.BackwardDone(microbatch))
            case effects.RunUpdate(update):
                host.trained.update(host.pending.pop(update))
                self.feed(host.peer, events.UpdateDone(update))
            case effects.RunSave(ledger):
                host.saved = (host.machine.applied, ledger)
                self.feed(host.peer, events.SaveDone())

    def run(self, steps: int = 10**6) -> None:
        """Steps until nothing can happen."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError(f"still busy after {steps} steps")


def pipeline(spec: PipelineSpec, **options: int) -> Fabric:
    """One node a stage."""
    fabric = Fabric(spec, **options)
    for stage in range(spec.stages):
        fabric.add(stage)
    return fabric
