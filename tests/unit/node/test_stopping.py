"""A stop, from the first signal to the last resort."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from peerloom.node import stopping
from peerloom.node.stopping import Stopper


class Node:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.killed = asyncio.Event()

    def drain(self) -> None:
        self.told.append("drain")

    def kill_worker(self) -> None:
        self.told.append("kill")
        self.killed.set()


async def signalled() -> None:
    """Sends SIGTERM to this process and lets the loop see it."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)


async def test_before_there_is_a_node_the_start_is_left() -> None:
    async def start() -> str:
        stopper = Stopper()
        stopper.install()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "left" if stopper.early else "cancelled"
        finally:
            stopper.remove()
        return "went on"

    assert await asyncio.create_task(start()) == "left"


async def test_the_first_signal_drains_and_the_second_ends_at_once() -> None:
    stopper, node = Stopper(), Node()
    stopper.install()
    try:
        stopper.drains(node)
        await signalled()
        assert node.told == ["drain"]
        await signalled()
        assert node.told == ["drain", "kill"]
    finally:
        stopper.remove()


async def test_a_worker_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ANSWER_S", 0.1)
    stopper, node = Stopper(), Node()
    stopper.install()
    try:
        stopper.drains(node)
        await signalled()
        await asyncio.wait_for(node.killed.wait(), 10)
        assert node.told == ["drain", "kill"]
    finally:
        stopper.remove()


@pytest.mark.parametrize(("hidden", "asks"), [(False, True), (True, False)])
async def test_a_closed_terminal_asks_to_stop_unless_nohup_hides_it(hidden: bool, asks: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if hidden else signal.SIG_DFL)
    try:
        stopper, node = Stopper(), Node()
        stopper.install()
        try:
            stopper.drains(node)
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
            assert node.told == (["drain"] if asks else [])
        finally:
            stopper.remove()
    finally:
        signal.signal(signal.SIGHUP, before)
