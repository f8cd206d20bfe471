"""The worker as a real process: its life, its deaths, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from peerloom.node.worker import main as worker_main
from peerloom.node.worker.child import KEEP_FREED, SPIN_BRIEFLY
from peerloom.node.worker.main import AUTOGROUP
from peerloom.node.worker.port import WorkerProcess
from peerloom.node.worker_seams import WorkerDied
from peerloom.protocol.errors import DataError
from peerloom.protocol.types import PeerId
from tests.unit.node.tiny import setup, tiny_spec

pytestmark = pytest.mark.slow


def quiet(what: str, share: float) -> None:
    """No progress shown."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
async def new_worker() -> AsyncIterator[Callable[[], WorkerProcess]]:
    """Makes workers that end with the test, however it ends."""
    made: list[WorkerProcess] = []

    def make() -> WorkerProcess:
        made.append(WorkerProcess())
        return made[-1]

    yield make
    for worker in made:
        await worker.stop()


def autogroup(pid: int) -> str:
    """As the kernel tells it: "/autogroup-17 nice 11", or nothing for a session older than its weighing."""
    return Path(f"/proc/{pid}/autogroup").read_text().strip()


def shared_memory() -> set[str]:
    """The machine's, without semaphores: other tests have processes, too."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


async def test_a_whole_life(source: Path, tmp_path: Path, new_worker: Callable[[], WorkerProcess]) -> None:
    named, open_before = shared_memory(), descriptors()
    worker = new_worker()
    worker.launch()
    told: list[str] = []
    ready = await worker.start(replace(setup(tiny_spec(source), tmp_path), nice=11), lambda what, _: told.append(what))
    pid = worker.pid
    assert pid is not None and "tokenizing" in told
    assert psutil.Process(pid).nice() == 11
    if AUTOGROUP.exists():  # the kernel weighs sessions, and a process's own priority only within its session
        assert autogroup(pid).endswith(" nice 11")
        assert autogroup(pid).split()[0] not in autogroup(os.getpid()).split()
    assert KEEP_FREED.keys() | SPIN_BRIEFLY.keys() <= psutil.Process(pid).environ().keys()
    assert list(worker.phases) == ["imports", "model", "data", "checkpoint", "evaluation"]
    start_point = bytes(worker.theta())
    assert len(start_point) == ready.numel * 4 and len(worker.outbox()) == ready.payload_bytes

    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # to the whole group, meant for the daemon
        os.kill(pid, sent)
    trained = await worker.train(0)
    assert (trained.round, trained.step, trained.batches) == (0, 3, 3)
    assert bytes(worker.theta()) == start_point != bytes(worker.outbox())
    worker.inbox()[:] = worker.outbox()
    assert (await worker.finish(mix=True)).round == 1
    assert bytes(worker.theta()) != start_point
    assert (await worker.save()).name == "round-00000001"
    adopted = await worker.adopt(7, 21, memoryview(start_point))
    assert adopted.round == 7 and adopted.held_out_loss == ready.held_out_loss
    assert bytes(worker.theta()) == start_point
    with pytest.raises(ValueError, match="the donor's theta has 4 bytes"):
        await worker.adopt(8, 21, memoryview(b"1234"))
    with pytest.raises(TypeError):
        worker.theta()[0] = 1

    await worker.stop()
    await worker.stop()
    assert not psutil.pid_exists(pid)
    with pytest.raises(WorkerDied, match="was stopped"):
        await worker.train(1)
    assert descriptors() == open_before and shared_memory() == named


async def test_interrupt_ends_the_steps_under_way(
    source: Path, tmp_path: Path, new_worker: Callable[[], WorkerProcess]
) -> None:
    worker = new_worker()
    await worker.start(setup(tiny_spec(source, local_steps=10**6), tmp_path), quiet)
    training = asyncio.create_task(worker.train(0))
    await asyncio.sleep(0)
    await worker.interrupt()
    trained = await training
    assert 1 <= trained.batches < 10**6
    await worker.finish(mix=False)
    await worker.interrupt()  # too late for that round, and none of the next one's business
    training = asyncio.create_task(worker.train(1))
    await asyncio.sleep(0)
    await worker.stop()
    with pytest.raises(WorkerDied):
        await training


@pytest.mark.parametrize(
    ("sent", "said"),
    [(signal.SIGKILL, r"killed by SIGKILL \(out of memory\?\)"), (signal.SIGSEGV, "SIGSEGV: Fatal Python error: Segm")],
)
async def test_a_death_surfaces_in_the_call_under_way_and_the_next(
    source: Path, tmp_path: Path, sent: signal.Signals, said: str, new_worker: Callable[[], WorkerProcess]
) -> None:
    worker = new_worker()
    await worker.start(setup(tiny_spec(source, local_steps=10**6), tmp_path), quiet)
    training = asyncio.create_task(worker.train(0))
    await asyncio.sleep(0)
    assert worker.pid is not None
    os.kill(worker.pid, sent)
    with pytest.raises(WorkerDied, match=said):
        await training
    with pytest.raises(WorkerDied, match=said):
        await worker.finish(mix=False)
    await worker.stop()


async def test_what_the_user_must_mend_is_an_error_and_no_death(
    source: Path, tmp_path: Path, new_worker: Callable[[], WorkerProcess]
) -> None:
    worker = new_worker()
    nowhere = setup(tiny_spec(tmp_path / "nowhere"), tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        await worker.start(nowhere, quiet)
    assert (await worker.start(setup(tiny_spec(source), tmp_path), quiet)).round == 0
    with pytest.raises(WorkerDied, match="ended with exit code 1: ValueError: asked to train round 5"):
        await worker.train(5)
    await worker.stop()


async def test_a_worker_that_does_not_answer_is_killed(
    source: Path, tmp_path: Path, new_worker: Callable[[], WorkerProcess]
) -> None:
    worker = new_worker()
    await worker.start(setup(tiny_spec(source), tmp_path), quiet)
    pid = worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await worker.stop()
    assert not psutil.pid_exists(pid)


async def test_resume_in_a_new_process_is_exact(
    source: Path, tmp_path: Path, new_worker: Callable[[], WorkerProcess]
) -> None:
    async def live(peer_home: Path, first: int, end: int) -> bytes:
        worker = new_worker()
        await worker.start(setup(tiny_spec(source), peer_home), quiet)
        for round in range(first, end):
            await worker.train(round)
            await worker.finish(mix=False)
        theta = bytes(worker.theta())
        await worker.save()
        await worker.stop()
        return theta

    straight = await live(tmp_path / "straight", 0, 4)
    await live(tmp_path / "broken", 0, 2)
    assert await live(tmp_path / "broken", 2, 4) == straight


ORPHAN = """
import asyncio, sys
from pathlib import Path
from peerloom.node.worker.port import WorkerProcess
from tests.unit.node.tiny import setup, tiny_spec

