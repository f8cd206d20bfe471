"""The links of one stage's host: it opens one to each node of the next stage, and takes those of the stage before."""

from __future__ import annotations

import asyncio
import logging

from peerloom.node.context import Context
from peerloom.node.logs import short
from peerloom.node.stage_driver import StageDriver
from peerloom.node.stage_link import Stream
from peerloom.node.stage_seeking import TICK_S, StageSeeker
from peerloom.node.stage_view import StageView
from peerloom.protocol.errors import (
    LinkError,
    MalformedMessage,
    NoDonor,
    PeerError,
    PeerloomError,
    RunMismatch,
    VersionMismatch,
)
from peerloom.protocol.services import STAGE
from peerloom.protocol.stage_messages import StageOpen, StageOpened
from peerloom.protocol.types import PeerId, PeerRecord

log = logging.getLogger(__name__)

OPENING_S = 10.0  # a peer that opens a stream and says nothing is cut off


class StageNeighbours:
    """Keeps the links to the next stage; wakes `seeker` when one begins or ends."""

    def __init__(self, context: Context, view: StageView, seeker: StageSeeker) -> None:
        self._context, self._view, self._seeker = context, view, seeker
        self._connecting: dict[PeerId, asyncio.Task[None]] = {}

    def connect(self, driver: StageDriver) -> None:
        """Opens a link to each node of the next stage that has none."""
        for peer, task in list(self._connecting.items()):
            if task.done():
                del self._connecting[peer]
        for record in self._view.hosts(driver.machine.stage + 1):
            if record.peer_id not in driver.downstream and record.peer_id not in self._connecting:
                task = asyncio.create_task(self._link(driver, record), name=f"stage-link-{short(record.peer_id)}")
                self._connecting[record.peer_id] = task

    async def close(self) -> None:
        """Ends the links that this node opened."""
        connecting = list(self._connecting.values())
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)

    async def serve(self, driver: StageDriver | None, stream: Stream, stage: int) -> None:
        """Runs the link that a node of the stage before opened; raises LinkError while `stage` is not hosted here."""
        if driver is None or driver.machine.stage != stage or stage == 0:
            raise LinkError(f"this node does not host stage {stage} now")
        await self._view.expect_host(stream.peer, stage - 1)
        try:
            await driver.serve_upstream(stream)
        finally:
            self._seeker.wake()

    async def _link(self, driver: StageDriver, record: PeerRecord) -> None:
        """One link to a node of the next stage, from its opening to its end."""
        stage = driver.machine.stage + 1
        try:
            stream = await self._context.transport.open(record, STAGE)
        except PeerloomError as error:
            log.info("no link with %s of stage %d: %s", short(record.peer_id), stage, error)
            await self._view.check(record.peer_id)
            await asyncio.sleep(TICK_S)
            return
        try:
            await stream.send(StageOpen("run", stage))
            async with asyncio.timeout(OPENING_S):
                answer = await stream.receive()
            if not isinstance(answer, StageOpened):
                raise MalformedMessage("the next stage did not take the link")
            log.info("linked with %s of stage %d", short(record.peer_id), stage)
            self._seeker.wake()
            await driver.serve_downstream(stream)
        except (PeerError, NoDonor, RunMismatch, VersionMismatch, TimeoutError) as error:  # whatever a peer may name
            log.info("the link with %s of stage %d ended: %s", short(record.peer_id), stage, str(error) or "no answer")
        finally:
            await stream.close()
        await self._view.check(record.peer_id)
        await asyncio.sleep(TICK_S)  # before the next attempt
