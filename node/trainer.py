"""One life of a worker: start it, find this node's place in the swarm, go round after round, save."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import TypeVar, cast

from peerloom.node.context import Context
from peerloom.node.donor import Donor, manifest_of
from peerloom.node.gossip_driver import GossipDriver
from peerloom.node.overlapped import OverlappedRounds
from peerloom.node.place import Held, Place, unless_draining
from peerloom.node.repeats import Repeats
from peerloom.node.rounds import Rounds
from peerloom.node.seams import ExchangeStream, MessageStream
from peerloom.node.worker_seams import FIRST_STEP, STEPS, WorkerPort, WorkerReady
from peerloom.protocol import events
from peerloom.protocol.errors import LinkError, RunMismatch
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage
from peerloom.protocol.services import EXCHANGE, Service

log = logging.getLogger(__name__)

M = TypeVar("M")


class Trainer:
    """Drives one worker from its start to its end; raises WorkerDied, NoDonor or Drained."""

    def __init__(self, context: Context, worker: WorkerPort) -> None:
        self._context = context
        self._worker = worker
        self._facts = context.facts
        self._clock = context.clock
        self._held = Held(context.clock.monotonic())
        self._driver: GossipDriver | None = None
        self._donor: Donor | None = None
        self._rounds: Rounds | None = None

    @property
    def rounds(self) -> int:
        """Rounds finished in this life."""
        return self._rounds.finished if self._rounds is not None else 0

    async def serve(self, service: Service[M], stream: MessageStream[M]) -> None:
        """Runs one exchange that a peer opened; raises LinkError while this node cannot pair, or for other services."""
        if service is not EXCHANGE:
            raise LinkError(f"a run of GASLoC serves no {service.name}")
        if self._driver is None:
            raise LinkError("this node is not training yet")
        await self._driver.serve(cast(ExchangeStream, stream))

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Serves this node's theta; raises LinkError while there is none."""
        if self._donor is None:
            raise LinkError("this node holds no model yet")
        if request.kind != "theta":
            raise RunMismatch(f"this node serves its parameters and no state of kind {request.kind!r}")
        async for message in self._donor.serve(request, self._facts.round):
            yield message
        self._facts.count("state_served")

    async def interrupt(self) -> None:
        """Cuts the round under way short."""
        if self._driver is not None:
            self._driver.feed(events.DrainStarted())
            await self._worker.interrupt()

    def kill(self) -> None:
        """Ends the worker by force: run() raises WorkerDied."""
        self._worker.kill()

    def peers_changed(self) -> None:
        """The live view is another one."""
        if self._driver is not None:
            self._driver.feed(events.PeersChanged(self._context.view.seen()))

    async def run(self) -> None:
        """The whole life: returns when drained, out of budget or past max_rounds, with a checkpoint written."""
        draining, place = self._context.draining, Place(self._context, self._worker, self._held)
        try:
            ready = await unless_draining(draining, self._worker.start(self._context.worker_setup(), self._progress))
            self._context.phases.mark("worker")
            self._facts.ready(ready)
            if ready.note:
                log.warning("%s", ready.note)
            self._donor = Donor(self._clock, ready.layout_digest, self._take_snapshot)
            await unless_draining(draining, place.find(ready))
            self._context.phases.mark("place in the swarm")
            self._driver = self._new_driver(ready)
            self.peers_changed()
            kind = OverlappedRounds if self._context.spec.gasloc.overlap else Rounds
            self._rounds = kind(self._context, self._worker, self._driver, place, self._held)
            await self._rounds.run()
        finally:
            driver, self._driver, self._donor = self._driver, None, None
            if driver is not None:
                await driver.close()
            await self._worker.stop()

    def _progress(self, what: str, share: float) -> None:
        """Passes on how far starting is; the first optimizer step ends it, and steps are signs of life from then on."""
        if what == STEPS:
            self._facts.stepped(int(share))
        elif what == FIRST_STEP:
            self._context.phases.mark(FIRST_STEP)
            self._context.journal.write("first_step")
        else:
            self._context.progress(what, share)

    def _new_driver(self, ready: WorkerReady) -> GossipDriver:
        context, spec = self._context, self._context.spec.gasloc
        machine = GossipMachine(
            self._facts.peer_id,
            spec,
            context.spec.seed,
            context.rng,
            ready.layout_digest,
            ready.piece_bytes or ready.payload_bytes,
        )
        return GossipDriver(
            machine,
            context.transport,
            self._worker,
            self._clock,
            layout=ready.layout_digest,
            encoding=spec.encoding,
            records=context.view.record_of,
            count=self._facts.count,
            score=context.view.score,
            moved=self._show,
            repeats=Repeats() if context.spec.train.min_lr_ratio else None,  # at rate 0 the honest stand still too
        )

    def _show(self, machine: GossipMachine) -> None:
        beneath = self._context.spec.gasloc.overlap  # the worker trains on
        if machine.state != "training" and not beneath and not self._context.draining.is_set():
            self._facts.enter(machine.state, machine.reason)

    async def _take_snapshot(self) -> tuple[StateManifest, bytes]:
        async with self._held.lock:  # never while the worker mixes
            facts, data = self._facts, bytes(self._worker.theta())
            manifest = manifest_of(
                data, round=facts.round, step=facts.step, layout=facts.layout_digest, held_out_loss=facts.loss
            )
            return manifest, data
