"""Gossip machines joined in memory: streams ordered in themselves, reordered between each other, that may break.

A plain event loop on virtual time stands in for the node's driver: it keeps a heap of what is due, one FIFO a stream
and direction, and the books by which commits are compared at the end.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from peerloom.protocol import effects as do
from peerloom.protocol import events as ev
from peerloom.protocol import plan
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import ExchangeId, Offer
from peerloom.protocol.pairing import Place
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import PeerId

LAYOUT, PAYLOAD_BYTES = "ab" * 32, 4096
PAYLOAD = "payload"

Message = ev.Event | str


@dataclass
class End:
    """One end of a stream."""

    node: int
    inbox: deque[Message] = field(default_factory=deque)
    last_at: float = 0.0
    open: bool = True
    transferring: bool = False
    sent: bool = False
    received: bool = False
    moved_at: float = 0.0


@dataclass
class Stream:
    """An exchange's stream: `ends[0]` offered."""

    id: ExchangeId
    ends: tuple[End, End]
    broken: bool = False

    def end_of(self, node: int) -> End:
        return self.ends[0] if self.ends[0].node == node else self.ends[1]

    def other(self, node: int) -> End:
        return self.ends[1] if self.ends[0].node == node else self.ends[0]


@dataclass
class Node:
    """A machine and what the fabric knows of it."""

    machine: GossipMachine
    timers: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    scores: Counter[str] = field(default_factory=Counter)
    ready_at: float | None = None
    moving_s: float = 0.0  # of the exchange under way: from Transfer to PayloadsVerified
    transfer_at: float = 0.0
    next: Place | None = None  # what it trains for; None between rounds
    finished: dict[Place, do.FinishRound] = field(default_factory=dict)
    over: int = 0  # rounds
    silent: bool = False  # takes offers in and never answers


