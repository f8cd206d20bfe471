"""What is held of all origins: how far each is, what is served of it, and how it is taken up again after a restart.

Of each origin an unbroken row of messages from its first, or from an adopted state on. An origin that was proven to lie
is held no more; the proof stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peerloom.protocol.flood_events import FloodEffect
from peerloom.protocol.flood_history import History
from peerloom.protocol.flood_links import Allowance, Link, Source
from peerloom.protocol.flood_messages import (
    Batch,
    Head,
    Mark,
    Proof,
    Segment,
    Snapshot,
    Versions,
    first_chain,
    fold,
    signed_bytes,
)
from peerloom.protocol.flood_pace import Pace
from peerloom.protocol.flood_proof import Verify, convicts
from peerloom.protocol.limits import MAX_FLOOD_CUT, MAX_FLOOD_ORIGINS
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.types import PeerId, RunId

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Restored:
    """What is to be done to the state last adopted, or a fresh one; `resync`: it is of no use, fetch another."""

    apply: tuple[Batch, ...]
    retract: tuple[Batch, ...]
    resync: bool


class Held:
    """The flood machine's memory: `restore` and `adopt` come before any event."""

    def __init__(
        self, own: PeerId, spec: SeedflowSpec, run_id: RunId, seed: int, *, sign: Sign, verify: Verify
    ) -> None:
        self._own, self._spec, self._run_id, self._seed = own, spec, run_id, seed
        self._sign, self._verify = sign, verify
        self._sources: dict[PeerId, Source] = {}
        self._proofs: dict[PeerId, Proof] = {}
        self._links: dict[PeerId, Link] = {}
        self._paces: dict[PeerId, Pace] = {}
        self._peers: frozenset[PeerId] = frozenset()
        self._opened: tuple[PeerId, ...] = ()
        self._asked: dict[PeerId, tuple[PeerId, float]] = {}  # by origin: whom, and until when
        self._latest = 0  # the step past the latest one taken
        self._limit = spec.scalar_limit()
        self._folds = 0
        self._fresh: list[Batch] = []  # taken, and not yet told the state
        self._done: list[FloodEffect] = []
        self._timing = False
        self._exiled = False  # whether this node was told
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

    def total(self) -> int:
        """The sum of the version vector: how many messages the state counts."""
        return sum(source.history.next for source in self._sources.values())

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
            and self._is_marked(mark)
            for mark in snapshot.marks
        ) and all(convicts(proof, self._run_id, self._verify) for proof in snapshot.proofs)

    def falls_short(self, snapshot: Snapshot) -> bool:
        """Whether it has less of this node's own messages than can be told of here: sequences would be used again."""
        own = self._sources.get(self._own)
        if own is None or not own.history.next:
            return False
        mark = next((mark for mark in snapshot.marks if mark.origin == self._own), None)
        if mark is None:
            return own.history.base > 0
        return mark.next <= own.history.next and _onwards(own.history, mark) is not own.history

    def _is_marked(self, mark: Mark) -> bool:
        signed = signed_bytes(self._run_id, mark.origin, mark.next, mark.step, mark.chain)
        return self._verify(mark.origin, signed, mark.signature)

    def adopt(self, snapshot: Snapshot) -> list[Batch]:
        """Goes on from a state that counts exactly these messages; returns what is held beyond them, to be applied."""
        old, self._sources = self._sources, {}
        for proof in snapshot.proofs:
            if len(self._proofs) < MAX_FLOOD_CUT:
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

    # one origin

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

    def _convict(self, proof: Proof) -> History | None:
        """Notes the proof, forgets the origin; returns what was held of it."""
        self._proofs[proof.origin] = proof
        self._asked.pop(proof.origin, None)
        source = self._sources.pop(proof.origin, None)
        held = (each.history.end_step for each in self._sources.values())
        self._latest = max(held, default=0)
        return source.history if source else None

    def _restore(self, segment: Segment) -> None:
        history, batch = self._known(segment.batch.origin).history, segment.batch
        if not batch.sequence <= history.next < batch.end:
            return
        batch = batch.since(history.next)
        history.append(batch, fold(history.chain, batch), segment.signature)
        self._latest = max(self._latest, batch.end_step)


def _from_mark(mark: Mark) -> History:
    return History(mark.origin, mark.chain, base=mark.next, step=mark.step, signature=mark.signature)


def _onwards(held: History, mark: Mark) -> History:
    """What is held, where it holds the mark; else a history that begins at the mark."""
    if held.base <= mark.next <= held.next and held.chain_at(mark.next) == mark.chain:
        return held
    return _from_mark(mark)
