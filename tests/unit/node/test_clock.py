"""One conformance suite of Clock, run on the real one and on the virtual twin."""

from __future__ import annotations

import asyncio

import pytest

from peerloom.node.clock import SystemClock
from peerloom.node.seams import Clock
from peerloom.node.virtual_time import VirtualClock, run_virtual


async def look(clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    before, wall = clock.monotonic(), clock.wall()
    assert before == pytest.approx(loop.time(), abs=1.0), "sleeping is asyncio's: its loop runs on the same clock"
    await asyncio.sleep(0.02)
    passed = clock.monotonic() - before
    assert passed >= 0.019
    assert clock.wall() - wall == pytest.approx(passed, abs=1.0)
    assert wall > 1_600_000_000, "wall time is Unix time"


async def test_the_systems_clock() -> None:
    await look(SystemClock())


def test_the_virtual_clock() -> None:
    async def main() -> None:
        clock = VirtualClock()
        await look(clock)
        before = clock.monotonic()
        clock.jump(3600.0)
        assert clock.monotonic() == before, "only wall time is set"

    run_virtual(main)
