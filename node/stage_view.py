"""The pipeline as this node sees it: who hosts what by the records, less those it has found dead itself."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from peerloom.node.context import Context
from peerloom.node.logs import short
from peerloom.protocol.errors import LinkError, PeerloomError
from peerloom.protocol.placement import Claim, missing_stages
from peerloom.protocol.types import NodeState, PeerId, PeerRecord, StageRole

log = logging.getLogger(__name__)

MISSED = 2
ANSWER_S = 3.0  # a live node answers a Status within
WAITS_FOR = "waits_for_stage"  # the counter by which a host says so in its Status
CUT = slice(16, 32)  # of an init digest, where that of the cut lies
MAX_WARNED = 64  # nodes that a log names, who may be made up
LEAVING: frozenset[NodeState] = frozenset({"draining"})


class StageView:
    """Reads `context.view`; records outlive their node by half a minute, so what does not answer is left out."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._dead = context.view.silent
        self._missed: Counter[PeerId] = Counter()  # probes in a row without an answer
        self._warned: set[PeerId] = set()

    def records(self) -> list[PeerRecord]:
        """The trainers that are there, this node left out, and those that cut the model otherwise."""
        return [
            record
            for record in self._context.view.believed()
            if record.role == "trainer" and record.state not in LEAVING
            if not self._is_dead(record) and self._cuts_alike(record)
        ]

    def _cuts_alike(self, record: PeerRecord) -> bool:
        """Whether its stages have the layers that ours have, as far as both have said by now."""
        own, theirs = self._context.facts.init_digest[CUT], record.init_digest[CUT]
        if not (own and theirs) or own == theirs:
            return True
        if record.peer_id not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(record.peer_id)
            log.warning(
                "%s cuts the model into other stages and is left alone: it runs another version; update the older one",
                short(record.peer_id),
            )
        return False

    def claims(self) -> list[Claim]:
        """What the others host, claim or stand by for."""
        return [
            Claim(record.peer_id, record.stage, record.stage_role) for record in self.records() if record.stage_role
        ]

    def own(self) -> Claim:
        """What this node says of itself."""
        facts = self._context.facts
        return Claim(facts.peer_id, facts.stage, facts.stage_role)

    def missing(self) -> list[int]:
        """The stages that nobody hosts, this node counted."""
        return missing_stages([*self.claims(), self.own()], self._context.spec.pipeline.stages)

    def hosts(self, stage: int, role: StageRole = "hosts") -> list[PeerRecord]:
        """The nodes of a stage, in id order."""
        found = [record for record in self.records() if record.stage == stage and record.stage_role == role]
        return sorted(found, key=lambda record: record.peer_id)

    async def expect_host(self, peer: PeerId, stage: int) -> None:
        """Raises LinkError unless a peer hosts a stage by its newest record, and has no faults to be left alone for."""
        if not self._is_host(peer, stage):
            await self._context.view.refresh()
            if not self._is_host(peer, stage):
                raise LinkError(f"by its record this peer does not host stage {stage}")

    def _is_host(self, peer: PeerId, stage: int) -> bool:
        return any(record.peer_id == peer for record in self.hosts(stage))

    async def check(self, peer: PeerId) -> bool:
        """Whether a node answers; one that does not is left out until it publishes anew."""
        record = self._context.view.record_of(peer)
        if record is None:
            return False
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._context.transport.status(record)
        except (PeerloomError, TimeoutError) as error:
            log.warning("%s (stage %d) does not answer: %s", short(peer), record.stage, str(error) or "no word")
            self._dead[peer] = record.issued_at
            return False
        return True

    async def probe(self) -> None:
        """Asks every host for a sign of life; one that gives none twice in a row is left out, as by check()."""
        hosts = [record for record in self.records() if record.stage_role == "hosts"]
        answers = await asyncio.gather(*(self._answers(record) for record in hosts))
        for record, answered in zip(hosts, answers, strict=True):
            self._missed[record.peer_id] = 0 if answered else self._missed[record.peer_id] + 1
            if self._missed[record.peer_id] >= MISSED:
                log.warning("%s (stage %d) answers no more", short(record.peer_id), record.stage)
                self._dead[record.peer_id] = record.issued_at
                del self._missed[record.peer_id]

    async def _answers(self, record: PeerRecord) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._context.transport.status(record)
        except (PeerloomError, TimeoutError):
            return False
        return True

    async def waits_for(self, record: PeerRecord) -> int:
        """The stage that a host says it waits for; -1: none, or it does not say."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await self._context.transport.status(record)
        except (PeerloomError, TimeoutError):
            return -1
        return int(status.counters.get(WAITS_FOR, -1.0))

    def _is_dead(self, record: PeerRecord) -> bool:
        at = self._dead.get(record.peer_id)
        if at is None:
            return False
        if record.issued_at > at:
            del self._dead[record.peer_id]
            return False
        return True
