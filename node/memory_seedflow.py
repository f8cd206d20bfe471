"""The in-memory worker of SeedFlow: integer sums without a model, in the loop's time; for swarms in one process."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from peerloom.node import base_folder
from peerloom.node.worker_seams import FIRST_STEP, Evaluation, SeedflowReady, StepsTaken, WorkerDied, WorkerSetup
from peerloom.protocol.base import CONFIG, BaseFiles
from peerloom.protocol.errors import BaseMissing, MalformedMessage, RunMismatch, SpecError
from peerloom.protocol.flood_messages import Batch, origin_key

MATRICES, RANK = 3, 4
NUMEL = MATRICES * RANK * RANK
_MIX = 0x9E3779B97F4A7C15  # any odd number: coordinates are to look drawn
_LEAST, _MOST = -(2**63), 2**63 - 1

Place = tuple[int, int, int, int]  # period, matrix, row, column


def place_of(period: int, key: int, sequence: int, matrix: int) -> Place:
    """Which coordinate of a matrix a message moves."""
    mixed = ((key ^ sequence * 8 + matrix) * _MIX) % 2**64 >> 40
    return period, matrix, mixed % RANK, mixed // RANK % RANK


def add(sums: Counter[Place], batches: Sequence[Batch], period: int, sign: int = 1) -> None:
    """Adds messages, or takes them out with sign -1."""
    for batch in batches:
        key = origin_key(batch.origin)
        for _, sequence, step, scalar in batch.messages():
            for matrix in range(MATRICES):
                sums[place_of(step // period, key, sequence, matrix)] += sign * scalar


def written(sums: Counter[Place]) -> bytes:
    """The sums that are not zero, in order."""
    return json.dumps(sorted([*place, value] for place, value in sums.items() if value)).encode()


def base_of(seed: int) -> bytes:
    """The base model of a run."""
    return struct.pack(f"<{NUMEL}f", *(seed + index / 7 for index in range(NUMEL)))


class MemorySeedflow:
    """Implements worker_seams.SeedflowPort: a step takes `step_s` seconds, its scalar hangs on peer, sequence, `salt`.

    With `bare` it has no base but the one that a peer handed over.
    """

    def __init__(self, *, step_s: float = 0.1, start_s: float = 0.0, salt: str = "", bare: bool = False) -> None:
        self._salt, self._bare = salt, bare
        self._step_s, self._start_s = step_s, start_s
        self._sums: Counter[Place] = Counter()
        self._interrupted = asyncio.Event()
        self._dead: str | None = None
        self._stepped = False
        self.saves = 0

    def die(self, how: str = "killed by the test") -> None:
        """Makes every later call raise WorkerDied."""
        self._dead = how
        self._interrupted.set()

    def kill(self) -> None:
        """Ends this life by force."""
        self.die("killed")

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> SeedflowReady:
        """Builds nothing, in `start_s` seconds."""
        self._check()
        await asyncio.sleep(self._start_s)
        self._check()
        self._setup, self._progress = setup, progress
        self._period = setup.spec.seedflow.period
        self._base = base_of(setup.spec.seed)
        if self._bare:
            folder = base_folder.fetched(setup.run_dir)
            if folder is None:
                raise BaseMissing(["model.path: this worker has no base"])
            self._base = (folder / base_folder.WEIGHTS).read_bytes()
        digest = blake3(self._base).hexdigest()
        if setup.spec.model.digest not in ("", digest):
            raise RunMismatch("the run names another base than this worker's")
        progress("model", 1.0)
        return SeedflowReady(
            init_digest=digest,
            layout_digest=hashlib.sha256(b"sums").hexdigest(),
            numel=NUMEL,
            state_bytes_max=64 * MATRICES * RANK * RANK * setup.spec.seedflow.periods() + 64,
        )

    async def base_numel(self, folder: Path) -> int:
        """What the configuration says itself."""
        self._check()
        try:
            return int(json.loads((folder / CONFIG).read_bytes())["numel"])
        except (ValueError, KeyError) as error:
            raise SpecError([f"model.path: no configuration of this worker: {error}"]) from error

    async def write_base(self, folder: Path, weights: bool) -> None:
        """The numbers as they are."""
        self._check()
        base_folder.write_files(folder, BaseFiles("fp32", {CONFIG: json.dumps({"numel": NUMEL}).encode()}))
        if weights:
            (folder / base_folder.WEIGHTS).write_bytes(self._base)

    async def steps(self, count: int, first_step: int, first_sequence: int) -> StepsTaken:
        """Takes steps, each `step_s` long; ends early when interrupted."""
        self._check()
        self._interrupted.clear()
        loop, scalars = asyncio.get_running_loop(), list[int]()
        began, limit = loop.time(), self._setup.spec.seedflow.scalar_limit()
        while len(scalars) < count:
            try:
                async with asyncio.timeout(self._step_s):
                    await self._interrupted.wait()
                break
            except TimeoutError:
                text = f"{self._salt} {self._setup.peer_id} {first_sequence + len(scalars)} {first_step + len(scalars)}"
                drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
                scalars.append(drawn % (2 * limit + 1) - limit)
            if not self._stepped:
                self._stepped = True
                self._progress(FIRST_STEP, 1.0)
        self._check()
        batch = Batch(self._setup.peer_id, first_sequence, first_step, tuple(scalars))
        add(self._sums, [batch], self._period)
        tokens = len(scalars) * self._setup.spec.train.batch_size * self._setup.spec.data.sequence_length
        return StepsTaken(scalars=batch.scalars, tokens=tokens, seconds=loop.time() - began, train_loss=1.0)

    async def interrupt(self) -> None:
        """Ends the steps under way."""
        self._interrupted.set()

    async def apply(self, batches: Sequence[Batch]) -> None:
        """Adds messages."""
        self._check()
        add(self._sums, batches, self._period)

    async def retract(self, batches: Sequence[Batch]) -> None:
        """Takes messages out again."""
        self._check()
        add(self._sums, batches, self._period, -1)

    async def state_hash(self, without: Sequence[Batch] = ()) -> bytes:
        """SHA-256 of the sums."""
        self._check()
        sums = Counter(self._sums)
        add(sums, without, self._period, -1)
        return hashlib.sha256(written(sums)).digest()

    async def export_state(self) -> bytes:
        """The sums as JSON."""
        self._check()
        return written(self._sums)

    async def adopt_state(self, state: bytes) -> None:
        """Takes other sums."""
        self._check()
        try:
            rows = json.loads(state or b"[]")
            sums = Counter({(p, m, i, j): value for p, m, i, j, value in rows})
            good = all(isinstance(each, int) and _LEAST <= each <= _MOST for row in rows for each in row)
        except (ValueError, TypeError, RecursionError):
            good = False
        if not good:
            raise MalformedMessage(f"{len(state)} bytes that are no sums")
        self._sums = sums

    async def evaluate(self) -> Evaluation:
        """A figure of the sums' size."""
        self._check()
        return Evaluation(loss=1.0 + sum(map(bool, self._sums.values())) % 7 / 10, accuracy=0.5)

    async def save(self, step: int) -> Path:
        """Counts."""
        self._check()
        self.saves += 1
        return Path(f"memory-{step}")

    async def stop(self) -> None:
        """Ends this life."""
        self._dead = self._dead or "the worker was stopped"

    def _check(self) -> None:
        if self._dead is not None:
            raise WorkerDied(self._dead)
