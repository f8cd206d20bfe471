"""SeedFlow's flood as a machine: everybody ends with the same messages, whatever is lost, repeated, forged or denied.

Each new batch is pushed to all neighbours but those that have it. What gets lost is found by comparing version vectors,
when a link comes up and then every REPAIR_S, and is pulled by pages. Of each origin an unbroken row from its first
message on is held and counts; what comes ahead of its turn is dropped and asked for, so a gap that never fills costs
nothing, and all nodes that see the gap stop at the same message.

An origin that signed two histories is cut off: the two signatures are the proof, which is kept and spread, and every
node takes all messages of that origin out of its state again, from the first on. So whichever history a node had seen,
and however far, all end with the state of the other origins' messages alone. That holds because a version vector names
the chain and not the number alone: two nodes that follow two histories find out at their next comparison, and ask each
other for the segment that proves it.

What depends on content alone (bounds, budget, signatures) is refused for good, by everybody alike. What depends on the
moment (rate, period far ahead, an origin nobody has heard of) is refused for now: the next comparison asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from peerloom.protocol.effects import Count, ScorePeer, SetTimer
from peerloom.protocol.events import TimerFired
from peerloom.protocol.flood_events import (
    Apply,
    Drop,
    Exiled,
    FloodEffect,
    FloodEvent,
    Keep,
    LinkDown,
    Links,
    LinkUp,
    PeersSeen,
    Received,
    Refusal,
    Resync,
    Retract,
    Send,
    StepsDone,
)
from peerloom.protocol.flood_history import History
from peerloom.protocol.flood_links import Allowance, Link, Source
from peerloom.protocol.flood_messages import (
    Batch,
    Head,
    Mark,
    Proof,
    Segment,
    Segments,
    Snapshot,
    Versions,
    Want,
    Wants,
    first_chain,
    fold,
    signed_bytes,
)
from peerloom.protocol.flood_overlay import partners
from peerloom.protocol.flood_proof import Verify, contradiction, convicts, is_signed
from peerloom.protocol.limits import MAX_FLOOD_CUT, MAX_FLOOD_ORIGINS, MAX_PAGE, MAX_SEGMENT, MAX_WANTS
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.types import PeerId, RunId

REPAIR_S = 30.0  # between two comparisons on a link
WANT_S = 10.0  # an answer to a want that has not come by then is asked for again, perhaps elsewhere
VOUCHERS = 2  # neighbours that must hold messages of an origin that this node never saw; all, with fewer neighbours
MAX_FOLDS = 256  # chain values that one version vector may make this node work out, a millisecond each
MAX_DOUBTS = 16  # segments of a link that do not check and may be a liar's rather than the sender's fault
FRAME_SEGMENTS = 1024  # in one message: signatures and all, they fit
TIMER = "repair"
BLAMED: frozenset[Refusal] = frozenset({"forged", "false_proof", "bound", "budget"})  # an honest node passes none on

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Restored:
    """What is to be done to the state last adopted, or a fresh one; `resync`: it is of no use, fetch another."""

    apply: tuple[Batch, ...]
    retract: tuple[Batch, ...]
    resync: bool


class FloodMachine:
    """One node's part of the flood; `handle(event, now)` returns effects, to be performed in order.

    `sign` and `verify` are Ed25519, pure functions. `restore` and `adopt` come before any event.
    """

    def __init__(
        self, own: PeerId, spec: SeedflowSpec, run_id: RunId, seed: int, *, sign: Sign, verify: Verify
    ) -> None:
        self._own, self._spec, self._run_id, self._seed = own, spec, run_id, seed
        self._sign, self._verify = sign, verify
        self._sources: dict[PeerId, Source] = {}
        self._proofs: dict[PeerId, Proof] = {}
        self._links: dict[PeerId, Link] = {}
        self._peers: frozenset[PeerId] = frozenset()
        self._opened: tuple[PeerId, ...] = ()
        self._asked: dict[PeerId, tuple[PeerId, float]] = {}  # by origin: whom, and until when
        self._latest = 0  # the step past the latest one taken
        self._limit = spec.scalar_limit()
        self._folds = 0
        self._done: list[FloodEffect] = []
        self._timing = False
        self._now = 0.0

    # what a driver may ask

    @property
    def next_sequence(self) -> int:
        """The sequence of this node's next message."""
        source = self._sources.get(self._own)
        return source.history.next if source else 0

    @property
    def next_step(self) -> int:
        """The step that this node takes next: its own count, or where the others are if it is a period behind them.

        The others' middle one: neither those that stopped long ago nor one that runs ahead decide.
        """
        source = self._sources.get(self._own)
        own = source.history.end_step if source else 0
        others = sorted(each.history.end_step for peer, each in self._sources.items() if peer in self._peers)
        middle = others[len(others) // 2] if others else 0
        return middle if middle > own + self._spec.period or (not own and middle) else own

    @property
    def cut(self) -> frozenset[PeerId]:
        """The origins that were proven to lie."""
        return frozenset(self._proofs)

    def settled(self) -> bool:
        """Whether at least one neighbour told its versions, and nobody holds more of this node than itself."""
        links = self._links.values()
        mine = self.next_sequence
        return any(link.heard for link in links) and all(_next(link, self._own) <= mine for link in links)

    def total(self) -> int:
        """The sum of the version vector: how many messages the state counts."""
        return sum(source.history.next for source in self._sources.values())

    def behind(self) -> int:
        """How many messages neighbours told of that are not here."""
        found = 0
        for origin in {origin for link in self._links.values() for origin in link.heads}:
            if origin not in self._proofs:
                most = max(_next(link, origin) for link in self._links.values())
                found += max(0, most - self._held(origin))
        return found

    def versions(self) -> Versions:
        """This node's version vector."""
        heads = (self._sources[origin].history.head() for origin in sorted(self._sources))
        return Versions(tuple(head for head in heads if head.next), tuple(sorted(self._proofs)))

    def snapshot(self) -> Snapshot:
        """What the state counts, with each origin's own signature."""
        marks = (self._sources[origin].history.mark() for origin in sorted(self._sources))
        proofs = tuple(self._proofs[origin] for origin in sorted(self._proofs))
        return Snapshot(tuple(mark for mark in marks if mark.next), proofs)

    def beyond(self, heads: Iterable[Head]) -> list[Batch] | None:
        """The messages held past these heads; None where this node is not as far, or cannot tell."""
        at = {head.origin: head for head in heads}
        if any(origin not in self._sources for origin in at):
            return None
        found: list[Batch] = []
        for origin, source in self._sources.items():
            history = source.history
            start = at[origin].next if origin in at else 0
            if not history.base <= start <= history.next:
                return None
            if origin in at and history.chain_at(start) != at[origin].chain:
                return None
            found += history.batches(start, history.next)
        return found

    # before the first event

    def restore(self, items: Iterable[Segment | Proof | Snapshot]) -> Restored:
        """Takes what earlier lives kept, in its order, and trusts it; items that do not fit are left out.

        A Snapshot among them stands for a state that was adopted there.
        """
        counted: dict[PeerId, int] = {}
        retract: list[Batch] = []
        resync = False
        for item in items:
            match item:
                case Snapshot():
                    self.adopt(item)
                    counted = {mark.origin: mark.next for mark in item.marks}
                    retract, resync = [], False
                case Proof():
                    history = self._convict(item)
                    if (count := counted.pop(item.origin, 0)) and history is not None:
                        resync = resync or history.base > 0
                        retract += history.batches(0, count) if not history.base else []
                case Segment(batch) if batch.origin not in self._proofs:
                    self._restore(item)
        apply: list[Batch] = []
        for origin, source in self._sources.items():
            apply += source.history.batches(counted.get(origin, 0), source.history.next)
        return Restored(tuple(apply), tuple(retract), resync)

    def check(self, snapshot: Snapshot) -> bool:
        """Whether each origin signed its mark and each proof convicts; at most one mark an origin, none of a liar."""
        origins = [mark.origin for mark in snapshot.marks] + [proof.origin for proof in snapshot.proofs]
        if len(set(origins)) != len(origins) or len(snapshot.marks) > MAX_FLOOD_ORIGINS:
            return False
        if len(snapshot.proofs) > MAX_FLOOD_CUT:
            return False
        return all(
            0 < mark.next <= mark.step <= self._spec.max_steps
            and self._verify(
                mark.origin, signed_bytes(self._run_id, mark.origin, mark.next, mark.chain), mark.signature
            )
            for mark in snapshot.marks
        ) and all(convicts(proof, self._run_id, self._verify) for proof in snapshot.proofs)

    def adopt(self, snapshot: Snapshot) -> list[Batch]:
        """Goes on from a state that counts exactly these messages; returns what is held beyond them, to be applied."""
        old, self._sources = self._sources, {}
        for proof in snapshot.proofs:
            self._proofs.setdefault(proof.origin, proof)
        for mark in snapshot.marks:
            held = old.get(mark.origin)
            self._sources[mark.origin] = self._source(
                _onwards(held.history, mark) if held else _from_mark(mark)
            )
            self._latest = max(self._latest, mark.step)
        told = {mark.origin: mark.next for mark in snapshot.marks}
        for origin, source in old.items():  # what that state does not know at all
            if origin not in told and origin not in self._proofs and source.history.base == 0:
                self._sources[origin] = source
        beyond: list[Batch] = []
        for origin, source in self._sources.items():
            beyond += source.history.batches(told.get(origin, 0), source.history.next)
        return beyond

    # events

    def handle(self, event: FloodEvent, now: float) -> list[FloodEffect]:
        """Takes one event; returns what is to be done, in order."""
        self._now, self._done = now, []
        match event:
            case Received(peer, body):
                if (link := self._links.get(peer)) is not None:
                    self._receive(link, body)
            case StepsDone(step, scalars):
                self._own_steps(step, scalars)
            case PeersSeen(peers):
                self._peers = frozenset(peers)
                self._relink()
            case LinkUp(peer):
                self._links[peer] = Link(peer)
                self._do(Send(peer, self.versions()))
            case LinkDown(peer):
                self._links.pop(peer, None)
                self._asked = {origin: asked for origin, asked in self._asked.items() if asked[0] != peer}
            case TimerFired():
                self._timing = False
                for peer in self._links:
                    self._do(Send(peer, self.versions()))
        if not self._timing and self._links:
            self._timing = True
            self._do(SetTimer(TIMER, now + REPAIR_S))
        self._flush()
        return self._done

    def _do(self, effect: FloodEffect) -> None:
        self._done.append(effect)

    def _flush(self) -> None:
        for peer, link in self._links.items():
            segments = link.take()
            for start in range(0, len(segments), FRAME_SEGMENTS):
                self._do(Send(peer, Segments(segments[start : start + FRAME_SEGMENTS])))

    def _relink(self) -> None:
        opened = partners(self._own, self._peers - self._proofs.keys(), self._seed, self._spec.neighbours)
        if opened != self._opened:
            self._opened = opened
            self._do(Links(opened))

    def _receive(self, link: Link, body: Segments | Versions | Wants | Proof) -> None:
        match body:
            case Segments(segments):
                self._segments(link, segments)
            case Versions():
                self._compare(link, body)
            case Wants(wants):
                self._serve(link, wants)
            case Proof():
                self._judge(link, body)

    # own steps

    def _own_steps(self, step: int, scalars: Sequence[int]) -> None:
        if self._own in self._proofs or not scalars:
            return
        history = self._known(self._own).history
        batch = Batch(self._own, history.next, step, tuple(scalars))
        chain = fold(history.chain, batch)
        signature = self._sign(signed_bytes(self._run_id, self._own, batch.end, chain))
        self._take(Segment(batch, signature, history.chain), chain, own=True)

    # messages of others

    def _segments(self, link: Link, segments: Iterable[Segment]) -> None:
        moved: dict[PeerId, None] = {}
        taken: list[Batch] = []
        for segment in segments:
            origin = segment.batch.origin
            link.knows(origin, segment.batch.end)
            if (added := self._segment(link, segment)) is not None:
                taken.append(added)
                moved[origin] = None
            if link.peer not in self._links:
                break
        if taken:
            self._do(Apply(tuple(taken)))
        for origin in moved:
            if (asked := self._asked.get(origin)) is not None and asked[0] == link.peer:
                del self._asked[origin]
        if moved and link.peer in self._links:
            self._pull(link)

    def _segment(self, link: Link, segment: Segment) -> Batch | None:
        """Judges one segment; returns what of it is new and taken."""
        batch = segment.batch
        origin = batch.origin
        source = self._judged(link, batch)
        if source is None:
            return None
        history = source.history
        if batch.sequence > history.next:
            self._refuse(link, "gap")
            self._ask(link, origin)
            return None
        agreed = link.agreed.pop(origin, None) == batch.sequence or bool(segment.prev) or not batch.sequence
        prev = self._prev(history, segment)
        if prev is None:
            self._refuse(link, "base")
            return None
        if prev != history.chain_at(batch.sequence) or history.differs(batch) is not None:
            self._doubt(link, history, replace(segment, prev=prev), agreed)
            return None
        if batch.end <= history.next:
            if agreed:  # else the same messages may follow on other ones there
                link.agreed[origin] = batch.end
            self._do(Count("flood_duplicates", len(batch.scalars)))
            return None
        return self._extend(link, source, segment, agreed)

    def _judged(self, link: Link, batch: Batch) -> Source | None:
        """Where the batch belongs, unless its content or its origin rule it out."""
        if batch.origin in self._proofs:
            self._refuse(link, "cut")
            self._do(Send(link.peer, self._proofs[batch.origin]))
            return None
        if min(batch.scalars) < -self._limit or max(batch.scalars) > self._limit:
            self._refuse(link, "bound")
            return None
        if batch.end_step > self._spec.max_steps or batch.sequence > batch.step:
            self._refuse(link, "budget")
            return None
        if batch.origin in self._sources:
            return self._sources[batch.origin]
        if not self._admits(batch.origin):
            self._refuse(link, "origin")
            return None
        if len(self._sources) >= MAX_FLOOD_ORIGINS:
            self._refuse(link, "origins")
            return None
        return self._source(History(batch.origin, first_chain(self._run_id, batch.origin)))

    def _prev(self, history: History, segment: Segment) -> bytes | None:
        """The chain before a segment: as its sender says, or as held here; None where neither is known."""
        if not segment.batch.sequence:
            return first_chain(self._run_id, history.origin)
        if segment.batch.sequence < history.base:
            return None
        return segment.prev or history.chain_at(segment.batch.sequence)

    def _extend(self, link: Link, source: Source, segment: Segment, agreed: bool) -> Batch | None:
        history, batch = source.history, segment.batch.since(source.history.next)
        chain = fold(history.chain, batch)
        if batch.step > self._latest + self._spec.max_periods_ahead * self._spec.period:
            self._refuse(link, "future")
            return None
        if not source.allowance.take(len(batch.scalars), self._now):
            self._refuse(link, "rate")
            return None
        if not self._verify(
            batch.origin, signed_bytes(self._run_id, batch.origin, batch.end, chain), segment.signature
        ):
            source.allowance.left += len(batch.scalars)  # they are not the origin's
            self._unsigned(link, batch.origin, segment.batch.sequence, agreed)
            return None
        link.agreed[batch.origin] = batch.end
        self._sources[batch.origin] = source
        self._take(Segment(batch, segment.signature, history.chain), chain, own=False)
        return batch

    def _doubt(self, link: Link, history: History, segment: Segment, agreed: bool) -> None:
        """A segment that says something else than what is held: its origin lies, if it signed it."""
        if not is_signed(segment, self._run_id, self._verify):
            self._unsigned(link, history.origin, segment.batch.sequence, agreed)
        elif (proof := contradiction(history, segment)) is not None:
            self._cut(proof)

    def _unsigned(self, link: Link, origin: PeerId, sequence: int, agreed: bool) -> None:
        """Forged, if the sender said what comes before it; else the two may differ there: ask with the chain told."""
        link.doubts += 1
        if agreed or link.doubts > MAX_DOUBTS:
            self._refuse(link, "forged")
        else:
            self._refuse(link, "doubtful")
            self._do(Send(link.peer, Wants((Want(origin, max(0, sequence - 1)),))))

    def _take(self, segment: Segment, chain: bytes, *, own: bool) -> None:
        batch = segment.batch
        history = self._sources[batch.origin].history
        before = history.chain
        history.append(batch, chain, segment.signature)
        self._latest = max(self._latest, batch.end_step)
        self._do(Keep(segment, own))
        self._do(Count("flood_own" if own else "flood_taken", len(batch.scalars)))
        for link in self._links.values():
            if link.known.get(batch.origin, 0) < batch.end:
                link.put(segment, lambda: before)

    def _refuse(self, link: Link, reason: Refusal) -> None:
        self._do(Count(f"flood_refused_{reason}"))
        if reason in BLAMED:
            self._do(ScorePeer(link.peer, f"flood_{reason}"))
            self._do(Drop(link.peer, reason))
            self._links.pop(link.peer, None)

    # repair

    def _compare(self, link: Link, versions: Versions) -> None:
        link.heard = True
        link.heads = {head.origin: head for head in versions.heads}
        told = set(versions.cut)
        for origin, proof in self._proofs.items():
            if origin not in told:
                self._do(Send(link.peer, proof))
        self._folds = MAX_FOLDS
        doubted: list[Want] = []
        for head in versions.heads:
            link.knows(head.origin, head.next)
            if head.origin in self._sources and len(doubted) < MAX_WANTS and self._differs(head):
                doubted.append(Want(head.origin, head.next - 1))
        if doubted:
            self._do(Send(link.peer, Wants(tuple(doubted))))
        self._pull(link)

    def _differs(self, head: Head) -> bool:
        """Whether the peer holds another history, as far as both go: the segment that ends there is to prove it."""
        history = self._sources[head.origin].history
        if not max(history.base, head.base) < head.next <= history.next:
            return False
        if not history.is_place(head.next):
            self._folds -= 1
        return self._folds >= 0 and history.chain_at(head.next) != head.chain

    def _pull(self, link: Link) -> None:
        """Asks for what the peer has told of and is not here, about a page of it; the rest when that has come."""
        wants: list[Want] = []
        room = MAX_PAGE
        for origin, head in link.heads.items():
            lacking = head.next - self._held(origin)
            if lacking > 0 and origin not in self._proofs and (want := self._want(link, origin)):
                wants += want
                room -= lacking
            if room <= 0 or len(wants) == MAX_WANTS:
                break
        if wants:
            self._do(Send(link.peer, Wants(tuple(wants))))

    def _want(self, link: Link, origin: PeerId) -> list[Want]:
        asked, held = self._asked.get(origin), self._held(origin)
        if (asked is not None and asked[1] > self._now) or not self._admits(origin):
            return []
        head = link.heads.get(origin)
        if head is not None and head.base > held:
            return []
        self._asked[origin] = (link.peer, self._now + WANT_S)
        return [Want(origin, held)]

    def _ask(self, link: Link, origin: PeerId) -> None:
        if wants := self._want(link, origin):
            self._do(Send(link.peer, Wants(tuple(wants))))

    def _serve(self, link: Link, wants: Iterable[Want]) -> None:
        left = MAX_PAGE
        for want in wants:
            source = self._sources.get(want.origin)
            if source is None or not source.history.base <= want.sequence < source.history.next:
                continue
            sequence = want.sequence
            while left > 0 and (segment := source.history.segment(sequence, min(left, MAX_SEGMENT))) is not None:
                if len(segment.batch.scalars) > left:
                    return
                left -= len(segment.batch.scalars)
                explicit = sequence == want.sequence
                if explicit:
                    link.sent.pop(want.origin, None)
                link.put(segment, lambda prev=segment.prev: prev)  # type: ignore[misc]
                sequence = segment.batch.end

    # liars

    def _judge(self, link: Link, proof: Proof) -> None:
        if proof.origin in self._proofs:
            return
        if len(self._proofs) >= MAX_FLOOD_CUT:
            self._refuse(link, "origins")
        elif convicts(proof, self._run_id, self._verify):
            self._cut(proof)
        else:
            self._refuse(link, "false_proof")

    def _cut(self, proof: Proof) -> None:
        origin = proof.origin
        self._do(Keep(proof))
        self._do(Count("flood_cut"))
        history = self._convict(proof)
        if history is not None and history.base:
            self._do(Resync(origin))
        elif history is not None and history.next:
            self._do(Retract(tuple(history.batches(0, history.next))))
        if origin == self._own:
            self._do(Exiled())
        for link in self._links.values():
            link.outbox = [segment for segment in link.outbox if segment.batch.origin != origin]
            self._do(Send(link.peer, proof))
        self._relink()  # a liar's own links to this node may stay: over them it learns that it is out

    def _convict(self, proof: Proof) -> History | None:
        """Notes the proof, forgets the origin; returns what was held of it."""
        self._proofs[proof.origin] = proof
        self._asked.pop(proof.origin, None)
        source = self._sources.pop(proof.origin, None)
        held = (each.history.end_step for each in self._sources.values())
        self._latest = max(held, default=0)
        return source.history if source else None

    # origins

    def _admits(self, origin: PeerId) -> bool:
        """Whether messages of this origin count: known, seen, or held by enough neighbours."""
        if origin in self._sources or origin in self._peers or origin == self._own:
            return True
        vouching = sum(_next(link, origin) > 0 for link in self._links.values())
        return vouching >= max(1, min(VOUCHERS, len(self._links)))

    def _held(self, origin: PeerId) -> int:
        source = self._sources.get(origin)
        return source.history.next if source else 0

    def _known(self, origin: PeerId) -> Source:
        source = self._sources.get(origin)
        if source is None:
            source = self._sources[origin] = self._source(History(origin, first_chain(self._run_id, origin)))
        return source

    def _source(self, history: History) -> Source:
        spec = self._spec
        return Source(history, Allowance(spec.rate_limit, spec.rate_burst, spec.rate_burst, self._now))

    def _restore(self, segment: Segment) -> None:
        history, batch = self._known(segment.batch.origin).history, segment.batch
        if not batch.sequence <= history.next < batch.end:
            return
        batch = batch.since(history.next)
        history.append(batch, fold(history.chain, batch), segment.signature)
        self._latest = max(self._latest, batch.end_step)


def _next(link: Link, origin: PeerId) -> int:
    head = link.heads.get(origin)
    return head.next if head else 0


def _from_mark(mark: Mark) -> History:
    return History(mark.origin, mark.chain, base=mark.next, step=mark.step, signature=mark.signature)


def _onwards(held: History, mark: Mark) -> History:
    """What is held, where it holds the mark; else a history that begins at the mark."""
    if held.base <= mark.next <= held.next and held.chain_at(mark.next) == mark.chain:
        return held
    return _from_mark(mark)
