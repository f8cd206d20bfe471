"""Fetches the base model from the peers that train on it, where this machine cannot have it otherwise.

The digest is the run's `model.digest`, or without one that which most trainers announce, and nothing opens the weights
before they come to it. Configuration and tokenizer, which no digest covers, are taken as most of those trainers have
them. A donor is scored when what it sent is proven wrong: weights of another digest, or files that make no model. Other
faults count only once the digest is reached: until then the configuration that a donor is held to may itself be the
lie.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from peerloom.node import base_folder
from peerloom.node.context import Context
from peerloom.node.flood_join import ask_manifest, fetch_whole
from peerloom.node.flood_joiner import FLOODING
from peerloom.node.joiner import Joiner
from peerloom.node.logs import short
from peerloom.node.worker_seams import SeedflowPort
from peerloom.protocol.base import MAX_FILES_BYTES, BaseFiles, Claim, choose_base, unpack_files, weight_bytes
from peerloom.protocol.errors import (
    BaseMissing,
    LinkError,
    MalformedMessage,
    NoDonor,
    PeerloomError,
    ProtocolError,
    RunMismatch,
    SpecError,
    VersionMismatch,
)
from peerloom.protocol.membership import BAD_BASE
from peerloom.protocol.messages import FetchRequest, StateManifest
from peerloom.protocol.transfer import FetchMachine
from peerloom.protocol.types import PeerId

log = logging.getLogger(__name__)

RETRY_S = 2.0
VOTERS = 5  # donors whose files are compared: digests of them, a few hundred bytes each
MANIFESTS_S = 480.0  # for all donors; half of it for one, which first writes its base, between two flushes
BAD_FILES = "bad_base_files"
NONE_ALIKE = -1  # FetchMachine's skew: no piece stays that a new donor's manifest does not name


class BaseJoiner:
    """Leaves the base in the run's folder; `worker` is asked what a configuration amounts to."""

    def __init__(self, context: Context, worker: SeedflowPort) -> None:
        self._context, self._worker = context, worker
        self._received = 0
        self._last = ""  # why the last donor failed
        self._refused: set[PeerId] = set()  # whose weights had another digest

    async def fetch(self, missing: BaseMissing) -> None:
        """Fetches it; raises `missing` in a swarm of one, NoDonor when no peer could hand it over, or StorageError."""
        context, settings, named = self._context, self._context.settings, self._context.spec.model.digest
        if not settings.expect_peers:
            raise missing
        log.warning("%s; looking for a peer that hands it over", missing)
        context.facts.enter("fetching", "looking for a peer that hands over the base model")
        await context.view.wait_for_anybody(settings.first_view_s)
        give_up_at = context.clock.monotonic() + settings.donor_patience_s
        while True:
            digest, donors = choose_base(self._claims())
            if donors and await self._fetched(digest, donors):
                return
            if context.clock.monotonic() >= give_up_at:
                why = self._last or f"no trainer {'has the one that the run names' if named else 'is there'}"
                raise NoDonor(f"{missing}; and no peer could hand over the base model ({why}): put it in its place")
            await asyncio.sleep(RETRY_S)
            await context.view.refresh()

    def _claims(self) -> list[Claim]:
        named = self._context.spec.model.digest
        return [
            Claim(record.peer_id, record.init_digest, record.messages)
            for record in self._context.view.believed()
            if record.role == "trainer" and record.state in FLOODING and named in ("", record.init_digest)
        ]

    async def _fetched(self, digest: str, donors: Sequence[PeerId]) -> bool:
        """Goes by the files that most donors have, with everybody's weights; then by those of the next ones."""
        for alike in await self._votes(digest, donors[:VOTERS]):
            for donor, announced in alike:
                if donor in self._refused:
                    continue
                others = [peer for peer in donors if peer not in (donor, *self._refused)]
                if await self._by_files_of(donor, announced, [donor, *others], len(alike) - 1):
                    return True
        return False

    async def _votes(self, digest: str, donors: Sequence[PeerId]) -> list[list[tuple[PeerId, StateManifest]]]:
        """Those that announce the same files together, the most first."""
        request = FetchRequest(digest, kind="base_files")
        found = await asyncio.gather(*(self._announced(donor, request) for donor in donors))
        groups: dict[tuple[int, tuple[bytes, ...]], list[tuple[PeerId, StateManifest]]] = {}
        for donor, manifest in zip(donors, found, strict=True):
            if manifest is not None:
                groups.setdefault((manifest.total_bytes, manifest.piece_digests), []).append((donor, manifest))
        if len(groups) > 1:
            log.warning("the peers have %d different configurations or tokenizers for one base", len(groups))
        return sorted(groups.values(), key=len, reverse=True)

    async def _announced(self, donor: PeerId, request: FetchRequest) -> StateManifest | None:
        record = self._context.view.record_of(donor)
        if record is None:
            return None
        try:
            return await ask_manifest(self._context.transport, record, request, MAX_FILES_BYTES)
        except PeerloomError as error:
            self._last = str(error)
            if isinstance(error, ProtocolError):
                self._refuse(donor, BAD_FILES, str(error))
            else:
                log.info("%s does not hand over its base: %s", short(donor), error)
        return None

    async def _by_files_of(
        self, donor: PeerId, announced: StateManifest, donors: list[PeerId], witnesses: int
    ) -> bool:
        folder, digest = base_folder.empty(self._context.settings.run_dir), announced.layout
        try:
            files = await self._files(donor, announced)
            base_folder.write_files(folder, files)
            numel = await self._worker.base_numel(folder)
            size = weight_bytes(numel, files.encoding)
            await self._weights(digest, folder, files.encoding, size, donors)
            self._done(digest, folder, files.encoding, witnesses)
        except (SpecError, ProtocolError) as error:
            self._last = str(error)
            if not witnesses:  # else it may be this node's libraries that are too old for it
                self._refuse(donor, BAD_FILES, str(error))
        except (LinkError, NoDonor, RunMismatch, VersionMismatch) as error:
            self._last = str(error)
        else:
            return True
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        log.warning("no base model by the files of %s: %s", short(donor), self._last)
        return False

    async def _files(self, donor: PeerId, announced: StateManifest) -> BaseFiles:
        """Configuration and tokenizer; raises LinkError or ProtocolError."""
        context, request = self._context, FetchRequest(announced.layout, kind="base_files")
        record = context.view.record_of(donor)
        if record is None:
            raise LinkError("its record has expired")
        data = await fetch_whole(context.transport, record, request, announced.total_bytes)
        self._received += len(data)
        if base_folder.piece_digests(data, announced.piece_bytes) != announced.piece_digests:
            raise MalformedMessage("it hands over other files than it announced")
        return unpack_files(data)

    async def _weights(self, digest: str, folder: Path, encoding: str, size: int, donors: list[PeerId]) -> None:
        """Streams them to disk and has them come to the digest; raises NoDonor or StorageError."""
        context, candidates = self._context, list(donors)
        while candidates:
            faults: list[tuple[PeerId, str]] = []
            joiner = self._joiner(faults)
            machine = FetchMachine(candidates, digest, size, NONE_ALIKE, kind="base")
            file = base_folder.WeightsFile(folder / base_folder.WEIGHTS)
            try:
                _, sources = await joiner.fetch_into(
                    machine, file.store, manifest_within_s=MANIFESTS_S, fp32=False
                )
            finally:
                file.close()
                self._received += file.received
            found = await asyncio.to_thread(base_folder.weights_digest, file.path, encoding)
            if found == digest:
                for peer, fault in faults:  # now it is known who was right
                    context.view.score(peer, fault)
                return
            liar = sources[-1]  # every piece in place is as its manifest announced it
            self._refuse(liar, BAD_BASE, f"its weights have the digest {found[:16]}, not {digest[:16]}")
            candidates.remove(liar)
            self._refused.add(liar)
            if liar == donors[0]:
                break  # its files are not to be trusted either
        raise NoDonor(f"no peer's weights had the digest {digest[:16]}")

    def _joiner(self, faults: list[tuple[PeerId, str]]) -> Joiner:
        context = self._context

        def blame(peer: PeerId, fault: str) -> None:
            faults.append((peer, fault))

        def progress(what: str, share: float) -> None:
            context.progress("fetching the base model", share)

        return Joiner(context.transport, context.view.record_of, blame, progress)

    def _refuse(self, donor: PeerId, fault: str, why: str) -> None:
        self._last = why
        log.warning("the base model of %s was refused: %s", short(donor), why)
        self._context.facts.count("base_refused")
        self._context.view.score(donor, fault)

    def _done(self, digest: str, folder: Path, encoding: str, witnesses: int) -> None:
        context, size = self._context, self._received
        base_folder.keep(context.settings.run_dir, folder, encoding, digest, size)
        context.facts.count("base_fetched")
        context.facts.count("base_fetched_bytes", size)
        context.journal.write("base_fetched", bytes=size, digest=digest, witnesses=witnesses)
        alike = f"{witnesses} other peers have" if witnesses else "nobody else could be found to have"
        sentence = f"fetched the base model for {size} bytes; its digest is the swarm's; {alike} the same configuration"
        context.say(sentence)
        log.info("%s", sentence)
