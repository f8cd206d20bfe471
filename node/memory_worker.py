"""The in-memory worker: GASLoC on a small quadratic, in the loop's time; for whole swarms in one process.

What it keeps across lives is what the real one keeps on its disk: the last checkpoint, and the cursor of batches.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from peerloom.node.worker.exchanges import Exchanges, Pieces
from peerloom.node.worker.pace import Beneath, Done, another_step
from peerloom.node.worker_seams import (
    FIRST_STEP,
    STEPS,
    RoundFinished,
    RoundTrained,
    Taken,
    WorkerDied,
    WorkerReady,
    WorkerSetup,
)
from peerloom.optim.fragmented import FragmentedGASLoC
from peerloom.optim.projection import project
from peerloom.protocol.types import Span

A = TypeVar("A")

NUMEL = 64
ALIGNMENT = 4  # of fragments: the quadratic is small
PULL = 0.05  # share of the way to the optimum that one step goes


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


@dataclass(slots=True)
class MemoryDisk:
    """One node's disk: `method` is GASLoC's state at the last save; `cursor` the next batch to draw, kept at once."""

    method: dict[str, Any] | None = None
    round: int = 0
    step: int = 0
    tokens: int = 0
    saves: int = 0
    cursor: int = 0
    distances: tuple[float, ...] = ()


class MemoryWorker:
    """Pulls theta towards an optimum of the run seed, with noise of the peer's own; a step takes `step_s` seconds."""

    def __init__(self, *, step_s: float = 0.1, start_s: float = 0.0, disk: MemoryDisk | None = None) -> None:
        self._step_s = step_s
        self._start_s = start_s
        self._disk = disk if disk is not None else MemoryDisk()
        self._interrupted = asyncio.Event()
        self._finished = asyncio.Event()  # the exchange under local steps is over
        self._dead: str | None = None
        self._round = self._step = self._tokens = self._taken = 0
        self._done = Done()  # in this round

    def die(self, how: str = "killed by the test") -> None:
        """Makes every later call raise WorkerDied."""
        self._dead = how
        self._interrupted.set()
        self._finished.set()

    def kill(self) -> None:
        """Ends this life by force."""
        self.die("killed")

    def _check(self) -> None:
        if self._dead is not None:
            raise WorkerDied(self._dead)

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> WorkerReady:
        """Builds the quadratic; resumes what `save` left on the disk."""
        self._check()
        await asyncio.sleep(self._start_s)
        self._check()
        spec = setup.spec.gasloc
        self._setup, self._progress, self._stepped = setup, progress, False
        self._beneath = Beneath(spec)
        self._params = self._model(setup)
        numel = self._params.numel()
        init_digest = hashlib.sha256(self._params.numpy().tobytes()).hexdigest()
        self._theta = self._params.clone()
        self._pieces = Pieces(numel, spec, ALIGNMENT)
        y = torch.zeros_like(self._params) if spec.overlap else self._params
        self._method = FragmentedGASLoC(
            self._params,
            spec.fragments,
            eta=spec.eta,
            alpha=spec.alpha,
            gamma=spec.gamma,
            momentum=spec.momentum,
            buffers=(self._theta, self._params.clone()),
            alignment=ALIGNMENT,
            y=y if spec.overlap else None,
        )
        size = sum(self._pieces.sizes)
        self._outbox = torch.zeros(size, dtype=torch.uint8)
        self._inbox = torch.zeros(size, dtype=torch.uint8)
        self._exchanges = Exchanges(
            self._method, setup.spec, setup.peer_id, self._pieces, y, self._inbox, self._outbox
        )
        self._exchanges.remember(self._disk.distances)
        resumed = self._resume()
        progress("model", 1.0)
        return WorkerReady(
            init_digest=init_digest,
            layout_digest=hashlib.sha256(f"quadratic-{numel}".encode()).hexdigest(),
            numel=numel,
            payload_bytes=size,
            round=self._round,
            step=self._step,
            tokens=self._tokens,
            held_out_loss=self._loss(),
            resumed=resumed,
            sketch=self._sketch(),
            piece_bytes=self._pieces.sizes,
        )

    def _model(self, setup: WorkerSetup) -> torch.Tensor:
        """theta_0, flat fp32, trained in place."""
        seed = torch.Generator().manual_seed(setup.spec.seed)
        self._optimum = torch.randn(NUMEL, generator=seed)
        self._own_seed = int.from_bytes(hashlib.sha256(setup.peer_id.encode()).digest()[:4], "big") << 24
        self._noise = torch.Generator()
        return torch.randn(NUMEL, generator=seed)

    def _resume(self) -> bool:
        disk = self._disk
        if disk.method is None:
            return False
        self._method.load_state_dict(disk.method)
        self._round, self._step, self._tokens = disk.round, disk.step, disk.tokens
        return True

    def _loss(self) -> float:
        return float((self._params - self._optimum).square().mean())

    async def train(self, round: int, fragment: int = 0, linger_s: float = 0.0) -> RoundTrained:
        """Takes the steps up to the fragment's exchange, each `step_s` long; ends early when interrupted."""
        self._check()
        following = self._round + self._exchanging
        if round != following:
            raise ValueError(f"asked to train round {round} while round {following} is next")
        if fragment != self._exchanges.fragment:
            raise ValueError(f"asked to train fragment {fragment} while fragment {self._exchanges.fragment} is next")
        self._interrupted.clear()
        if fragment == 0:
            self._done = Done()
            self._method.start_round()
        loop, first, spec = asyncio.get_running_loop(), self._disk.cursor, self._setup.spec.gasloc
        started, before, under_way = loop.time(), self._done, self._exchanging
        while True:
            done, took = self._disk.cursor - first, loop.time() - started
            if under_way and not (self._exchanging and self._beneath.goes_on(done, took)):
                started += await self._land(done, took)
                under_way = False
            more = another_step(done, loop.time() - started, spec, fragment, linger_s, before)
            if not (more or (under_way and spec.round_s)) or not await self._one_step():
                break
        self._check()
        if under_way:
            started += await self._land(self._disk.cursor - first, loop.time() - started)
        seconds = loop.time() - started
        self._done = before.plus(self._disk.cursor - first, seconds)
        self._propose()
        return RoundTrained(
            round=round,
            step=self._step,
            tokens=self._tokens,
            first_batch=first,
            batches=self._disk.cursor - first,
            seconds=seconds,
            train_loss=self._train_loss(),
        )

    async def _one_step(self) -> bool:
        """Whether another may follow; an interruption is heeded at once, within the step."""
        try:
            async with asyncio.timeout(self._step_s):
                await self._interrupted.wait()
        except TimeoutError:
            self._stepped_once()
            return True
        return False

    def _stepped_once(self) -> None:
        self._pull()
        if not self._stepped:
            self._stepped = True
            self._progress(FIRST_STEP, 1.0)
        self._taken += 1
        self._progress(STEPS, float(self._taken))

    def _train_loss(self) -> float:
        return self._loss()

    async def _land(self, done: int, elapsed_s: float) -> float:
        self._beneath.over(done, elapsed_s)
        loop = asyncio.get_running_loop()
        since = loop.time()
        if self._exchanging:
            self._finished.clear()
            await self._finished.wait()
            self._check()
        return loop.time() - since

    @property
    def _exchanging(self) -> bool:
        return self._setup.spec.gasloc.overlap and self._exchanges.open

    def _pull(self) -> None:
        noise = torch.randn(NUMEL, generator=self._noise.manual_seed(self._own_seed + self._disk.cursor))
        self._disk.cursor += 1
        self._params.add_(self._optimum - self._params + noise, alpha=PULL)
        self._step += 1
        self._tokens += self._setup.spec.train.batch_size * self._setup.spec.data.sequence_length

    def _propose(self) -> None:
        self._exchanges.propose()
        self._exchanges.send(self._round)

    async def ask(self, command: Any, answer: type[A]) -> A:
        """Knows no method but GASLoC."""
        raise NotImplementedError(f"no {type(command).__name__} here")

    async def interrupt(self) -> None:
        """Ends the local steps under way."""
        self._interrupted.set()

    def outbox(self, pieces: Span = (0, 1)) -> memoryview:
        """The encoded proposal."""
        return _bytes(self._outbox[self._pieces.bytes_of(pieces)]).toreadonly()

    def inbox(self, pieces: Span = (0, 1)) -> memoryview:
        """Where a partner's proposal goes."""
        return _bytes(self._inbox[self._pieces.bytes_of(pieces)])

    def theta(self) -> memoryview:
        """The round's start point."""
        return _bytes(self._theta).toreadonly()

    async def take(self, fragment: int, weight: float, pieces: Span, replace: bool) -> Taken:
        """Takes in pieces of the inbox."""
        self._check()
        return Taken(**self._exchanges.take(weight, pieces, replace)._asdict())

    async def settle(self, fragment: int) -> Taken:
        """Ends a fragment's exchanges."""
        self._check()
        return Taken(**self._exchanges.settle()._asdict())

    async def finish(self, mix: bool) -> RoundFinished:
        """Mixes if told to, and steps to the next round."""
        self._check()
        mixed = self._exchanges.finish(mix)
        self._finished.set()
        self._round += 1
        due = self._round % self._setup.spec.train.eval_every_rounds == 0
        loss = self._loss() if due else None
        return RoundFinished(
            round=self._round,
            held_out_loss=loss,
            sketch=self._sketch(),
            beneath_s=self._beneath.finished(),
            **mixed._asdict(),
        )

    def _sketch(self) -> tuple[float, ...]:
        return tuple(project(self._method.theta, self._setup.spec.seed).tolist())

    async def adopt(self, round: int, step: int, theta: memoryview) -> RoundFinished:
        """Takes a donor's theta."""
        self._check()
        self._method.adopt(torch.frombuffer(bytearray(theta), dtype=torch.float32))
        self._round, self._step = round, step
        self._exchanges.reset()
        return RoundFinished(round=round, held_out_loss=self._loss(), sketch=self._sketch())

    async def save(self) -> Path:
        """Keeps the state on the disk."""
        self._check()
        state, disk = self._method.state_dict(), self._disk
        disk.method = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
        }
        disk.round, disk.step, disk.tokens = self._round, self._step, self._tokens
        disk.distances = tuple(self._exchanges.distances())
        disk.saves += 1
        return Path(f"memory-{self._round}")

    async def stop(self) -> None:
        """Ends this life; nothing is to be freed."""
        self._dead = self._dead or "the worker was stopped"
