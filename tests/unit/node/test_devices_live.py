"""Real processes: a node that changes its number of devices, loses a rank to a stop and another amid a save."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from peerloom.node import checkpoint
from peerloom.node.worker.group import STORE
from peerloom.node.worker.port import WorkerProcess
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.node.worker_seams import WorkerDied, WorkerSetup
from tests.unit.node.on_devices import apart, on_cpus, quiet, spec_of
from tests.unit.node.tiny import never, setup, task, write_text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "corpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """y and theta of each round, fp32; round and sketch are those of the start."""

    proposals: list[Tensor]
    thetas: list[Tensor]
    round: int
    sketch: tuple[float, ...]


def numbers(view: memoryview) -> Tensor:
    return torch.frombuffer(bytearray(view), dtype=torch.float32)


async def live(worker: WorkerProcess, given: WorkerSetup, count: int) -> Life:
    """Rounds with a partner whose proposal is this node's, a little off, then a checkpoint."""
    ready = await worker.start(given, quiet)
    proposals, thetas = [], []
    for number in range(ready.round, ready.round + count):
        await worker.train(number)
        y = numbers(worker.outbox())
        worker.inbox()[:] = (y + 0.01 * torch.linspace(-1, 1, len(y))).numpy().tobytes()
        await worker.finish(mix=True)
        proposals.append(y)
        thetas.append(numbers(worker.theta()))
    await worker.save()
    return Life(proposals=proposals, thetas=thetas, round=ready.round, sketch=ready.sketch)


def live_here(worker: GaslocTask, count: int) -> Life:
    """The same in this process, on one device."""
    ready = worker.ready()
    first = ready.round
    proposals, thetas = [], []
    for number in range(first, first + count):
        worker.train(number, never)
        y = worker._outbox.view(torch.float32).clone()
        worker._inbox.view(torch.float32).copy_(y + 0.01 * torch.linspace(-1, 1, len(y)))
        worker.finish(mix=True)
        proposals.append(y)
        thetas.append(worker._host_theta.clone())
    worker.save()
    return Life(proposals=proposals, thetas=thetas, round=first, sketch=ready.sketch)


def same(ours: Life, theirs: Life) -> bool:
    assert ours.sketch == pytest.approx(theirs.sketch, abs=1e-3)
    return ours.round == theirs.round and max(
        apart(ours.proposals, theirs.proposals), apart(ours.thetas, theirs.thetas)
    ) <= 1e-6


def kept(home: Path) -> checkpoint.Checkpoint:
    """The newest checkpoint, as any reader beside the node finds it."""
    found, notes = checkpoint.newest_intact(home / "peer-a" / "checkpoints", read_only=True)
    assert found is not None and notes == []
    return found


async def stop_a_rank(worker: WorkerProcess) -> None:
    """One that is stopped, and not dead, takes the group down once the limit is over; the last save stands."""
    pids = worker.pids
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerDied, match=r"rank 1 did not answer in .* \(silent for 5 s\)"):
        await worker.train(2)
    await worker.stop()
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


async def lose_a_rank_amid_a_save(worker: WorkerProcess, folder: Path) -> None:
    """Takes the group down, and is named."""
    pids = worker.pids
    await worker.train(6)
    await worker.finish(mix=False)
    os.kill(pids[2], signal.SIGSTOP)  # it writes nothing, and the others cannot end without it
    saving = asyncio.create_task(worker.save())
    while not (folder / ".new-round-00000007").exists():  # noqa: ASYNC110  another process makes it
        await asyncio.sleep(0.01)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"rank 2 .*SIGKILL|rank 2 did not answer"):
        await saving
    await worker.stop()
    assert len(pids) == 3 and not any(map(psutil.pid_exists, pids))
    assert not (folder / "round-00000007").exists()


NEWEST = {2: "round-00000002", 3: "round-00000006"}  # saved on so many devices


@pytest.mark.slow
async def test_a_node_may_change_its_number_of_devices(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two devices, of which one is stopped, then one, then three, of which one gets no row of the batch and one is
    lost amid a save, then one; all against one all along.
    """
    spec, home = spec_of(source, batch_size=2), tmp_path / "node"
    folder = home / "peer-a" / "checkpoints"
    references = [live_here(task(spec, tmp_path / "one"), 2) for _ in range(3)]
    for reference, devices in zip(references, (2, 1, 3), strict=True):
        if devices == 1:
            worker_here = task(spec, home)
            worker_here._cursor.give_back(worker_here._position.step)  # else it skips what a lost round had drawn
            found = live_here(worker_here, 2)
        else:
            open_before = len(os.listdir("/proc/self/fd"))
            given = replace(on_cpus(setup(spec, home), devices), lost_s=5.0 if devices == 2 else 60.0)
            worker = WorkerProcess(ranks=devices)
            try:
                with caplog.at_level(logging.DEBUG, "peerloom.worker"):
                    found = await live(worker, given, 2)
                assert len(list(folder.glob(f"{NEWEST[devices]}/moments-*-of-{devices:05d}.safetensors"))) == devices
                await (stop_a_rank(worker) if devices == 2 else lose_a_rank_amid_a_save(worker, folder))
            finally:
                await worker.stop()
            assert len(os.listdir("/proc/self/fd")) == open_before
        assert same(found, reference) and not (home / "peer-a" / STORE).exists()
    tables = [record for record in caplog.messages if record.startswith("imbalance")]
    assert len(tables) == 2, "who owns what, once a start"
    again, theirs = task(spec, home), kept(tmp_path / "one")
    assert again.ready().round == 6 and [path.name for path in folder.glob(".*")] == []
    ours = kept(home)
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    for key, value in theirs.optimizer.items():
        torch.testing.assert_close(ours.optimizer[key], value, rtol=1e-3, atol=1e-6, msg=key)
