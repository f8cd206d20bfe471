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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from peerloom.protocol.effects import Count, SetTimer
from peerloom.protocol.events import TimerFired
from peerloom.protocol.flood_events import (
    FloodEffect,
    FloodEvent,
    Keep,
    LinkDown,
    LinkUp,
    PeersSeen,
    Question,
    Received,
    Refusal,
    Retract,
    Send,
    StepsDone,
)
from peerloom.protocol.flood_held import Restored
from peerloom.protocol.flood_history import History
from peerloom.protocol.flood_liars import MAX_DOUBTS, Liars
from peerloom.protocol.flood_links import Link, Source, in_rows, joined
from peerloom.protocol.flood_messages import (
    Batch,
    FrameBody,
    HashQuery,
    HashReply,
    Proof,
    Segment,
    Segments,
    Versions,
    Wants,
    first_chain,
    fold,
    signed_bytes,
)
from peerloom.protocol.flood_pace import HASH_COST, PROOF_COST, SEGMENT_COST, WANT_COST, cost_of
from peerloom.protocol.limits import MAX_FLOOD_ORIGINS, MAX_PAGE
from peerloom.protocol.types import PeerId

REPAIR_S = 30.0  # between two comparisons on a link
FRAME_SEGMENTS = 1024  # in one message: signatures and all, they fit
TIMER = "repair"

__all__ = ["FRAME_SEGMENTS", "MAX_DOUBTS", "REPAIR_S", "TIMER", "FloodMachine", "Restored"]


