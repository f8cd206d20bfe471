"""One conformance suite of SeedflowPort, run on the real process and on the in-memory twin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from peerloom.node import base_folder
from peerloom.node.memory_seedflow import MemorySeedflow
from peerloom.node.worker.seedflow_port import SeedflowProcess
from peerloom.node.worker_seams import FIRST_STEP, SeedflowPort, SeedflowReady, WorkerDied, WorkerSetup
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.flood_messages import Batch
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_seedflow import SeedflowSpec
from peerloom.protocol.types import PeerId
from tests.unit.node.tiny import setup, tiny_spec, write_text

Make = Callable[[], SeedflowPort]

ONE = Batch(PeerId("peer-b"), 0, 0, (100, -200, 300))
LATE = Batch(PeerId("peer-c"), 4, 9, (7, 8))  # of a later period than ONE
BOTH = (ONE, LATE)


def seedflow_spec(source: Path, **changes: object) -> RunSpec:
    flow = SeedflowSpec(rank=4, period=8, max_steps=40, clients=4, learning_rate=1e-3)
    return replace(tiny_spec(source), method="seedflow", seedflow=replace(flow, **changes))  # type: ignore[arg-type]


@pytest.fixture(params=["memory", pytest.param("process", marks=pytest.mark.slow)])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes one worker after another; all are stopped in the end."""
    made = list[SeedflowPort]()

    def worker() -> SeedflowPort:
        made.append(SeedflowProcess() if request.param == "process" else MemorySeedflow(step_s=0.001))
        return made[-1]

    yield worker
    for one in made:
        await one.stop()


@pytest.fixture
def given(tmp_path: Path) -> WorkerSetup:
    return setup(seedflow_spec(write_text(tmp_path / "text")), tmp_path)


async def started(worker: SeedflowPort, given: WorkerSetup) -> tuple[SeedflowReady, list[str]]:
    told: list[str] = []
    return await worker.start(given, lambda what, share: told.append(what)), told


async def test_a_state_is_its_set_of_messages(make: Make, given: WorkerSetup) -> None:
    worker, other = make(), make()
    ready, told = await started(worker, given)
    twin, _ = await started(other, replace(given, peer_id=PeerId("peer-z"), run_dir=given.run_dir.parent / "peer-z"))
    assert (ready.init_digest, ready.layout_digest) == (twin.init_digest, twin.layout_digest)
    empty = await worker.state_hash()
    assert len(empty) == 32 and empty == await other.state_hash()
    taken = await worker.steps(3, 7, 0)  # over a period's end
    assert len(taken.scalars) == 3 and taken.tokens > 0 and FIRST_STEP in told
    own = Batch(given.peer_id, 0, 7, taken.scalars)
    await worker.apply(BOTH)
    await other.apply([LATE])
    await other.apply([own])
    await other.apply([Batch(ONE.origin, 2, 2, ONE.scalars[2:]), Batch(ONE.origin, 0, 0, ONE.scalars[:2])])
    assert await worker.state_hash() == await other.state_hash() != empty
    assert await worker.evaluate() == await other.evaluate(), "the same weights, bit for bit"
    state = await worker.export_state()
    assert state == await other.export_state() and len(state) <= ready.state_bytes_max
    await worker.save(10)
    folder = base_folder.empty(given.run_dir)
    await worker.write_base(folder, False)
    assert not (folder / base_folder.WEIGHTS).exists()
    await worker.write_base(folder, True)
    assert await other.base_numel(folder) == ready.numel
    weights = folder / base_folder.WEIGHTS
    assert base_folder.weights_digest(weights, "fp32") == ready.init_digest, "the base, whatever was trained since"


async def test_retracting_leaves_no_trace(make: Make, given: WorkerSetup) -> None:
    worker = make()
    await started(worker, given)
    await worker.apply([ONE])
    before, figures = await worker.state_hash(), await worker.evaluate()
    await worker.apply([LATE])
    assert await worker.state_hash([LATE]) == before != await worker.state_hash()
    await worker.retract([LATE])
    assert await worker.state_hash() == before and await worker.evaluate() == figures


async def test_a_state_is_adopted_or_refused(make: Make, given: WorkerSetup) -> None:
    worker, other = make(), make()
    await started(worker, given)
    await started(other, replace(given, run_dir=given.run_dir.parent / "other"))
    empty = await worker.state_hash()
    await worker.apply(BOTH)
    state = await worker.export_state()
    await other.apply([replace(ONE, origin=PeerId("peer-d"))])
    await other.adopt_state(state)
    assert await other.state_hash() == await worker.state_hash()
    for bad in (state[:-1], b"sums", state + b"\0" * 10**6):
        with pytest.raises(MalformedMessage):
            await other.adopt_state(bad)
    assert await other.state_hash() == await worker.state_hash(), "a bad state changes nothing"
    await other.adopt_state(b"")
    assert await other.state_hash() == empty


async def test_interrupt_ends_the_steps_early(make: Make, tmp_path: Path) -> None:
    spec = seedflow_spec(write_text(tmp_path / "text"), max_steps=10**6, period=10**6)
    worker = make()
    await started(worker, setup(spec, tmp_path))
    stepping = asyncio.create_task(worker.steps(10**6, 0, 0))
    await asyncio.sleep(0.05)
    await worker.interrupt()
    assert 0 <= len((await stepping).scalars) < 10**6
    await worker.interrupt()  # too late for those, and not for the next ones
    assert len((await worker.steps(2, 10, 10)).scalars) == 2


async def test_a_stopped_or_killed_worker_says_so(make: Make, given: WorkerSetup) -> None:
    worker = make()
    await started(worker, given)
    worker.kill()
    with pytest.raises(WorkerDied):
        await worker.evaluate()
    other = make()
    await other.stop()
    with pytest.raises(WorkerDied):
        await other.steps(1, 0, 0)
