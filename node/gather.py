"""Fetches the newest copy of every stage of a live pipeline, as a client of its swarm, for `peer export --from`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from peerloom.node import checkpoint
from peerloom.node.config import NodeConfig
from peerloom.node.logs import short
from peerloom.node.observer import Observer, open_observer
from peerloom.node.stage_copies import receive_copy
from peerloom.protocol.errors import CheckpointError, LinkError, NoDonor, PeerError, RunMismatch, VersionMismatch
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.services import STAGE
from peerloom.protocol.stage_messages import Copy, StageOpen, StageOpened
from peerloom.protocol.types import PeerRecord

log = logging.getLogger(__name__)

ANSWER_S = 20.0
COPY_S = 3600.0


async def gather(config: NodeConfig, invites: list[str], folder: Path) -> RunSpec:
    """Leaves a checkpoint of each stage under `folder`, as a node's run folder has them; returns the run's spec.

    Raises CheckpointError that names the stages nobody handed over, RunMismatch for a run without stages.
    """
    async with AsyncExitStack() as stack:
        observer = await open_observer(invites, stack)
        spec = observer.spec
        if spec.method != "pipeline":
            raise RunMismatch(f"the run is {spec.method}: each node holds the whole model; export from a node's home")
        records = [status.record for status in await observer.look() if status.record.stage_role]
        missing = [stage for stage in range(spec.pipeline.stages) if not await _stage(observer, records, stage, folder)]
    if missing:
        named = ", ".join(map(str, missing))
        raise CheckpointError(f"no node handed over a checkpoint of stage {named}; try again once they have saved one")
    return spec


async def _stage(observer: Observer, records: list[PeerRecord], stage: int, folder: Path) -> bool:
    """Whether somebody handed over the stage: its hosts are asked first, then whoever may keep a copy."""
    for record in sorted(records, key=lambda record: (record.stage != stage, record.stage_role != "hosts")):
        try:
            await _fetch(observer, record, stage, folder)
            return True
        except (PeerError, NoDonor, RunMismatch, VersionMismatch, TimeoutError) as error:  # whatever a peer may name
            log.info("no stage %d from %s: %s", stage, short(record.peer_id), str(error) or "no answer")
    return False


async def _fetch(observer: Observer, record: PeerRecord, stage: int, folder: Path) -> None:
    async with asyncio.timeout(COPY_S):
        stream = await observer.transport.open(record, STAGE)
        try:
            await stream.send(StageOpen("fetch", stage))
            async with asyncio.timeout(ANSWER_S):
                taken, offer = await stream.receive(), await stream.receive()
            if not isinstance(taken, StageOpened) or not isinstance(offer, Copy) or offer.stage != stage:
                raise LinkError("it holds no copy")
            await receive_copy(stream, offer, checkpoint.stage_folder(folder, stage), observer.spec, keep=1)
        finally:
            await stream.close()
