"""Copies of stages, kept for one another: this node's stage goes to its keeper, and other nodes' come here.

The stream to the keeper stays open between copies and carries signs of life, so that the keeper learns of a host's
death when it comes and not when its record expires.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from peerloom.node import checkpoint
from peerloom.node.context import Context
from peerloom.node.logs import short
from peerloom.node.seams import MessageStream
from peerloom.node.stage_copies import receive_copy, send_copy
from peerloom.node.stage_view import StageView
from peerloom.protocol.errors import LinkError, MalformedMessage, PeerloomError, ProtocolError, StorageError
from peerloom.protocol.placement import keeper_of
from peerloom.protocol.services import STAGE
from peerloom.protocol.stage_messages import Beat, Copy, Kept, StageMessage, StageOpen, StageOpened
from peerloom.protocol.types import PeerId, PeerRecord

log = logging.getLogger(__name__)

Stream = MessageStream[StageMessage]

RETRY_S = 2.0
KEPT_S = 60.0  # what a keeper gets to write and verify a copy
MAX_ASKED = 16  # nodes that a newcomer asks for a copy


class StageKeeping:
    """What one node does about copies; `run` for a host, `serve_*` for everybody."""

    def __init__(self, context: Context, view: StageView) -> None:
        self._context, self._view = context, view
        self._fresh = asyncio.Event()
        self._keeping: dict[int, Stream] = {}  # the newest stream a stage
        self._taking: set[tuple[PeerId, int]] = set()  # whose copies of which stage are coming now

    def saved(self) -> None:
        """A checkpoint was written: a copy is due."""
        self._fresh.set()

    def held(self) -> dict[int, int]:
        """The update of the newest checkpoint of each stage that lies here."""
        found = {}
        for stage in range(self._context.spec.pipeline.stages):
            newest = checkpoint.newest_files(self._folder(stage))
            if newest is not None:
                found[stage] = newest[0]
        return found

    def _folder(self, stage: int) -> Path:
        return checkpoint.stage_folder(self._context.settings.run_dir, stage)

    # a host's side

    async def run(self, stage: int) -> None:
        """Keeps a stream to the keeper and sends each new checkpoint over it; until cancelled."""
        while True:
            keeper = self._keeper(stage)
            if keeper is None:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._feed(keeper, stage)
            except (PeerloomError, TimeoutError) as error:
                log.info("the copy of stage %d at %s: %s", stage, short(keeper.peer_id), str(error) or "no answer")
                await asyncio.sleep(RETRY_S)

    def _keeper(self, stage: int) -> PeerRecord | None:
        facts = self._context.facts
        peer = keeper_of(stage, self._view.claims(), self._context.spec.pipeline.stages, facts.peer_id)
        return self._context.view.record_of(peer) if peer is not None else None

    async def _feed(self, keeper: PeerRecord, stage: int) -> None:
        """Copies over one stream until another node should have them."""
        stream = await self._open(keeper, StageOpen("keep", stage))
        try:
            self._fresh.set()  # it may have none yet
            while self._keeper_is(keeper.peer_id, stage):
                try:
                    async with asyncio.timeout(self._context.spec.pipeline.heartbeat_s):
                        await self._fresh.wait()
                except TimeoutError:
                    await stream.send(Beat(False))
                    continue
                self._fresh.clear()
                if checkpoint.newest_files(self._folder(stage)) is not None:
                    await self._send(stream, stage)
        finally:
            await stream.close()

    def _keeper_is(self, peer: PeerId, stage: int) -> bool:
        keeper = self._keeper(stage)
        return keeper is not None and keeper.peer_id == peer

    async def _send(self, stream: Stream, stage: int) -> None:
        update = await send_copy(stream, self._folder(stage), stage)
        async with asyncio.timeout(KEPT_S):
            answer = await stream.receive()
        if not isinstance(answer, Kept):
            raise MalformedMessage("the keeper did not say that it keeps the copy")
        self._context.facts.count("stage_copies_sent")
        log.info("stage %d of update %d is kept by %s", stage, update, short(stream.peer))

    async def _open(self, record: PeerRecord, opening: StageOpen) -> Stream:
        stream = await self._context.transport.open(record, STAGE)
        try:
            await stream.send(opening)
            async with asyncio.timeout(self._context.spec.pipeline.dead_after_s):
                answer = await stream.receive()
            if not isinstance(answer, StageOpened):
                raise LinkError("the stream was not taken")
        except BaseException:
            await stream.close()
            raise
        return stream

    async def obtain(self, stage: int) -> int | None:
        """Fetches the newest copy of a stage that others have and this node has not; returns the update that lies here.

        None when there is none anywhere.
        """
        newest = self.held().get(stage)
        for record in self._likely(stage)[:MAX_ASKED]:
            try:
                async with asyncio.timeout(KEPT_S):
                    newest = await self._fetch(record, stage, newest)
            except (PeerloomError, TimeoutError) as error:
                if isinstance(error, StorageError):
                    raise
                log.debug("no copy of stage %d from %s: %s", stage, short(record.peer_id), error)
                if isinstance(error, ProtocolError):
                    self._context.view.score(record.peer_id, "bad_state")
        return newest

    def _likely(self, stage: int) -> list[PeerRecord]:
        """Whom to ask for a copy, likeliest first: those of the stage, the next stage's nodes, the rest."""
        stages = self._context.spec.pipeline.stages
        return sorted(
            (record for record in self._view.records() if record.stage_role in ("hosts", "stands_by")),
            key=lambda record: ((record.stage - stage) % stages, record.stage_role, record.peer_id),
        )

    async def _fetch(self, record: PeerRecord, stage: int, newest: int | None) -> int | None:
        stream = await self._open(record, StageOpen("fetch", stage))
        try:
            offer = await stream.receive()
            if not isinstance(offer, Copy) or offer.stage != stage:
                raise LinkError("it holds no copy")
            if newest is not None and offer.update <= newest:
                return newest
            self._context.facts.enter("fetching", f"stage {stage} as of update {offer.update}")
            meta = await receive_copy(
                stream, offer, self._folder(stage), self._context.spec, keep=self._context.settings.keep_checkpoints
            )
            self._context.facts.count("stage_copies_fetched")
            self._context.journal.write("fetched", stage=stage, update=meta.step, donor=record.peer_id)
            return meta.step
        finally:
            await stream.close()

    # everybody's side

    async def serve_keep(self, stream: Stream, stage: int) -> None:
        """Keeps the copies that a host sends until it ends; raises LinkError when it falls silent."""
        self._expect_other_host(stage)
        await self._view.expect_host(stream.peer, stage)
        await stream.send(StageOpened())
        self._keeping[stage] = stream
        try:
            while (message := await self._next(stream)) is not None:
                match message:
                    case Copy(of_stage) if of_stage == stage:
                        await self._take(stream, message)
                    case Beat():
                        continue
                    case _:
                        raise MalformedMessage(f"a {type(message).__name__} has no place here")
        except LinkError:
            if self._keeping.get(stage) is stream and not await self._view.check(stream.peer):
                self._context.view.changed()  # to be taken over at once, not when its record expires
            raise
        finally:
            if self._keeping.get(stage) is stream:
                del self._keeping[stage]

    def _expect_other_host(self, stage: int) -> None:
        """Raises LinkError once the stage is this node's own: its checkpoints are the worker's to write."""
        facts = self._context.facts
        if facts.stage_role == "hosts" and facts.stage == stage:
            raise LinkError(f"this node hosts stage {stage} itself")

    async def _take(self, stream: Stream, copy: Copy) -> None:
        """Takes a copy in. One at a time of a peer and stage: each lies on the disk until it is whole."""
        self._expect_other_host(copy.stage)
        taking = (stream.peer, copy.stage)
        if taking in self._taking:
            raise LinkError(f"another copy of stage {copy.stage} is coming from this peer")
        self._taking.add(taking)
        try:
            await receive_copy(
                stream,
                copy,
                self._folder(copy.stage),
                self._context.spec,
                keep=self._context.settings.keep_checkpoints,
                admit=lambda: self._expect_other_host(copy.stage),
            )
        finally:
            self._taking.discard(taking)
        self._context.facts.count("stage_copies_kept")

    async def _next(self, stream: Stream) -> StageMessage | None:
        try:
            async with asyncio.timeout(self._context.spec.pipeline.dead_after_s):
                return await stream.receive()
        except TimeoutError:
            raise LinkError("the host of the stage fell silent") from None

    async def serve_fetch(self, stream: Stream, stage: int) -> None:
        """Hands over the newest checkpoint of a stage that lies here."""
        if checkpoint.newest_files(self._folder(stage)) is None:
            raise LinkError(f"no copy of stage {stage} is here")
        await stream.send(StageOpened())
        await send_copy(stream, self._folder(stage), stage)
        async with asyncio.timeout(KEPT_S):
            if await stream.receive() is not None:
                self._context.facts.count("stage_copies_served")