class FloodMachine(Liars):
    """One node's part of the flood; `handle(event, now)` returns effects, to be performed in order.

    `sign` and `verify` are Ed25519, pure functions. `restore` and `adopt` come before any event.
    """

    def handle(self, event: FloodEvent, now: float) -> list[FloodEffect]:
        """Takes one event; returns what is to be done, in order."""
        self._now, self._done = now, []
        self._tell_exile()  # it may have come to know by a log, or a state
        match event:
            case Received(peer, body):
                if (link := self._links.get(peer)) is not None:
                    self._receive(link, body)
            case StepsDone(step, sequence, scalars):
                self._own_steps(Batch(self._own, sequence, step, scalars))
            case PeersSeen(peers):
                self._peers = frozenset(peers)
                self._relink()
            case LinkUp(peer):
                link = self._links[peer] = self._link(peer)
                if self._may(link, "talk", 1):
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

    def _receive(self, link: Link, body: FrameBody) -> None:
        match body:
            case Segments(segments):
                if self._may(link, "repeats", sum(cost_of(segment.batch) for segment in segments)):
                    self._segments(link, segments)
            case Versions():
                if self._may(link, "talk", 1):
                    self._compare(link, body)
            case Wants(wants):
                if self._may(link, "wants", WANT_COST * len(wants) + MAX_PAGE):
                    link.pace.wants.left += self._serve(link, wants)
            case Proof():
                if self._may(link, "repeats", PROOF_COST):
                    self._judge(link, body)
            case HashQuery(number):
                if self._may(link, "talk", HASH_COST):
                    self._do(Question(link.peer, body))
                else:
                    self._do(Send(link.peer, HashReply(number, b"")))
            case HashReply():
                self._may(link, "repeats", PROOF_COST)

    def _flush(self) -> None:
        for peer, link in self._links.items():
            segments = link.take()
            for start in range(0, len(segments), FRAME_SEGMENTS):
                self._do(Send(peer, Segments(segments[start : start + FRAME_SEGMENTS])))

    # own steps

    def _own_steps(self, batch: Batch) -> None:
        """Signs and floods them, unless messages of earlier lives came while they were taken: then they go again."""
        if self._own in self._proofs or not batch.scalars:
            return
        history = self._known(self._own).history
        if batch.sequence != history.next:
            self._do(Count("flood_own_overtaken", len(batch.scalars)))
            self._apply()
            self._do(Retract((batch,)))
            return
        chain = fold(history.chain, batch)
        signature = self._sign(signed_bytes(self._run_id, self._own, batch.end, batch.end_step, chain))
        self._take(Segment(batch, signature, history.chain), chain, own=True)

    # messages of others

    def _segments(self, link: Link, segments: Iterable[Segment]) -> None:
        moved: dict[PeerId, None] = {}
        for segment, parts, chain in self._pieces(segments):
            origin = segment.batch.origin
            link.knows(origin, segment.batch.end)
            if (added := self._segment(link, segment, chain)) is not None:
                new = sum(part.batch.end > added.sequence for part in parts)
                link.pace.repeats.left += SEGMENT_COST * new + len(added.scalars)  # it was not in vain
                self._fresh.append(added)
                moved[origin] = None
            if link.peer not in self._links:
                break
        self._apply()
        for origin in moved:
            if (asked := self._asked.get(origin)) is not None and asked[0] == link.peer:
                del self._asked[origin]
        if moved and link.peer in self._links:
            self._pull(link)

    def _pieces(self, segments: Iterable[Segment]) -> Iterator[tuple[Segment, Sequence[Segment], bytes | None]]:
        """What to judge as one, what it is made of, and the chain at its end if the signature there is known to hold.

        The last signature of a row covers all of it: so a node with much to do has less of it. Rows that cannot be
        taken whole are judged segment by segment, as if they had come alone.
        """
        for row in in_rows(segments):
            whole = joined(row) if len(row) > 1 else row[0]
            chain = self._whole_chain(whole) if len(row) > 1 else None
            if len(row) == 1 or chain is not None:
                yield whole, row, chain
            else:
                for segment in row:
                    yield segment, (segment,), None

    def _whole_chain(self, row: Segment) -> bytes | None:
        """The chain at the end of a row that can be taken as one, empty if nothing in it is new; None for any other."""
        batch = row.batch
        source = self._sources.get(batch.origin)
        if source is None or self._ruled_out(batch) is not None:
            return None
        history = source.history
        if not history.base <= batch.sequence <= history.next:
            return None
        if row.prev and row.prev != history.chain_at(batch.sequence) or history.differs(batch) is not None:
            return None
        if batch.end <= history.next:
            return b""
        new = batch.since(history.next)
        if self._is_ahead(new) or not source.allowance.holds(len(new.scalars), self._now):
            return None
        chain = fold(history.chain, new)
        return chain if self._is_signed(new, chain, row.signature) else None

    def _segment(self, link: Link, segment: Segment, signed_chain: bytes | None) -> Batch | None:
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
            self._refuse(link, "older")
            return None
        if prev != history.chain_at(batch.sequence) or history.differs(batch) is not None:
            self._doubt(link, history, replace(segment, prev=prev), agreed)
            return None
        if batch.end <= history.next:
            if agreed:  # else the same messages may follow on other ones there
                link.agreed[origin] = batch.end
            self._do(Count("flood_duplicates", len(batch.scalars)))
            return None
        return self._extend(link, source, segment, agreed, signed_chain)

    def _judged(self, link: Link, batch: Batch) -> Source | None:
        """Where the batch belongs, unless its content or its origin rule it out."""
        if batch.origin in self._proofs:
            self._refuse(link, "cut")
            if batch.origin not in link.convicted:
                link.convicted.add(batch.origin)
                self._do(Send(link.peer, self._proofs[batch.origin]))
            return None
        if (refusal := self._ruled_out(batch)) is not None:
            self._refuse(link, refusal)
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

    def _ruled_out(self, batch: Batch) -> Refusal | None:
        """Why such content is nobody's, whoever signed it."""
        if min(batch.scalars) < -self._limit or max(batch.scalars) > self._limit:
            return "bound"
        if batch.end_step > self._spec.max_steps or batch.sequence > batch.step:
            return "budget"
        return None

    def _prev(self, history: History, segment: Segment) -> bytes | None:
        """The chain before a segment: as its sender says, or as held here; None where neither is known."""
        if segment.batch.sequence < history.base:
            return None
        if not segment.batch.sequence:
            return first_chain(self._run_id, history.origin)
        return segment.prev or history.chain_at(segment.batch.sequence)

    def _extend(
        self, link: Link, source: Source, segment: Segment, agreed: bool, signed_chain: bytes | None
    ) -> Batch | None:
        history, batch = source.history, segment.batch.since(source.history.next)
        chain = fold(history.chain, batch) if signed_chain is None else signed_chain
        if self._is_ahead(batch):
            self._refuse(link, "future")
            return None
        if not source.allowance.take(len(batch.scalars), self._now):
            self._refuse(link, "rate")
            return None
        if signed_chain is None and not self._is_signed(batch, chain, segment.signature):
            source.allowance.left += len(batch.scalars)  # they are not the origin's
            self._unsigned(link, batch.origin, segment.batch.sequence, agreed)
            return None
        link.agreed[batch.origin] = batch.end
        self._sources[batch.origin] = source
        self._take(Segment(batch, segment.signature, history.chain), chain, own=False)
        return batch

    def _is_ahead(self, batch: Batch) -> bool:
        return batch.step > self._latest + self._spec.max_periods_ahead * self._spec.period

    def _is_signed(self, batch: Batch, chain: bytes, signature: bytes) -> bool:
        signed = signed_bytes(self._run_id, batch.origin, batch.end, batch.end_step, chain)
        return self._verify(batch.origin, signed, signature)

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
