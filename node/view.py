"""This node's view of the swarm: publishes its own record, reads the others', keeps the membership."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from peerloom.node.facts import Facts
from peerloom.node.logs import short
from peerloom.node.seams import Clock, Discovery
from peerloom.protocol.events import PeerSeen
from peerloom.protocol.membership import Membership
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeState, PeerId, PeerRecord, SignedSpec

log = logging.getLogger(__name__)

RENEW_S = 10.0  # records live 30 s: two renewals may be lost
REFRESH_S = 5.0
REFRESH_ALL_S = 15.0  # at most, where many records are to be read: ...
MANY = 32  # ... from here on as many in a second
LOOKOUT_S = 1.0  # while nobody is there to pair with
PROMPT_S = 2.0  # a change of state is published at once, but not more often than this
SPEC_RENEW_S = 3600.0
RUNNING: frozenset[NodeState] = frozenset({"training", "seeking", "exchanging"})
MAX_REMEMBERED = 16_384  # peers whose tokens count on after they left; past it, those with the fewest are forgotten
JUMP_S = 2.0  # a wall clock that moves this far against the monotonic one has been set


class SwarmView:
    """Heartbeats out, records in; `changed` is called when the set of peers that may be paired with is another."""

    def __init__(
        self,
        discovery: Discovery,
        facts: Facts,
        spec: RunSpec,
        clock: Clock,
        signed_spec: SignedSpec | None = None,
    ) -> None:
        self._discovery = discovery
        self._facts = facts
        self._clock = clock
        self.changed: Callable[[], None] = lambda: None
        self.silent: dict[PeerId, float] = {}  # when the last record of a peer that was found dead had been issued
        self._membership = Membership(facts.peer_id, spec.gasloc)
        self._records: dict[PeerId, PeerRecord] = {}
        self._seen_since: dict[PeerId, float] = {}  # monotonic; of those with a record, without a gap
        self._tokens: dict[PeerId, int] = {}
        self._news = asyncio.Event()
        self._told = ""
        self._offset = clock.wall() - clock.monotonic()
        self.signed_spec = signed_spec

    def records(self) -> list[PeerRecord]:
        """The newest records of the others, bootstrap peers among them."""
        return list(self._records.values())

    def left(self) -> dict[PeerId, float]:
        """Who has withdrawn its record, and when (Unix time)."""
        return self._discovery.left()

    def record_of(self, peer: PeerId) -> PeerRecord | None:
        """The newest record of one peer."""
        return self._records.get(peer)

    def believed(self) -> list[PeerRecord]:
        """The records of those that are not left alone for their faults."""
        now = self._clock.monotonic()
        return [record for peer, record in self._records.items() if not self._membership.left_alone(peer, now)]

    def seen_s(self) -> dict[PeerId, float]:
        """For how many seconds each peer's record has been there without a gap."""
        now = self._clock.monotonic()
        return {peer: now - since for peer, since in self._seen_since.items()}

    def tokens(self) -> dict[PeerId, int]:
        """The most tokens that each other trainer ever told of in this node's life, gone ones among them."""
        return dict(self._tokens)

    def live(self) -> tuple[PeerSeen, ...]:
        """Whom this node may pair with now."""
        self._membership.set_layout(self._facts.layout_digest)
        return self._membership.live(self._clock.monotonic())

    def seen(self) -> tuple[PeerSeen, ...]:
        """As `live`, with those that are left alone."""
        self._membership.set_layout(self._facts.layout_digest)
        return self._membership.seen(self._clock.monotonic())

    def score(self, peer: PeerId, fault: str) -> None:
        """Holds a fault against a peer."""
        self._facts.count("peer_faults")
        log.warning("peer %s: %s", short(peer), fault)
        if self._membership.score(peer, fault, self._clock.monotonic()):
            self._facts.count("peers_left_alone")
        self.changed()

    def tell(self) -> None:
        """This node's state changed: if that is news to the others, its record goes out soon.

        The turns of a round are none: they would store the record every two seconds.
        """
        word: str = "running" if self._facts.state in RUNNING else self._facts.state
        word = f"{word} {self._facts.stage_role} {self._facts.stage}"
        if word != self._told:
            self._told = word
            self._news.set()

    def announce(self) -> None:
        """This node's record says something new: it goes out soon."""
        self._news.set()

    async def refresh(self) -> None:
        """Reads all records once."""
        self._records = {record.peer_id: record for record in await self._discovery.peers()}
        now = self._clock.monotonic()
        self._seen_since = {peer: self._seen_since.get(peer, now) for peer in self._records}
        self._remember_tokens()
        if self._membership.update(self.records(), self._clock.monotonic()):
            self.changed()

    async def own_record(self) -> PeerRecord | None:
        """What the swarm holds of this very identity: of another life, or of another node with the same key."""
        return await self._discovery.own_record()

    async def wait_for_anybody(self, seconds: float) -> None:
        """Waits until one record of another node is seen, or for `seconds`."""
        deadline = self._clock.monotonic() + seconds
        while not self._records and self._clock.monotonic() < deadline:
            await self.refresh()
            if not self._records:
                await asyncio.sleep(0.5)

    async def heartbeat(self) -> None:
        """Publishes every RENEW_S, and soon after a change; until cancelled."""
        while True:
            self._news.clear()
            if not await self._discovery.publish(self._facts.record()):
                self._facts.count("publish_failed")
                self._news.set()  # again soon: others hold the record for 30 s only
            self._look_at_clock()
            await asyncio.sleep(PROMPT_S)
            try:
                async with asyncio.timeout(RENEW_S - PROMPT_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def watch(self) -> None:
        """Reads the others' records every REFRESH_S, or LOOKOUT_S while nobody may be paired with; until cancelled.

        Less often where there are more than MANY, up to REFRESH_ALL_S: each look brings them all.
        """
        while True:
            await self.refresh()
            at_work = self.live() or (self._facts.stage_role == "hosts" and self._facts.state == "training")
            every_s = min(REFRESH_ALL_S, REFRESH_S * max(1.0, len(self._records) / MANY))
            await asyncio.sleep(every_s if at_work else LOOKOUT_S)

    async def keep_spec(self) -> None:
        """Renews the run's spec, so that it outlives its owner; until cancelled."""
        while self.signed_spec is not None:
            stored = await self._discovery.publish_spec(self.signed_spec)
            await asyncio.sleep(SPEC_RENEW_S if stored else RENEW_S)

    def _remember_tokens(self) -> None:
        for peer, record in self._records.items():
            if record.role == "trainer":
                self._tokens[peer] = max(record.tokens, self._tokens.get(peer, 0))
        if len(self._tokens) > MAX_REMEMBERED:
            most = sorted(self._tokens, key=self._tokens.__getitem__, reverse=True)[:MAX_REMEMBERED]
            self._tokens = {peer: self._tokens[peer] for peer in most}

    def _look_at_clock(self) -> None:
        offset = self._clock.wall() - self._clock.monotonic()
        if abs(jump := offset - self._offset) > JUMP_S:
            log.warning("this machine's clock was set by %+.1f s while the node ran; records follow it", jump)
            self._facts.count("clock_jumps")
        self._offset = offset