async def main():
    worker = WorkerProcess()
    spec = tiny_spec(Path(sys.argv[1]), local_steps=10**6)
    await worker.start(setup(spec, Path(sys.argv[2])), lambda what, share: None)
    print(worker.pid, flush=True)
    await worker.train(0)

asyncio.run(main())
"""


def test_the_worker_dies_with_its_daemon_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    named = shared_memory()
    command = [sys.executable, "-c", ORPHAN, str(source), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        worker = psutil.Process(int(daemon.stdout.readline()))
        daemon.kill()
        worker.wait(timeout=30)
    assert shared_memory() == named


def test_the_worker_imports_none_of_the_network(tmp_path: Path) -> None:
    code = (
        "import sys; from peerloom.node.worker.main import import_libraries; import_libraries();"
        "print([name for name in ('hivemind', 'grpc', 'typer', 'uvloop', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


async def test_two_nodes_on_one_machine(source: Path, tmp_path: Path, new_worker: Callable[[], WorkerProcess]) -> None:
    spec = tiny_spec(source, encoding="bf16")
    spec = replace(spec, gasloc=replace(spec.gasloc, gamma=0.0))
    pair = [new_worker(), new_worker()]
    for worker in pair:
        worker.launch()
    await asyncio.gather(*(w.start(setup(spec, tmp_path, PeerId(p)), quiet) for w, p in zip(pair, "ab", strict=True)))
    await asyncio.gather(*(worker.train(0) for worker in pair))
    for worker, partner in (pair, reversed(pair)):
        worker.inbox()[:] = partner.outbox()
    losses = [(await worker.finish(mix=True)).round for worker in pair]
    assert losses == [1, 1]
    await asyncio.gather(*(worker.stop() for worker in pair))


STEPS = """
import sys
from peerloom.node.doctor_bench import measure_speed
from peerloom.node.specs import embedded_spec

print("ready", flush=True)
sys.stdin.readline()
print(measure_speed(embedded_spec(), device="cpu", threads=2, seconds=3.0).step_s)
"""


def test_nodes_that_share_their_cores_do_not_spin_in_wait_of_each_others() -> None:
    """Two workers of two threads on two cores: each takes a few times as long as alone, not a hundred times."""

    def step_seconds(count: int) -> float:
        cores = sorted(os.sched_getaffinity(0))[:2]
        command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-W", "ignore", "-c", STEPS]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = {**SPIN_BRIEFLY, **os.environ}
        workers = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]  # type: ignore[call-overload]
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return max(float(worker.communicate()[0]) for worker in workers)

    assert step_seconds(2) < 15 * step_seconds(1)


def test_a_kernel_that_is_asked_too_often_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Busy:
        def write_text(self, text: str) -> None:
            written.append(text)
            if len(written) < 3:
                raise BlockingIOError

    monkeypatch.setattr(worker_main, "AUTOGROUP", Busy())
    monkeypatch.setattr(worker_main, "SESSION_AGAIN_S", 0.0)
    worker_main._weigh_session(10)
    assert written == ["10"] * 3
