"""Liars: what cannot be checked is doubted, what contradicts is proof, and whom a proof convicts is cut off."""

from __future__ import annotations

from peerloom.protocol.effects import Count
from peerloom.protocol.flood_events import Exiled, Keep, Links, Resync, Retract, Send
from peerloom.protocol.flood_history import History
from peerloom.protocol.flood_links import Link
from peerloom.protocol.flood_messages import Proof, Segment, Want, Wants
from peerloom.protocol.flood_overlay import partners
from peerloom.protocol.flood_pace import PROOF_COST
from peerloom.protocol.flood_proof import contradiction, convicts, is_signed
from peerloom.protocol.flood_repair import Repair
from peerloom.protocol.limits import MAX_FLOOD_CUT
from peerloom.protocol.types import PeerId

MAX_DOUBTS = 16  # segments of a link that do not check and may be a liar's rather than the sender's fault


class Liars(Repair):
    """Judges origins and those who pass their messages on."""

    def _doubt(self, link: Link, history: History, segment: Segment, agreed: bool) -> None:
        """A segment that says something else than what is held: its origin lies, if it signed it."""
        if not is_signed(segment, self._run_id, self._verify):
            self._unsigned(link, history.origin, segment.batch.sequence, agreed)
        elif (proof := contradiction(history, segment)) is not None:
            self._cut(link, proof)

    def _unsigned(self, link: Link, origin: PeerId, sequence: int, agreed: bool) -> None:
        """Forged, if the sender said what comes before it; else the two may differ there: ask with the chain told."""
        link.doubts += 1
        if agreed or link.doubts > MAX_DOUBTS:
            self._refuse(link, "forged")
        else:
            self._refuse(link, "doubtful")
            self._do(Send(link.peer, Wants((Want(origin, max(0, sequence - 1)),))))

    def _judge(self, link: Link, proof: Proof) -> None:
        """Who is no origin here cannot be convicted here: keys are made at will, and a proof is kept for good.

        Should it become one, its proof comes again with the next comparison.
        """
        if proof.origin in self._proofs:
            return
        if not self._admits(proof.origin):
            self._refuse(link, "origin")
        elif not convicts(proof, self._run_id, self._verify):
            self._refuse(link, "false_proof")
        elif self._cut(link, proof):
            link.pace.repeats.left += PROOF_COST  # it was not in vain

    def _cut(self, link: Link, proof: Proof) -> bool:
        """Whether there was room for one more."""
        if len(self._proofs) >= MAX_FLOOD_CUT:
            self._refuse(link, "origins")
            return False
        self._exclude(proof)
        return True

    def _exclude(self, proof: Proof) -> None:
        origin = proof.origin
        self._do(Keep(proof))
        self._do(Count("flood_cut"))
        self._apply()  # what is taken out must be in
        history = self._convict(proof)
        if history is not None and history.base:
            self._do(Resync(origin))
        elif history is not None and history.next:
            self._do(Retract(tuple(history.batches(0, history.next))))
        self._tell_exile()
        for link in self._links.values():
            link.outbox = [segment for segment in link.outbox if segment.batch.origin != origin]
            self._do(Send(link.peer, proof))
        self._relink()  # a liar's own links to this node may stay: over them it learns that it is out

    def _tell_exile(self) -> None:
        if self._own in self._proofs and not self._exiled:
            self._exiled = True
            self._do(Exiled())

    def _relink(self) -> None:
        opened = partners(self._own, self._peers - self._proofs.keys(), self._seed, self._spec.neighbours)
        if opened != self._opened:
            self._opened = opened
            self._do(Links(opened))
