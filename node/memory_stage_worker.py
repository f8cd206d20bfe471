"""The in-memory worker of a pipeline's stage: no model, only the time that passes and the account of what was trained.

Its checkpoints are real ones, on the disk, of a theta that holds the number of its updates.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from peerloom.node import checkpoint
from peerloom.node.memory_worker import MemoryDisk, MemoryWorker
from peerloom.node.seams import FIRST_STEP, WorkerReady, WorkerSetup
from peerloom.node.worker import messages
from peerloom.protocol.ledger import Microbatch

A = TypeVar("A")

WIDTH = 4
LAYOUT = "57a9e0"


class MemoryStageWorker(MemoryWorker):
    """Each pass takes half of `step_s`; `trained` counts the microbatches whose gradients went into an update."""

    def __init__(self, *, step_s: float = 0.1, start_s: float = 0.0, disk: MemoryDisk | None = None) -> None:
        super().__init__(step_s=step_s, start_s=start_s, disk=disk)
        self.trained: Counter[Microbatch] = Counter()
        self.versions: list[tuple[int, int]] = []  # (update, version) of each forward pass that counted
        self._gradients: dict[int, list[Microbatch]] = {}
        self._updates: dict[Microbatch, int | None] = {}
        self._boxes: tuple[bytearray, bytearray] = (bytearray(), bytearray())

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> WorkerReady:
        """Resumes the newest checkpoint of the stage."""
        self._check()
        await asyncio.sleep(self._start_s)
        self._check()
        self._setup, self._progress, self._stepped = setup, progress, False
        pipeline, train = setup.spec.pipeline, setup.spec.train
        self._last = setup.stage == pipeline.stages - 1
        item = 2 if pipeline.encoding == "bf16" else 4
        slot = train.batch_size // pipeline.microbatches * setup.spec.data.sequence_length * WIDTH * item
        self._boxes = (bytearray(slot), bytearray(slot))
        found, _ = checkpoint.newest_intact(self._folder)
        self._version = found.meta.step if found is not None else 0
        return WorkerReady(
            init_digest="",
            layout_digest=LAYOUT,
            numel=1,
            payload_bytes=slot,
            round=self._version,
            step=self._version,
            tokens=0,
            held_out_loss=None,
            resumed=found is not None,
            pipeline=found.meta.pipeline if found is not None else None,
        )

    @property
    def _folder(self) -> Path:
        return checkpoint.stage_folder(self._setup.run_dir, self._setup.stage)

    def inbox(self, pieces: tuple[int, int] = (0, 1)) -> memoryview:
        """What comes."""
        return memoryview(self._boxes[0])

    def outbox(self, pieces: tuple[int, int] = (0, 1)) -> memoryview:
        """What goes."""
        return memoryview(self._boxes[1]).toreadonly()

    async def ask(self, command: Any, answer: type[A]) -> A:
        """Lets the time of a pass go by."""
        self._check()
        result: object = messages.Ran(self._step_s / 2)
        match command:
            case messages.Forward(microbatch, version, update):
                result = await self._forward(microbatch, version, update)
            case messages.Backward(microbatch):
                await asyncio.sleep(self._step_s / 2)
                self._add(microbatch, self._updates.pop(microbatch))
            case messages.Update(update):
                self._train(update)
            case messages.SaveStage(ledger, lane):
                result = self._save(ledger, lane)
        self._check()
        if not isinstance(result, answer):
            raise TypeError(f"{type(command).__name__} was answered with {type(result).__name__}")
        return result

    async def _forward(self, microbatch: Microbatch, version: int, update: int | None) -> messages.Ran:
        await asyncio.sleep(self._step_s / 2)
        if update is not None:
            self.versions.append((update, version))
        if not self._last:
            self._updates[microbatch] = update
            return messages.Ran(self._step_s / 2)
        await asyncio.sleep(self._step_s / 2)
        self._add(microbatch, update)
        return messages.Ran(self._step_s, 5.0 / (1 + self._version / 10))

    def _add(self, microbatch: Microbatch, update: int | None) -> None:
        if update is not None:
            self._gradients.setdefault(update, []).append(microbatch)

    def _train(self, update: int) -> None:
        if update != self._version:
            raise ValueError(f"asked for update {update} while {self._version} is next")
        self.trained.update(self._gradients.pop(update))
        self._version += 1
        if not self._stepped:
            self._stepped = True
            self._progress(FIRST_STEP, 1.0)

    def _save(self, ledger: dict[int, tuple[int, list[int]]], lane: int) -> Path:
        lanes = [[number, below, ahead] for number, (below, ahead) in ledger.items()]
        meta = checkpoint.Meta(
            round=self._version,
            step=self._version,
            tokens=0,
            batch_cursor=0,
            spec_hash=self._setup.spec.spec_hash(),
            layout_digest=LAYOUT,
            adam_steps=self._version,
            pipeline={"stage": self._setup.stage, "lane": lane, "ledger": lanes},
        )
        theta = torch.tensor([float(self._version)])
        state = checkpoint.Checkpoint(meta=meta, theta=theta, previous=torch.empty(0), optimizer={})
        return checkpoint.save(self._folder, state, keep=self._setup.keep_checkpoints)
