"""Nothing may outlive a test: no asyncio task, no thread, no child process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from .helpers import HELD

GRACE_S = 5.0  # a process or thread that is ending may still be seen
gc.disable()  # a fifth of the time of collecting the tests, torch's import above all, would be the collector's


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a thread or a child process; what a fixture of a wider scope holds was there before."""
    threads, children = set(threading.enumerate()), set(_children())
    yield
    deadline = time.monotonic() + GRACE_S
    while left := _threads_but(threads) + _children_but(children):
        if time.monotonic() > deadline:
            pytest.fail(f"left running: {', '.join(left)}")
        time.sleep(0.02)


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Fails a test that leaves a task in its loop."""
    before = asyncio.all_tasks()
    yield
    left = [task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    if left:
        await asyncio.wait(left, timeout=GRACE_S)
    names = [repr(task) for task in left if not task.done()]
    assert not names, f"tasks left: {', '.join(names)}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch with one thread: on small tensors more would wait for each other, and sum in another order."""
    import torch  # not for tests that have none of it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector need not go through it again and again."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts `no_task_left` around every test that has a loop: set up first, it looks last."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.fixturenames.insert(0, "no_task_left")


def _threads_but(known: set[threading.Thread]) -> list[str]:
    """The default executor of a test's loop is not one: it ends with the loop, after the fixtures."""
    return [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread not in known and not thread.daemon and thread.is_alive() and not thread.name.startswith("asyncio_")
    ]


def _children() -> list[psutil.Process]:
    """Linux lists them in a file a thread; psutil alone reads the parent of every process there is, for each test."""
    tasks = Path("/proc/self/task")
    if not (tasks / str(os.getpid()) / "children").exists():
        return psutil.Process().children()
    found = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # a thread, or a child, that has just ended
            found += [psutil.Process(int(pid)) for pid in (task / "children").read_text().split()]
    return found


def _children_but(known: set[psutil.Process]) -> list[str]:
    left = []
    for child in _children():
        try:
            if child in known or child.status() == psutil.STATUS_ZOMBIE or _is_held(child):
                continue
            left.append(f"process {child.pid} {' '.join(child.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return left


def _is_held(child: psutil.Process) -> bool:
    """A process that a fixture of a wider scope owns and ends, or Python's own tracker of shared memory."""
    return child.pid in HELD or "multiprocessing.resource_tracker" in " ".join(child.cmdline())
