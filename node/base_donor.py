"""Serves the base model to late joiners that have none: written to disk once, when the first one asks for it."""

from __future__ import annotations

import asyncio
import mmap
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path

from peerloom.node import base_folder
from peerloom.node.donor import Donor, manifest_of
from peerloom.node.durable import storage_errors
from peerloom.node.seams import Clock
from peerloom.protocol.errors import PeerloomError
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage

KINDS = {"base_files": base_folder.PACKED, "base": base_folder.WEIGHTS}  # by the file that carries it


class BaseDonor:
    """One life's. `write` has the worker write the base into a folder, with or without its weights.

    A base that was fetched is handed on as it is. What was written is a file without a name: the kernel keeps it as
    long as this process has it mapped. Writing goes on when the joiner that asked has left: somebody will ask again.
    """

    def __init__(
        self, clock: Clock, digest: str, run_dir: Path, write: Callable[[Path, bool], Awaitable[None]]
    ) -> None:
        self._run_dir, self._write = run_dir, write
        self._mapping: dict[str, asyncio.Task[mmap.mmap]] = {}
        self._donors = {kind: Donor(clock, digest, partial(self._take, kind, digest)) for kind in KINDS}

    def serve(self, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        """As Donor.serve; a base has no rounds."""
        return self._donors[request.kind].serve(request, 0)

    async def close(self) -> None:
        """Ends what is under way, and gives back the disk."""
        tasks = list(self._mapping.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._mapping.clear()

    async def _take(self, kind: str, digest: str) -> tuple[StateManifest, mmap.mmap]:
        if kind not in self._mapping:
            self._mapping[kind] = asyncio.create_task(self._map(kind), name=f"write-{kind}")
        try:
            data = await asyncio.shield(self._mapping[kind])
        except PeerloomError:
            self._mapping.pop(kind, None)  # the next one may have more luck
            raise
        describe = partial(manifest_of, data, round=0, step=0, layout=digest, held_out_loss=None)
        return await asyncio.to_thread(describe), data

    async def _map(self, kind: str) -> mmap.mmap:
        folder = base_folder.fetched(self._run_dir)
        if folder is not None:
            return _mapped(folder / KINDS[kind])
        written = base_folder.empty(self._run_dir)
        try:
            await self._write(written, kind == "base")
            return _mapped(written / KINDS[kind])
        finally:
            shutil.rmtree(written, ignore_errors=True)


def _mapped(path: Path) -> mmap.mmap:
    with storage_errors(f"the base model {path}"), open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
