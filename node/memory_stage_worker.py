"""The in-memory worker of a pipeline's stage: no model, only the time that passes and the account of what was trained.

Its checkpoints are real ones, on the disk. Its few weights are drawn towards an optimum, with noise of the microbatch's
own, so that hosts of one stage drift apart as far as they do not mix.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from peerloom.node import checkpoint
from peerloom.node.checkpoint_meta import Meta
from peerloom.node.memory_worker import MemoryDisk, MemoryWorker
from peerloom.node.worker import messages
from peerloom.node.worker.exchanges import Pieces
from peerloom.node.worker.stage_replica import StageReplica
from peerloom.node.worker_seams import FIRST_STEP, WorkerReady, WorkerSetup
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.replicas import MixingStep, replica_spec

A = TypeVar("A")

WIDTH = 4
NUMEL = 64  # of weights
PULL, NOISE = 0.01, 0.05  # of an update: share of the way to the optimum, and what its microbatches add at random
LAYOUT = "57a9e0"


class Made(NamedTuple):
    """An update as it was made: from which microbatches, and what the weights were after it."""

    update: int
    members: tuple[Microbatch, ...]
    loss: float
    weights: bytes


class MemoryStageWorker(MemoryWorker):
    """Each pass takes half of `step_s`; `trained` counts the microbatches whose gradients went into an update.

    `began` are the weights that this life began with, `made` its updates in order.
    """

    def __init__(self, *, step_s: float = 0.1, start_s: float = 0.0, disk: MemoryDisk | None = None) -> None:
        super().__init__(step_s=step_s, start_s=start_s, disk=disk)
        self.trained: Counter[Microbatch] = Counter()
        self.stage, self.began = -1, b""
        self.made: list[Made] = []
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
        self.stage = setup.stage
        self._last = setup.stage == pipeline.stages - 1
        item = 2 if pipeline.encoding == "bf16" else 4
        slot = train.batch_size // pipeline.microbatches * setup.spec.data.sequence_length * WIDTH * item
        self._boxes = (bytearray(slot), bytearray(slot))
        found, _ = checkpoint.newest_intact(self._folder)
        self._version = found.meta.step if found is not None else 0
        self.weights = found.theta.clone() if found is not None else torch.zeros(NUMEL)
        self.began = self.weights.numpy().tobytes()
        self._place()
        return WorkerReady(
            init_digest="",
            layout_digest=LAYOUT,
            numel=NUMEL,
            replica_bytes=len(self._proposal),
            payload_bytes=slot,
            round=self._version,
            step=self._version,
            tokens=0,
            held_out_loss=None,
            resumed=found is not None,
            pipeline=found.meta.pipeline if found is not None else None,
        )

    def _place(self) -> None:
        spec = replica_spec(self._setup.spec)
        pieces = Pieces(NUMEL, spec.gasloc)
        self._proposal, self._partner = (torch.zeros(sum(pieces.sizes), dtype=torch.uint8) for _ in range(2))
        self._replica = StageReplica(
            self.weights, spec, self._setup.peer_id, pieces, self._proposal, self._partner
        )
        self.mixings: list[MixingStep] = []

    @property
    def _folder(self) -> Path:
        return checkpoint.stage_folder(self._setup.run_dir, self._setup.stage)

    def inbox(self, pieces: tuple[int, int] = (0, 1)) -> memoryview:
        """What comes."""
        return memoryview(self._boxes[0])

    def outbox(self, pieces: tuple[int, int] = (0, 1)) -> memoryview:
        """What goes."""
        return memoryview(self._boxes[1]).toreadonly()

    def proposal(self) -> memoryview:
        """The encoded weights."""
        return self._proposal.numpy().data.toreadonly()

    def partner(self) -> memoryview:
        """Where those of another host go."""
        return self._partner.numpy().data

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
            case messages.Mixing(step, round):
                self.mixings.append(step)
                result = self._replica.take(step, round)
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
        members = self._gradients.pop(update)
        self.trained.update(members)
        for each in members:
            seed = hash((self._setup.spec.seed, self._setup.stage, each.lane, each.index)) % 2**63
            noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
            self.weights.add_(PULL * (1.0 - self.weights) + NOISE * noise, alpha=1 / len(members))
        loss = float((1.0 - self.weights).square().mean())
        self.made.append(Made(update, tuple(members), loss, self.weights.numpy().tobytes()))
        self._version += 1
        if not self._stepped:
            self._stepped = True
            self._progress(FIRST_STEP, 1.0)

    def _save(self, ledger: dict[int, tuple[int, list[int]]], lane: int) -> Path:
        lanes = [[number, below, ahead] for number, (below, ahead) in ledger.items()]
        meta = Meta(
            round=self._version,
            step=self._version,
            tokens=0,
            batch_cursor=0,
            spec_hash=self._setup.spec.spec_hash(),
            layout_digest=LAYOUT,
            adam_steps=self._version,
            pipeline={"stage": self._setup.stage, "lane": lane, "ledger": lanes},
        )
        state = checkpoint.Checkpoint(meta=meta, theta=self.weights.clone(), previous=torch.empty(0), optimizer={})
        return checkpoint.save(self._folder, state, keep=self._setup.keep_checkpoints)