class Fabric:
    """`count` nodes that each train and exchange `rounds` rounds, then drain and leave."""

    def __init__(
        self,
        seed: int,
        count: int,
        rounds: int,
        *,
        pairing: str = "rendezvous",
        loss: float = 0.0,
        silent: frozenset[int] = frozenset(),
        match_timeout_s: float = 10.0,
        train_s: float = 3.0,
        **gasloc: object,
    ) -> None:
        self.rng = random.Random(seed)
        self.rounds, self.loss, self.train_s = rounds, loss, train_s
        self.spec = spec = GaslocSpec(pairing=pairing, match_timeout_s=match_timeout_s, **gasloc)  # type: ignore[arg-type]
        self.timeout_s, self.fragments = match_timeout_s, spec.fragments
        self.sizes = sizes = tuple(PAYLOAD_BYTES + piece for piece in range(spec.fragments * plan.pieces(spec)))
        self.ids = [PeerId(f"peer{i}") for i in range(count)]
        self.nodes = [
            Node(
                GossipMachine(peer, spec, 7, random.Random(f"{seed}/{peer}"), LAYOUT, sizes),
                silent=i in silent,
            )
            for i, peer in enumerate(self.ids)
        ]
        self.streams: dict[ExchangeId, Stream] = {}
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = 0
        self.now = 0.0
        self.acknowledged: set[tuple[int, Place]] = set()  # (node, turn) that committed on the accepting side
        self.lost: set[int] = set()
        self.killed: set[int] = set()  # of them, whom a connection reaches no more
        self.forgotten: set[int] = set()  # whose records have expired
        self.log: list[str] = []
        for i in range(count):
            seen = tuple(ev.PeerSeen(p, 0) for p in self.ids if p != self.ids[i])
            self.feed(i, ev.PeersChanged(seen))
            if i not in silent:
                self.start_round(i, 0)

    # time

    def at(self, when: float, job: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (when, self.serial, job))

    def step(self) -> bool:
        """Runs the next thing due; False when there is none."""
        if not self.heap:
            return False
        when, _, job = heapq.heappop(self.heap)
        self.now = max(self.now, when)
        job()
        return True

    def run(self, limit: int = 100_000) -> None:
        """To the end; fails when it does not come."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the swarm does not come to an end")

    # nodes

    def start_round(self, i: int, round: int) -> None:
        self.feed(i, ev.RoundStarted(round))
        self.train_for(i, Place(round), self.train_s)

    def train_for(self, i: int, place: Place, seconds: float) -> None:
        self.nodes[i].next = place
        self.at(self.now + seconds * self.rng.uniform(0.2, 1.5), lambda: self.ready(i, place))

    def in_training(self, i: int) -> bool:
        """Whether node i has local steps to do for its next turn."""
        node = self.nodes[i]
        return not node.silent and node.ready_at is None and node.next is not None

    def ready(self, i: int, place: Place) -> None:
        if self.nodes[i].next == place and self.in_training(i):
            self.nodes[i].ready_at = self.now
            self.feed(i, ev.ProposalReady(*place))

    def feed(self, i: int, event: ev.Event) -> None:
        node = self.nodes[i]
        if i in self.lost or (node.silent and not isinstance(event, ev.PeersChanged)):
            return
        effects = node.machine.handle(event, self.now)
        node.machine.check_invariants()
        self.log.append(f"{self.now:.6f} {i} {event} -> {effects}")
        for effect in effects:
            self.perform(i, effect, effects)

    def perform(self, i: int, effect: do.Effect, beside: list[do.Effect]) -> None:
        node = self.nodes[i]
        match effect:
            case do.SendOffer(exchange_id, peer, round, fragment, leg, weight, send):
                target = self.ids.index(peer)
                self.streams[exchange_id] = Stream(exchange_id, (End(i), End(target)))
                offer = Offer(exchange_id, round, LAYOUT, "fp32", sum(self.sizes[slice(*send)]))
                offer = replace(offer, fragment=fragment, leg=leg, weight=weight)
                self.send(exchange_id, i, ev.OfferReceived(self.ids[i], offer))
            case do.SendHold(exchange_id):
                self.send(exchange_id, i, ev.OfferHeld(exchange_id))
            case do.SendAccept(exchange_id, round):
                self.send(exchange_id, i, ev.OfferAccepted(exchange_id, round))
            case do.SendDecline(exchange_id, reason):
                self.send(exchange_id, i, ev.OfferDeclined(exchange_id, reason), last=True)
            case do.SendCommit(exchange_id):
                self.send(exchange_id, i, ev.CommitReceived(exchange_id))
            case do.SendAck(exchange_id):
                self.send(exchange_id, i, ev.AckReceived(exchange_id), last=True)
            case do.SendWithdraw(exchange_id, reason):
                self.send(exchange_id, i, ev.ExchangeBroken(exchange_id, reason), last=True)
            case do.Transfer(exchange_id, stall_s):
                self.transfer(i, exchange_id, stall_s)
            case do.SetTimer(name, at):
                node.timers[name] = at
                self.at(at, lambda: self.fire(i, name, at))
            case do.CancelTimer(name):
                del node.timers[name]
            case do.Count(metric, amount):
                node.counts[metric] += int(amount)
            case do.ScorePeer(peer, fault):
                node.scores[f"{peer}:{fault}"] += 1
            case do.FinishRound():
                self.finish(i, effect, any(isinstance(other, do.SendAck) for other in beside))

    def fire(self, i: int, name: str, at: float) -> None:
        if self.nodes[i].timers.get(name) == at:
            del self.nodes[i].timers[name]
            self.feed(i, ev.TimerFired(name))

    def finish(self, i: int, effect: do.FinishRound, acknowledged: bool) -> None:
        node = self.nodes[i]
        place = node.next
        assert place is not None and place.round == effect.round
        assert place not in node.finished, f"{place} of node {i} ended twice"
        assert node.ready_at is not None
        waited = self.now - node.ready_at - node.moving_s
        assert waited <= self.timeout_s * (place.leg + 1) + 1e-6, f"node {i} waited {waited} s at {place}"
        assert not node.timers
        node.finished[place] = effect
        node.ready_at, node.moving_s, node.next = None, 0.0, None
        if acknowledged:
            self.acknowledged.add((i, place))
        if place.leg + 1 < node.machine.legs(place.fragment):
            return self.train_for(i, place._replace(leg=place.leg + 1), 0.01)
        if place.fragment + 1 < self.fragments:
            return self.train_for(i, Place(place.round, place.fragment + 1), self.train_s / self.fragments)
        node.over += 1
        if effect.round + 1 < self.rounds:
            self.at(self.now + 0.01, lambda: self.start_round(i, effect.round + 1))
        else:
            self.at(self.now + 0.01, lambda: self.leave(i))

    def leave(self, i: int) -> None:
        self.feed(i, ev.DrainStarted())
        for j in range(len(self.nodes)):
            if j != i:
                self.at(self.now + self.rng.uniform(0, 2), lambda j=j: self.lose_sight(j))  # type: ignore[misc]

    def lose(self, i: int, *, killed: bool, noticed_s: float) -> None:
        """Node i hangs, or is killed and its connections break; the others learn it in the 2 s after `noticed_s`."""
        self.nodes[i].silent = True
        self.lost.add(i)
        if killed:
            self.killed.add(i)
            for stream in list(self.streams.values()):
                if i in (stream.ends[0].node, stream.ends[1].node):
                    self.sever(stream)
        self.at(self.now + noticed_s, lambda: self.forgotten.add(i))
        for j in range(len(self.nodes)):
            if j != i:
                when = self.now + noticed_s + self.rng.uniform(0, 2)
                self.at(when, lambda j=j: self.lose_sight(j))  # type: ignore[misc]

    def lose_sight(self, j: int) -> None:
        """Node j's view catches up: it holds those that still have rounds to go."""
        seen = tuple(
            ev.PeerSeen(peer, self.nodes[k].machine.round)
            for k, peer in enumerate(self.ids)
            if k not in {j, *self.forgotten} and (self.nodes[k].silent or self.nodes[k].over < self.rounds)
        )
        self.feed(j, ev.PeersChanged(seen))

    # streams

    def send(self, exchange_id: ExchangeId, i: int, message: Message, *, last: bool = False) -> None:
        stream = self.streams[exchange_id]
        mine, theirs = stream.end_of(i), stream.other(i)
        if not mine.open or stream.broken:
            return
        if last:
            mine.open = False
        if self.rng.random() < self.loss or theirs.node in self.killed:
            return self.sever(stream)
        theirs.inbox.append(message)
        theirs.last_at = max(theirs.last_at, self.now + self.rng.uniform(0.001, 0.2))
        self.at(theirs.last_at, lambda: self.deliver(stream, theirs))

    def sever(self, stream: Stream) -> None:
        """The connection is gone: what is in flight is lost, each end hears of it in its own time."""
        if stream.broken:
            return
        stream.broken = True
        for end in stream.ends:
            end.inbox.clear()
            self.at(self.now + self.rng.uniform(0.001, 1.0), lambda end=end: self.hear_break(stream, end))  # type: ignore[misc]

    def hear_break(self, stream: Stream, end: End) -> None:
        if end.open:
            end.open = False
            self.feed(end.node, ev.ExchangeBroken(stream.id, "connection lost"))

    def deliver(self, stream: Stream, end: End) -> None:
        if not end.inbox:
            return
        message = end.inbox.popleft()
        if not end.open:
            return
        end.moved_at = self.now
        if message == PAYLOAD:
            end.received = True
            return self.maybe_verified(stream, end)
        assert not isinstance(message, str)
        if isinstance(message, (ev.OfferDeclined, ev.AckReceived, ev.ExchangeBroken)):
            end.open = False
        self.feed(end.node, message)

    def transfer(self, i: int, exchange_id: ExchangeId, stall_s: float) -> None:
        stream = self.streams[exchange_id]
        end = stream.end_of(i)
        assert end.open and not end.transferring
        end.transferring, end.moved_at = True, self.now
        self.nodes[i].transfer_at = self.now
        self.send(exchange_id, i, PAYLOAD)
        self.at(self.now + self.rng.uniform(0.001, 0.5), lambda: self.sent(stream, end))
        self.at(self.now + stall_s, lambda: self.watch(stream, end, stall_s))

    def sent(self, stream: Stream, end: End) -> None:
        if end.open and not stream.broken:
            end.sent, end.moved_at = True, self.now
            self.maybe_verified(stream, end)

    def maybe_verified(self, stream: Stream, end: End) -> None:
        if end.transferring and end.sent and end.received and end.open:
            node = self.nodes[end.node]
            node.moving_s += self.now - node.transfer_at
            self.feed(end.node, ev.PayloadsVerified(stream.id))

    def watch(self, stream: Stream, end: End, stall_s: float) -> None:
        if not end.open:
            return
        left = end.moved_at + stall_s - self.now
        if left > 1e-9:
            return self.at(self.now + left, lambda: self.watch(stream, end, stall_s))
        self.hear_break(stream, end)
        self.sever(stream)

    # verdict

    def check_books(self) -> None:
        """Every round ended on every node; edges agree, but for those the offering side counted as in doubt."""
        one_sided = 0
        for i, node in enumerate(self.nodes):
            if node.silent:
                continue
            assert sorted({place.round for place in node.finished}) == list(range(self.rounds)), f"node {i}"
            assert list(node.finished) == sorted(node.finished)
            ways = ("gossip_committed", "gossip_alone", "gossip_idle")
            assert sum(node.counts[way] for way in ways) == len(node.finished)
            for place, end in node.finished.items():
                assert end.partner is not None or end.reason, "who goes alone says why"
                if end.partner is None:
                    continue
                other = self.nodes[self.ids.index(end.partner)].finished
                mirror = other.get(place._replace(round=end.partner_round))
                if mirror is None or (mirror.partner, mirror.partner_round) != (self.ids[i], place.round):
                    assert (i, place) in self.acknowledged, "the offering side alone committed"
                    one_sided += 1
                else:
                    assert mirror.weight == end.weight, "an edge has one weight"
                    assert mirror.replace == end.replace
        assert one_sided <= sum(node.counts["gossip_in_doubt"] for node in self.nodes)
