"""Keeps the weights of a stage's several hosts together: rounds of GASLoC beneath its updates, with the other hosts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from peerloom.node.context import Context
from peerloom.node.gossip_driver import GossipDriver
from peerloom.node.logs import short
from peerloom.node.repeats import Repeats
from peerloom.node.seams import ExchangeStream
from peerloom.node.stage_driver import StageDriver
from peerloom.node.stage_view import StageView
from peerloom.node.worker_seams import StagePort, Taken, WorkerReady
from peerloom.protocol import effects, events
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.membership import FAR_OFF
from peerloom.protocol.replicas import replica_layout, replica_spec
from peerloom.protocol.types import PeerId, Span

log = logging.getLogger(__name__)

MAJORITY = 3  # other hosts of the stage: with fewer, nobody can tell who is the one that is far off


class _Boxes:
    """The gossip driver's end of the worker: where weights lie. To cut local steps short is to come early."""

    def __init__(self, worker: StagePort, hurry: Callable[[], None]) -> None:
        self._worker, self._hurry = worker, hurry

    def outbox(self, pieces: Span = (0, 1)) -> memoryview:
        return self._worker.proposal()

    def inbox(self, pieces: Span = (0, 1)) -> memoryview:
        return self._worker.partner()

    async def interrupt(self) -> None:
        self._hurry()


class StageReplicas:
    """One host's rounds: `gasloc.local_steps` updates, then an exchange. Alone with its stage, it does nothing."""

    def __init__(
        self, context: Context, view: StageView, driver: StageDriver, worker: StagePort, ready: WorkerReady
    ) -> None:
        self._context, self._view, self._driver, self._stage = context, view, driver, driver.machine.stage
        facts, spec = context.facts, replica_spec(context.spec)
        self._local_steps = spec.gasloc.local_steps
        layout = replica_layout(self._stage, ready.layout_digest)
        machine = GossipMachine(facts.peer_id, spec.gasloc, spec.seed, context.rng, layout, ready.replica_bytes)
        self._gossip = GossipDriver(
            machine,
            context.transport,
            _Boxes(worker, self._come_early),
            context.clock,
            layout=layout,
            encoding=spec.gasloc.encoding,
            records=context.view.record_of,
            count=facts.count,
            score=context.view.score,
            repeats=Repeats() if spec.train.min_lr_ratio else None,
        )
        self._others: tuple[PeerId, ...] = ()
        self._early = False
        self._news = asyncio.Event()

    async def serve(self, stream: ExchangeStream) -> None:
        """Runs one exchange that a peer opened; the offer of another stage's host is declined."""
        await self._gossip.serve(stream)

    def look(self) -> None:
        """An update was made, or the swarm is another one."""
        others = tuple(record.peer_id for record in self._view.hosts(self._stage))
        if others != self._others:
            self._others = others
            self._gossip.feed(events.PeersChanged(tuple(events.PeerSeen(peer, 0) for peer in others)))
        self._news.set()

    def drain(self) -> None:
        """Ends the exchange under way if it has not begun to move weights."""
        self._gossip.feed(events.DrainStarted())

    async def run(self) -> None:
        """Round after round until cancelled."""
        round = 0
        try:
            while True:
                await self._local_updates(round)
                await self._driver.mixing("propose", round)
                ended = await self._gossip.exchange_round(round)
                if ended.partner is None and not self._others:
                    await self._driver.mixing("drop", round)
                else:
                    taken = await self._driver.mixing("alone" if ended.partner is None else "mix", round)
                    self._note(round, ended, taken)
                round += 1
        finally:
            await self._gossip.close()

    async def _local_updates(self, round: int) -> None:
        """Returns at the exchange point of a round, with others there; what a time alone cuts off is dropped."""
        while not self._others:
            await self._wait()
        self._gossip.feed(events.RoundStarted(round))
        self._early, made, dropped = False, self._driver.machine.applied, False
        while not self._others or self._driver.machine.applied - made < self._due():
            if not self._others and not dropped:
                await self._driver.mixing("drop", round)
            dropped = not self._others
            await self._wait()

    def _due(self) -> int:
        """Updates before the exchange; at least one, for a peer that trains never sends the same weights twice."""
        return 1 if self._early else self._local_steps

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _come_early(self) -> None:
        self._early = True
        self._news.set()

    def _note(self, round: int, ended: effects.FinishRound, taken: Taken) -> None:
        facts = self._context.facts
        facts.met(ended.partner is not None, ended.reason)
        facts.count("rounds")
        if ended.partner is not None:
            facts.exchanged_with(ended.partner)
            log.info("stage %d: weights averaged with %s", self._stage, short(ended.partner))
            if taken.share < 1:
                facts.count("gossip_clipped")
            if taken.far_off and len(self._others) >= MAJORITY:
                self._context.view.score(ended.partner, FAR_OFF)
        self._context.journal.write(
            "averaged",
            stage=self._stage,
            round=round,
            update=self._driver.machine.applied,
            partner=ended.partner,
            alone_because=ended.reason,
            share=taken.share,
        )
