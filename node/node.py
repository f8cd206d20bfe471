"""One node of a run: serves its peers, keeps its record alive, and trains through one worker life after another.

Everything outside is a seam, so the same class runs on gRPC and a DHT, or fifty times in one process in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from peerloom.node.context import Context
from peerloom.node.methods import LIVES, Life
from peerloom.node.place import Drained
from peerloom.node.seams import Discovery, MessageStream
from peerloom.node.stage_moving import Moved
from peerloom.node.watchdog import watch_progress
from peerloom.node.worker_seams import WorkerDied
from peerloom.protocol.errors import LinkError, WorkerFailed
from peerloom.protocol.lifecycle import restart_delay
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.services import Service
from peerloom.protocol.types import NodeStatus, PeerId

log = logging.getLogger(__name__)

M = TypeVar("M")

HEALTHY_ROUNDS = 5  # after this many rounds, earlier deaths of the worker are forgotten
MAX_FETCHES_A_PEER = 2  # at once: one that does not read must not keep all places of a donor
WITHDRAW_S = 2.0


class Node:
    """A PeerHandler with a life; `worker_factory` is None for a bootstrap peer, which trains nothing.

    `jobs` run beside it once its server listens, until they are cancelled.
    """

    def __init__(
        self,
        context: Context,
        discovery: Discovery,
        worker_factory: Callable[[], Any] | None,
        jobs: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
    ) -> None:
        self._jobs = jobs
        self._context = context
        self._discovery = discovery
        self._worker_factory = worker_factory
        self._trainer: Life | None = None
        self._fetching: Counter[PeerId] = Counter()
        self._interrupting: asyncio.Future[None] | None = None
        context.view.changed = self._peers_changed

    async def serve(self, service: Service[M], stream: MessageStream[M]) -> None:
        """Runs a stream that a peer opened; raises LinkError while this node does not train."""
        if self._trainer is None:
            raise LinkError("this node does not train now")
        await self._trainer.serve(service, stream)

    async def status(self) -> NodeStatus:
        """This node's own state."""
        return self._context.facts.status()

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """Serves this node's theta; raises LinkError while there is none, and for a peer that fetches already."""
        if self._trainer is None:
            raise LinkError("this node holds no model now")
        if self._fetching[peer] >= MAX_FETCHES_A_PEER:
            raise LinkError(f"{MAX_FETCHES_A_PEER} fetches of this peer are under way")
        self._fetching[peer] += 1
        try:
            async for message in self._trainer.fetch(request):
                yield message
        finally:
            self._fetching[peer] -= 1
            self._fetching += Counter()  # drops those of none

    def drain(self) -> None:
        """Begins the end: the round under way is cut short, the state is saved, the record withdrawn."""
        if self._context.draining.is_set():
            return
        self._context.draining.set()
        self._context.facts.enter("draining", "stopping on request")
        if self._trainer is not None:
            self._interrupting = asyncio.ensure_future(self._trainer.interrupt())

    def kill_worker(self) -> None:
        """Ends the training process by force; while draining this ends the node, without a new checkpoint."""
        if self._trainer is not None:
            self._trainer.kill()

    async def run(self) -> None:
        """Lives until drained or done; raises WorkerFailed or NoDonor. The caller stops the seams."""
        context = self._context
        context.facts.addresses = await context.transport.start(self)
        context.joinable()
        view = context.view
        in_rounds = context.spec.method == "gasloc"
        jobs = (
            view.heartbeat,
            view.watch,
            view.keep_spec,
            lambda: watch_progress(context.facts, in_rounds=in_rounds),
            *self._jobs,
        )
        background = [asyncio.create_task(job()) for job in jobs]
        living = asyncio.create_task(self._live())
        try:
            waited = {living, *background}
            while not living.done():
                ended, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()  # a heartbeat that fails ends the node: it would be lost to its peers
        finally:
            for task in (living, *background):
                task.cancel()
            await asyncio.gather(living, *background, return_exceptions=True)
            await self._leave()

    async def _leave(self) -> None:
        if self._interrupting is not None:
            (error,) = await asyncio.gather(self._interrupting, return_exceptions=True)
            if error is not None and not isinstance(error, (WorkerDied, asyncio.CancelledError)):
                log.error("the round could not be cut short", exc_info=error)
        try:
            async with asyncio.timeout(WITHDRAW_S):
                await self._discovery.withdraw()
        except TimeoutError:
            log.info("the record could not be withdrawn in time; it expires by itself")

    async def _live(self) -> None:
        """Worker after worker, until one of them ends in order."""
        if self._worker_factory is None:
            self._context.facts.enter("serving")
            await self._context.draining.wait()
            return
        failures, facts = 0, self._context.facts
        while not self._context.draining.is_set():
            trainer = self._trainer = LIVES[self._context.spec.method](self._context, self._worker_factory())
            try:
                return await trainer.run()
            except Drained:
                return
            except Moved:
                failures = 0
                continue
            except WorkerDied as died:
                failures = 1 if trainer.rounds >= HEALTHY_ROUNDS else failures + 1
                facts.count("worker_deaths")
                reason = str(died)
            finally:
                self._trainer = None
            if self._context.draining.is_set():
                log.warning("the training process ended (%s) while this node was stopping", reason)
                return
            await self._wait_to_restart(reason, failures)

    async def _wait_to_restart(self, died: str, failures: int) -> None:
        delay = restart_delay(failures, self._context.rng)
        if delay is None:
            raise WorkerFailed(
                f"the training process ended {failures} times in a row, last: {died}; its log is above"
            )
        reason = f"the training process ended ({died}); starting it again in {delay:.0f} s"
        log.warning("%s", reason)
        self._context.facts.enter("restarting", reason)
        try:
            async with asyncio.timeout(delay):
                await self._context.draining.wait()
        except TimeoutError:
            log.info("starting the training process again")

    def _peers_changed(self) -> None:
        if self._trainer is not None:
            self._trainer.peers_changed()
