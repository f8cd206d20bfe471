"""Repair: version vectors are compared, and what is missing or doubted is asked for by pages, and served."""

from __future__ import annotations

from collections.abc import Iterable

from peerloom.protocol.effects import Count, ScorePeer
from peerloom.protocol.flood_events import Apply, Drop, FloodEffect, Refusal, Send
from peerloom.protocol.flood_held import Held
from peerloom.protocol.flood_links import Link
from peerloom.protocol.flood_messages import Head, Versions, Want, Wants
from peerloom.protocol.flood_pace import Kind, Pace
from peerloom.protocol.limits import MAX_PAGE, MAX_SEGMENT, MAX_WANTS
from peerloom.protocol.types import PeerId

WANT_S = 10.0  # an answer to a want that has not come by then is asked for again, perhaps elsewhere
VOUCHERS = 2  # neighbours that must hold messages of an origin that this node never saw; all, with fewer neighbours
MAX_TOLD = 64  # proofs told in one comparison: far below what a link has room for
MAX_PACES = 4096  # peers whose buckets are remembered; those that have no link go first
MAX_FOLDS = 256  # chain values that one version vector may make this node work out, a millisecond each
BLAMED: frozenset[Refusal] = frozenset({"forged", "false_proof", "bound", "budget", "pace"})  # no honest node does it


class Repair(Held):
    """What links know of one another, and what follows from it."""

    def settled(self) -> bool:
        """Whether at least one neighbour told its versions, and nobody holds more of this node than itself."""
        links = self._links.values()
        mine = self.next_sequence
        return any(link.heard for link in links) and all(_next(link, self._own) <= mine for link in links)

    def behind(self) -> int:
        """How many messages neighbours told of that are not here."""
        found = 0
        for origin in {origin for link in self._links.values() for origin in link.heads}:
            if origin not in self._proofs:
                most = max(_next(link, origin) for link in self._links.values())
                found += max(0, most - self._held(origin))
        return found

    # what is told

    def _compare(self, link: Link, versions: Versions) -> None:
        link.heard = True
        link.heads = {head.origin: head for head in versions.heads}
        self._tell_proofs(link, frozenset(versions.cut))
        self._folds = MAX_FOLDS
        doubted: list[Want] = []
        for head in versions.heads:
            link.knows(head.origin, head.next)
            if head.origin in self._sources and len(doubted) < MAX_WANTS and self._differs(head):
                doubted.append(Want(head.origin, head.next - 1))
        if doubted:
            self._do(Send(link.peer, Wants(tuple(doubted))))
        self._pull(link)

    def _tell_proofs(self, link: Link, known: frozenset[PeerId]) -> None:
        """Those that the peer lacks, a few a comparison; in turn, since it may have refused some for the moment."""
        lacking = [origin for origin in self._proofs if origin not in known]
        if lacking and link.proved.issuperset(lacking):
            link.proved.clear()
        for origin in [origin for origin in lacking if origin not in link.proved][:MAX_TOLD]:
            link.proved.add(origin)
            self._do(Send(link.peer, self._proofs[origin]))

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

    def _admits(self, origin: PeerId) -> bool:
        """Whether messages of this origin count: known, seen, or held by enough neighbours."""
        if origin in self._sources or origin in self._peers or origin == self._own:
            return True
        vouching = sum(_next(link, origin) > 0 for link in self._links.values())
        return vouching >= max(1, min(VOUCHERS, len(self._links)))

    def _serve(self, link: Link, wants: Iterable[Want]) -> int:
        """Gives a page at most; returns how many messages it falls short of one."""
        left = MAX_PAGE
        for want in wants:
            source = self._sources.get(want.origin)
            if source is None or not source.history.base <= want.sequence < source.history.next:
                continue
            sequence = want.sequence
            while left > 0 and (segment := source.history.segment(sequence, min(left, MAX_SEGMENT))) is not None:
                if len(segment.batch.scalars) > left:
                    return left
                left -= len(segment.batch.scalars)
                explicit = sequence == want.sequence
                if explicit:
                    link.sent.pop(want.origin, None)
                link.put(segment, lambda prev=segment.prev: prev)  # type: ignore[misc]
                sequence = segment.batch.end
        return left

    # pace

    def _link(self, peer: PeerId) -> Link:
        """A new link; the peer's buckets are as it left them."""
        pace = self._paces.pop(peer, None) or Pace()
        while len(self._paces) >= MAX_PACES and (gone := next((p for p in self._paces if p not in self._links), None)):
            del self._paces[gone]
        self._paces[peer] = pace
        return Link(peer, pace)

    def _may(self, link: Link, kind: Kind, cost: float) -> bool:
        """Whether the peer may cause such work now; if not, it is refused, and dropped when it goes on and on."""
        origins = max(len(self._sources), len(self._peers))
        verdict = link.pace.take(kind, cost, self._now, self._spec, origins)
        if verdict != "within":
            self._refuse(link, kind)
        if verdict == "blatant":
            self._refuse(link, "pace")
        return verdict == "within"

    # effects

    def _apply(self) -> None:
        if self._fresh:
            self._do(Apply(tuple(self._fresh)))
            self._fresh = []

    def _do(self, effect: FloodEffect) -> None:
        self._done.append(effect)

    def _refuse(self, link: Link, reason: Refusal) -> None:
        self._do(Count(f"flood_refused_{reason}"))
        if reason in BLAMED:
            self._do(ScorePeer(link.peer, f"flood_{reason}"))
            self._do(Drop(link.peer, reason))
            self._links.pop(link.peer, None)


def _next(link: Link, origin: PeerId) -> int:
    head = link.heads.get(origin)
    return head.next if head else 0
