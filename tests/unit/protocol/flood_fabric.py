"""Flood machines without a network: a script says what is delivered, lost, repeated, parted or killed."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from peerloom.protocol.effects import Count, SetTimer
from peerloom.protocol.events import TimerFired
from peerloom.protocol.flood import REPAIR_S, FloodMachine
from peerloom.protocol.flood_events import (
    Apply,
    Drop,
    FloodEffect,
    FloodEvent,
    Keep,
    LinkDown,
    LinkUp,
    PeersSeen,
    Received,
    Resync,
    Retract,
    Send,
    StepsDone,
)
from peerloom.protocol.flood_messages import (
    Batch,
    Proof,
    Segment,
    Segments,
    Versions,
    Wants,
    fold,
    origin_key,
    signed_bytes,
)
from peerloom.protocol.peer_id import peer_id_of
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.types import PeerId, RunId

RUN = RunId("0123456789abcdef")
SPEC = SeedflowSpec(max_steps=100_000, period=50, rate_limit=1e6, rate_burst=100_000, neighbours=4)
SEED = 7


def peer(index: int) -> PeerId:
    return peer_id_of(hashlib.sha256(b"peer %d" % index).digest())


def sign_as(owner: PeerId, data: bytes) -> bytes:
    """Stands for Ed25519: as long, and nobody forges it by accident."""
    return hashlib.blake2b(data, digest_size=64, key=owner.encode()[:64]).digest()


def verify(owner: PeerId, data: bytes, signature: bytes) -> bool:
    return signature == sign_as(owner, data)


def machine(own: PeerId, spec: SeedflowSpec = SPEC) -> FloodMachine:
    return FloodMachine(own, spec, RUN, SEED, sign=lambda data: sign_as(own, data), verify=verify)


def signed(batch: Batch, prev: bytes, *, tell: bool = True) -> Segment:
    """A segment as its origin makes it."""
    signature = sign_as(batch.origin, signed_bytes(RUN, batch.origin, batch.end, batch.end_step, fold(prev, batch)))
    return Segment(batch, signature, prev if tell else b"")


class State:
    """What a worker keeps: integer sums by period and coordinate, which the message's seed picks.

    As strict as a worker's: what is taken out must be in.
    """

    def __init__(self) -> None:
        self.sums: Counter[tuple[int, int]] = Counter()
        self.held: set[tuple[PeerId, int]] = set()

    def add(self, batches: Iterable[Batch], sign: int = 1) -> None:
        for batch in batches:
            places = {(batch.origin, at) for at in range(batch.sequence, batch.end)}
            assert not places & self.held if sign > 0 else places <= self.held
            self.held ^= places
            key = origin_key(batch.origin)
            for _, sequence, step, scalar in batch.messages():
                self.sums[(step // SPEC.period, (key ^ sequence * 0x9E3779B97F4A7C15) % 17)] += sign * scalar

    def digest(self) -> bytes:
        return hashlib.sha256(repr(sorted((k, v) for k, v in self.sums.items() if v)).encode()).digest()


@dataclass(slots=True)
class Member:
    own: PeerId
    machine: FloodMachine
    state: State = field(default_factory=State)
    log: list[Segment | Proof] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    step: int = 0
    resync: bool = False
    effects: list[FloodEffect] = field(default_factory=list)


Body = Segments | Versions | Wants | Proof


class Fabric:
    """Members by index; what is sent waits in `wires` until it is delivered."""

    def __init__(self, count: int, rng: random.Random, spec: SeedflowSpec = SPEC) -> None:
        self.rng, self.spec, self.now = rng, spec, 0.0
        self.members = [Member(peer(index), machine(peer(index), spec)) for index in range(count)]
        self.index = {member.own: index for index, member in enumerate(self.members)}
        self.wires: dict[tuple[int, int], deque[Body]] = {}
        self.known: set[int] = set(range(count))
        for index in range(count):
            self.see(index)

    def see(self, index: int) -> None:
        others = tuple(peer(other) for other in sorted(self.known) if other != index)
        self.feed(index, PeersSeen(others))

    def feed(self, index: int, event: FloodEvent) -> None:
        member = self.members[index]
        member.effects = member.machine.handle(event, self.now)
        for effect in member.effects:
            match effect:
                case Keep(item):
                    member.log.append(item)
                case Apply(batches):
                    member.state.add(batches)
                case Retract(batches):
                    member.state.add(batches, -1)
                case Send(to, body):
                    wire = self.wires.get((index, self.index[to]))
                    if wire is not None:
                        assert not isinstance(body, tuple)
                        wire.append(body)  # type: ignore[arg-type]
                case Drop(to, _):
                    self.unlink(index, self.index[to])
                case Resync():
                    member.resync = True
                case Count(metric, amount):
                    member.counts[metric] += int(amount)
                case SetTimer(_, at):
                    assert at == self.now + REPAIR_S
                case _:
                    pass

    def link(self, a: int, b: int) -> None:
        if (a, b) in self.wires:
            return
        self.wires[(a, b)], self.wires[(b, a)] = deque(), deque()
        for one, other in ((a, b), (b, a)):
            self.feed(one, LinkUp(peer(other)))

    def unlink(self, a: int, b: int) -> None:
        if self.wires.pop((a, b), None) is None:
            return
        del self.wires[(b, a)]
        for one, other in ((a, b), (b, a)):
            self.feed(one, LinkDown(peer(other)))

    def steps(self, index: int, count: int) -> None:
        member = self.members[index]
        scalars = tuple(self.rng.randint(-1000, 1000) for _ in range(count))
        batch = Batch(member.own, member.machine.next_sequence, member.step, scalars)
        member.state.add([batch])
        member.step += count
        self.feed(index, StepsDone(batch.step, batch.sequence, scalars))

    def deliver(self, pair: tuple[int, int], *, lose: float = 0.0, repeat: float = 0.0, reorder: bool = False) -> None:
        wire = self.wires.get(pair)
        if not wire:
            return
        at = self.rng.randrange(len(wire)) if reorder else 0
        body = wire[at]
        del wire[at]
        if self.rng.random() < lose:
            return
        times = 2 if self.rng.random() < repeat else 1
        for _ in range(times):
            self.feed(pair[1], Received(peer(pair[0]), body))

    def settle(self, rounds: int = 60) -> None:
        """Everything that is sent arrives, and comparisons go on, until all that are linked are equally far."""
        for _ in range(rounds):
            while busy := [pair for pair, wire in self.wires.items() if wire]:
                self.deliver(self.rng.choice(busy))
            if len({member.machine.versions() for member in self.members if self.linked(member)}) <= 1:
                return
            self.now += REPAIR_S
            for index in range(len(self.members)):
                self.feed(index, TimerFired("repair"))

    def linked(self, member: Member) -> bool:
        return any(self.index[member.own] in pair for pair in self.wires)

    def restart(self, index: int) -> None:
        """A kill, and a new life from the log."""
        for other in range(len(self.members)):
            self.unlink(index, other)
        old = self.members[index]
        fresh = Member(old.own, machine(old.own, self.spec), log=old.log, step=old.step)
        fresh.state.add(fresh.machine.restore(old.log).apply)
        self.members[index] = fresh
        self.see(index)

    def central(self, *, without: Iterable[int] = ()) -> bytes:
        """The digest of one run over all messages that their own origins kept."""
        state, left_out = State(), {peer(index) for index in without}
        for member in self.members:
            for item in member.log:
                if isinstance(item, Segment) and item.batch.origin == member.own and member.own not in left_out:
                    state.add([item.batch])
        return state.digest()
