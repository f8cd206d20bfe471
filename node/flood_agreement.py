"""How a SeedFlow node's worker and its flood machine come to agree, and what is answered where they do.

The machine is ahead of the worker: what it takes waits in `driver.changes` until the steps under way are done. Where a
state must stand for a version vector, as for a hash or a late joiner, all changes are applied first; the two then agree
until the next await on anything but the worker.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from peerloom.node.context import Context
from peerloom.node.donor import manifest_of
from peerloom.node.flood_driver import FloodDriver
from peerloom.node.flood_join import pack
from peerloom.node.flood_joiner import FloodJoiner, swarm_peers
from peerloom.node.logs import short
from peerloom.node.place import unless_draining
from peerloom.node.worker_seams import SeedflowPort
from peerloom.protocol.errors import IdentityInUse, LinkError, PeerloomError
from peerloom.protocol.flood import FloodMachine
from peerloom.protocol.flood_events import Apply, PeersSeen, Resync, Retract
from peerloom.protocol.limits import MAX_PAGE
from peerloom.protocol.messages import StateManifest

log = logging.getLogger(__name__)

RESYNC_RETRY_S = 10.0
MAX_BACK = 4 * MAX_PAGE  # messages that a hash asked for may leave out: each costs as much as applying it did


class Agreement:
    """Applies what the machine took, and answers peers; the trainer says when."""

    def __init__(self, context: Context, worker: SeedflowPort) -> None:
        self._context, self._worker = context, worker
        self._facts, self._clock, self._spec = context.facts, context.clock, context.spec.seedflow
        self._driver: FloodDriver | None = None
        self._joiner: FloodJoiner | None = None
        self._machine: FloodMachine
        self._snapshots: list[asyncio.Future[tuple[StateManifest, bytes]]] = []
        self._bases: list[tuple[Path, bool, asyncio.Future[None]]] = []  # folders to write the base into
        self._hashed_at = context.clock.monotonic()

    def peers_changed(self) -> None:
        """The view of the swarm is another one."""
        if self._driver is not None:
            peers = tuple(sorted(record.peer_id for record in swarm_peers(self._context)))
            self._driver.feed(PeersSeen(peers))

    # what waits is applied, then answered

    async def _sync(self, driver: FloodDriver) -> None:
        """Applies all changes, then answers what was asked meanwhile."""
        while True:
            self._check_driver(driver)
            if driver.changes:
                await self._change(driver)
            elif driver.questions:
                await self._answer(driver)
            elif self._snapshots:
                await self._give_snapshot()
            elif self._bases:
                await self._give_base()
            else:
                return

    async def _change(self, driver: FloodDriver) -> None:
        change = driver.changes.popleft()
        match change:
            case Apply(batches):
                while driver.changes and isinstance(driver.changes[0], Apply):
                    batches += driver.changes.popleft().batches  # type: ignore[union-attr]
                await self._worker.apply(batches)
            case Retract(batches):
                await self._worker.retract(batches)
            case Resync(origin):
                await self._resync(driver, origin)

    async def _resync(self, driver: FloodDriver, origin: str) -> None:
        assert self._joiner is not None  # ours: set by _resume
        self._facts.enter("fetching", f"its state counts messages of {short(origin)}, which lied; fetching another")
        self._mute(driver)  # who asks now, maybe in the same need, is not to wait
        try:
            while not await self._joiner.join(needed=True, dropped=driver.changes.clear, driver=driver):
                self._check_driver(driver)
                await unless_draining(self._context.draining, asyncio.sleep(RESYNC_RETRY_S))
        finally:
            driver.mute = False

    def _mute(self, driver: FloodDriver) -> None:
        driver.mute = True
        while driver.questions:
            peer, query = driver.questions.popitem()
            driver.answer(peer, query.number, b"")

    async def _answer(self, driver: FloodDriver) -> None:
        peer, query = driver.questions.popitem()
        beyond = self._machine.beyond(query.heads)
        far = beyond is None or sum(len(batch.scalars) for batch in beyond) > MAX_BACK
        digest = b"" if beyond is None or far else await self._worker.state_hash(beyond)
        driver.answer(peer, query.number, digest)

    async def _take_snapshot(self) -> tuple[StateManifest, bytes]:
        if self._driver is None:
            raise LinkError("this node holds no state now")
        future: asyncio.Future[tuple[StateManifest, bytes]] = asyncio.get_running_loop().create_future()
        self._snapshots.append(future)
        self._driver.changed.set()
        return await future

    async def _give_snapshot(self) -> None:
        asked, self._snapshots = self._snapshots, []
        snapshot, total, step = self._machine.snapshot(), self._machine.total(), self._machine.next_step
        try:
            data = pack(snapshot, await self._worker.export_state())
        except BaseException:
            for future in asked:
                future.cancel()  # whoever waits is not to wait for ever
            raise
        manifest = manifest_of(data, round=total, step=step, layout=self._facts.layout_digest, held_out_loss=None)
        for future in asked:
            if not future.done():
                future.set_result((manifest, data))

    async def _write_base(self, folder: Path, weights: bool) -> None:
        if self._driver is None:
            raise LinkError("this node holds no base model now")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bases.append((folder, weights, future))
        self._driver.changed.set()
        await future

    async def _give_base(self) -> None:
        """The worker takes one call after the other: this one between two flushes."""
        folder, weights, future = self._bases.pop()
        if future.done():
            return
        try:
            await self._worker.write_base(folder, weights)
        except PeerloomError as error:
            if not future.done():
                future.set_exception(error)
            log.warning("the base model was not handed over: %s", error)
        else:
            if not future.done():
                future.set_result(None)

    async def _hash(self) -> None:
        """Notes the hash of the state as it is; called where worker and machine agree."""
        self._hashed_at = self._clock.monotonic()
        total = self._machine.total()
        self._facts.state_hash, self._facts.messages = (await self._worker.state_hash()).hex(), total
        self._facts.counters["flood_behind"] = float(self._machine.behind())
        self._facts.counters["flood_origins_cut"] = float(len(self._machine.cut))

    # waiting

    def _check_driver(self, driver: FloodDriver) -> None:
        if driver.failed is not None:
            raise driver.failed
        if driver.exiled:
            raise IdentityInUse(
                "this node's identity was cut off by the swarm: its key signed two different histories, as when two "
                "nodes run with it or its run folder was lost; start with a new identity (--home)"
            )

    async def _wait(self, driver: FloodDriver, seconds: float) -> None:
        """Until something changes, or so long."""
        driver.changed.clear()
        if driver.changes or driver.questions or self._snapshots or self._bases or self._context.draining.is_set():
            return
        try:
            async with asyncio.timeout(seconds):
                await driver.changed.wait()
        except TimeoutError:
            self.peers_changed()
