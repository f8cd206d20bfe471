"""One conformance suite of WorkerPort, run on the real process and on the in-memory twin."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from peerloom.node.memory_worker import MemoryDisk, MemoryWorker
from peerloom.node.worker.port import WorkerProcess
from peerloom.node.worker_seams import FIRST_STEP, WorkerDied, WorkerPort, WorkerReady, WorkerSetup
from peerloom.protocol.types import Encoding
from tests.unit.node.tiny import setup, tiny_spec, write_text

Make = Callable[[], WorkerPort]


@pytest.fixture(params=["memory", pytest.param("process", marks=pytest.mark.slow)])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes one life after another of the same node's worker; all are stopped in the end."""
    disk, made = MemoryDisk(), []

    def worker() -> WorkerPort:
        made.append(WorkerProcess() if request.param == "process" else MemoryWorker(step_s=0.001, disk=disk))
        return made[-1]

    yield worker
    for one in made:
        await one.stop()


@pytest.fixture
def given(tmp_path: Path) -> WorkerSetup:
    return setup(tiny_spec(write_text(tmp_path / "text")), tmp_path)


async def started(worker: WorkerPort, given: WorkerSetup) -> tuple[WorkerReady, list[str]]:
    told: list[str] = []
    return await worker.start(given, lambda what, share: told.append(what)), told


async def test_a_round_alone_and_one_mixed(make: Make, given: WorkerSetup) -> None:
    worker = make()
    ready, told = await started(worker, given)
    assert (ready.round, ready.step, ready.tokens, ready.resumed) == (0, 0, 0, False)
    assert ready.held_out_loss is not None and math.isfinite(ready.held_out_loss)
    theta = bytes(worker.theta())
    assert len(theta) == 4 * ready.numel and len(worker.inbox()) == len(worker.outbox()) == ready.payload_bytes
    trained = await worker.train(0)
    steps = given.spec.gasloc.local_steps
    assert (trained.round, trained.step, trained.first_batch, trained.batches) == (0, steps, 0, steps)
    assert trained.tokens == steps * given.spec.train.batch_size * given.spec.data.sequence_length
    assert FIRST_STEP in told
    assert bytes(worker.theta()) == theta != bytes(worker.outbox())
    finished = await worker.finish(mix=False)
    assert finished.round == 1 and bytes(worker.theta()) != theta
    assert (await worker.train(1)).first_batch == steps
    own = bytes(worker.outbox())
    worker.inbox()[:] = theta  # a partner that stands where this node began
    assert (await worker.finish(mix=True)).round == 2
    assert bytes(worker.theta()) not in (own, theta)


async def test_the_outbox_is_read_only(make: Make, given: WorkerSetup) -> None:
    worker = make()
    await started(worker, given)
    for region in (worker.outbox(), worker.theta()):
        with pytest.raises(TypeError):
            region[0] = 1


async def test_save_and_resume(make: Make, given: WorkerSetup) -> None:
    worker = make()
    await started(worker, given)
    await worker.train(0)
    await worker.finish(mix=False)
    await worker.save()
    saved = bytes(worker.theta())
    await worker.train(1)  # and dies in this round
    await worker.stop()
    again = make()
    ready, _ = await started(again, given)
    assert (ready.round, ready.resumed, bytes(again.theta())) == (1, True, saved)
    assert (await again.train(1)).first_batch == 2 * given.spec.gasloc.local_steps, "no batch is repeated"


async def test_adopt(make: Make, given: WorkerSetup) -> None:
    worker = make()
    ready, _ = await started(worker, given)
    theta = bytes(worker.theta())
    await worker.train(0)
    await worker.finish(mix=False)
    adopted = await worker.adopt(7, 21, memoryview(theta))
    assert (adopted.round, adopted.held_out_loss) == (7, ready.held_out_loss)
    assert bytes(worker.theta()) == theta
    with pytest.raises(ValueError):  # of another size
        await worker.adopt(8, 24, memoryview(b"1234"))
    assert (await worker.train(7)).step == 21 + given.spec.gasloc.local_steps


async def test_interrupt_ends_a_round_early(make: Make, tmp_path: Path) -> None:
    given = setup(tiny_spec(write_text(tmp_path / "text"), local_steps=10**6), tmp_path)
    worker = make()
    await started(worker, given)
    training = asyncio.create_task(worker.train(0))
    await asyncio.sleep(0.05)
    await worker.interrupt()
    assert (await training).batches < 10**6
    assert (await worker.finish(mix=False)).round == 1


async def test_an_interrupt_is_of_one_fragment_s_steps_and_the_next_one_s_go_on(make: Make, tmp_path: Path) -> None:
    """As in timed rounds, where each fragment's steps end when a partner is found."""
    spec = tiny_spec(write_text(tmp_path / "text"), local_steps=4 * 10**6)
    given = setup(replace(spec, gasloc=replace(spec.gasloc, fragments=4)), tmp_path)
    worker = make()
    await started(worker, given)
    counts = []
    for fragment in range(3):
        training = asyncio.create_task(worker.train(0, fragment))
        await asyncio.sleep(0.5)
        assert not training.done()
        await worker.interrupt()
        counts.append((await training).batches)
        await worker.settle(fragment)
    await worker.interrupt()  # too late for all
    training = asyncio.create_task(worker.train(0, 3))
    await asyncio.sleep(0.1)
    assert not training.done()
    await worker.interrupt()
    await training
    assert min(counts) > 1
    assert (await worker.finish(mix=False)).round == 1


async def test_a_timed_round_lingers_until_it_is_interrupted(make: Make, tmp_path: Path) -> None:
    spec = tiny_spec(write_text(tmp_path / "text"))
    given = setup(replace(spec, gasloc=replace(spec.gasloc, round_s=0.2)), tmp_path)
    worker = make()
    await started(worker, given)
    training = asyncio.create_task(worker.train(0, linger_s=3600.0))
    done, _ = await asyncio.wait((training,), timeout=1.0)
    assert not done
    await worker.interrupt()
    assert (await training).batches >= 1
    assert (await worker.finish(mix=False)).round == 1


@pytest.mark.parametrize("encoding", ["fp32", "bf16"])
async def test_overlap_trains_on_while_the_outbox_stands(make: Make, tmp_path: Path, encoding: Encoding) -> None:
    spec = tiny_spec(write_text(tmp_path / "text"), encoding=encoding)
    spec = replace(spec, gasloc=replace(spec.gasloc, overlap=True))
    worker = make()
    await started(worker, setup(spec, tmp_path))
    begun = bytes(worker.theta())
    await worker.train(0)
    sent = bytes(worker.outbox())
    training = asyncio.create_task(worker.train(1))
    await asyncio.sleep(0.2)  # long enough for the steps, which wait for the exchange before they propose
    assert not training.done() and bytes(worker.outbox()) == sent and bytes(worker.theta()) == begun
    worker.inbox()[:] = sent
    assert (await worker.finish(mix=True)).round == 1
    trained = await training
    assert (trained.round, trained.batches) == (1, spec.gasloc.local_steps)
    assert bytes(worker.theta()) != begun and bytes(worker.outbox()) != sent
    assert (await worker.finish(mix=False)).round == 2
    await worker.save()


async def test_a_stopped_worker_says_so(make: Make, given: WorkerSetup) -> None:
    worker = make()
    await started(worker, given)
    await worker.stop()
    await worker.stop()
    with pytest.raises(WorkerDied):
        await worker.train(0)
