"""The in-memory worker: GASLoC on a small quadratic, in the loop's time; for whole swarms in one process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from peerloom.node.seams import FIRST_STEP, RoundFinished, RoundTrained, WorkerDied, WorkerReady, WorkerSetup
from peerloom.optim.encode import decode, encode, encoded_bytes
from peerloom.optim.gasloc import GASLoC

NUMEL = 64
PULL = 0.05  # share of the way to the optimum that one step goes


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


class MemoryWorker:
    """Pulls theta towards an optimum of the run seed, with noise of the peer's own; saves into a given dict."""

    def __init__(self, *, step_s: float = 0.1, saved: dict[str, dict[str, object]] | None = None) -> None:
        self._step_s = step_s
        self._saved = saved if saved is not None else {}
        self._interrupted = asyncio.Event()
        self._dead: str | None = None
        self._round = self._step = self._tokens = 0

    def die(self, how: str = "killed by the test") -> None:
        """Makes every later call raise WorkerDied."""
        self._dead = how
        self._interrupted.set()

    def _check(self) -> None:
        if self._dead is not None:
            raise WorkerDied(self._dead)

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> WorkerReady:
        """Builds the quadratic; resumes what `save` left under this peer id."""
        spec = setup.spec.gasloc
        self._setup, self._progress, self._stepped = setup, progress, False
        seed = torch.Generator().manual_seed(setup.spec.seed)
        self._optimum = torch.randn(NUMEL, generator=seed)
        self._params = torch.randn(NUMEL, generator=seed)
        own = int.from_bytes(hashlib.sha256(setup.peer_id.encode()).digest()[:4], "big")
        self._noise = torch.Generator().manual_seed(own)
        size = encoded_bytes(NUMEL, spec.encoding)
        self._outbox = torch.zeros(size, dtype=torch.uint8)
        self._inbox = torch.zeros(size, dtype=torch.uint8)
        init_digest = hashlib.sha256(self._params.numpy().tobytes()).hexdigest()
        self._theta = self._params.clone()
        self._method = GASLoC(
            self._params,
            eta=spec.eta,
            alpha=spec.alpha,
            gamma=spec.gamma,
            momentum=spec.momentum,
            buffers=(self._theta, self._params.clone()),
        )
        resumed = self._resume()
        progress("model", 1.0)
        return WorkerReady(
            init_digest=init_digest,
            layout_digest=hashlib.sha256(f"quadratic-{NUMEL}".encode()).hexdigest(),
            numel=NUMEL,
            payload_bytes=size,
            round=self._round,
            step=self._step,
            tokens=self._tokens,
            held_out_loss=self._loss(),
            resumed=resumed,
        )

    def _resume(self) -> bool:
        state = self._saved.get(self._setup.peer_id)
        if state is None:
            return False
        theta = state["theta"]
        assert isinstance(theta, torch.Tensor)
        self._method.adopt(theta)
        self._round, self._step, self._tokens = (int(str(state[key])) for key in ("round", "step", "tokens"))
        return True

    def _loss(self) -> float:
        return float((self._params - self._optimum).square().mean())

    async def train(self, round: int) -> RoundTrained:
        """Takes the steps of a round, each `step_s` long; ends early when interrupted."""
        self._check()
        self._interrupted.clear()
        self._round = round
        self._method.start_round()
        first, started = self._step, asyncio.get_running_loop().time()
        for _ in range(self._setup.spec.gasloc.local_steps):
            try:
                async with asyncio.timeout(self._step_s):
                    await self._interrupted.wait()
            except TimeoutError:
                self._pull()
                if not self._stepped:
                    self._stepped = True
                    self._progress(FIRST_STEP, 1.0)
            else:
                break
        self._check()
        encode(self._method.proposal(), self._setup.spec.gasloc.encoding, self._outbox)
        return RoundTrained(
            round=round,
            step=self._step,
            tokens=self._tokens,
            first_batch=first,
            batches=self._step - first,
            seconds=asyncio.get_running_loop().time() - started,
            train_loss=self._loss(),
        )

    def _pull(self) -> None:
        noise = torch.randn(NUMEL, generator=self._noise)
        self._params.add_(self._optimum - self._params + noise, alpha=PULL)
        self._step += 1
        self._tokens += self._setup.spec.train.batch_size * self._setup.spec.data.sequence_length

    async def interrupt(self) -> None:
        """Ends the local steps under way."""
        self._interrupted.set()

    def outbox(self) -> memoryview:
        """The encoded proposal."""
        return _bytes(self._outbox)

    def inbox(self) -> memoryview:
        """Where a partner's proposal goes."""
        return _bytes(self._inbox)

    def theta(self) -> memoryview:
        """The round's start point."""
        return _bytes(self._theta)

    async def finish(self, mix: bool) -> RoundFinished:
        """Mixes with weight 1 and steps to the next round."""
        self._check()
        neighbors = []
        if mix:
            encoding = self._setup.spec.gasloc.encoding
            neighbors = [(1.0, decode(self._inbox, encoding))]
        self._method.mix(neighbors)
        self._round += 1
        return RoundFinished(round=self._round, held_out_loss=self._loss())

    async def adopt(self, round: int, step: int, theta: memoryview) -> RoundFinished:
        """Takes a donor's theta."""
        self._check()
        self._method.adopt(torch.frombuffer(bytearray(theta), dtype=torch.float32))
        self._round, self._step = round, step
        return RoundFinished(round=round, held_out_loss=self._loss())

    async def save(self) -> Path:
        """Keeps the state under this peer id."""
        self._check()
        self._saved[self._setup.peer_id] = {
            "theta": self._theta.clone(),
            "round": self._round,
            "step": self._step,
            "tokens": self._tokens,
        }
        return Path(f"memory-{self._round}")

    async def stop(self) -> None:
        """Nothing to free."""
