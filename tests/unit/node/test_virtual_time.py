"""The virtual-time loop: hours in no time, in order, the same each time; a deadlock is an error, not a hang."""

from __future__ import annotations

import asyncio
import time

import pytest

from peerloom.node.clock import SystemClock
from peerloom.node.seams import Clock
from peerloom.node.virtual_time import WALL_BASE, Deadlock, VirtualClock, VirtualTimeLoop, run_virtual


def test_hours_pass_at_once_and_timers_keep_their_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        log: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            for _ in range(3):
                await asyncio.sleep(seconds)
                log.append((name, round(loop.time(), 6)))

        await asyncio.gather(sleeper("hour", 3600), sleeper("minute", 60), sleeper("day", 86400 * 2))
        return log

    log = run_virtual(main)
    assert log == [
        ("minute", 60),
        ("minute", 120),
        ("minute", 180),
        ("hour", 3600),
        ("hour", 7200),
        ("hour", 10800),
        ("day", 172800),
        ("day", 345600),
        ("day", 518400),
    ]
    assert run_virtual(main) == log


def test_timeouts_fire_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500):
                await asyncio.sleep(10_000)
        return asyncio.get_running_loop().time()

    assert run_virtual(main, start=7.0) == pytest.approx(507)


@pytest.mark.parametrize("start", [0.0, 1e7, 1e9])
def test_tiny_steps_from_a_large_start_do_not_spin(start: float) -> None:
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(1e-9)
        return asyncio.get_running_loop().time()

    assert run_virtual(main, start=start) >= start


@pytest.mark.parametrize("start", [-1.0, 1e15, float("nan")])
def test_a_start_that_floats_cannot_resolve_is_refused(start: float) -> None:
    with pytest.raises(ValueError, match="virtual time starts between"):
        VirtualTimeLoop(start)


def test_nothing_ready_and_no_timer_is_a_deadlock_that_names_the_task() -> None:
    cleaned = []

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def main() -> None:
        await asyncio.sleep(5)
        await asyncio.create_task(stuck(), name="the-stuck-one")

    with pytest.raises(Deadlock, match=r"at virtual time 5 s .* waiting: .*the-stuck-one"):
        run_virtual(main)
    assert cleaned == [True]


def test_what_the_coroutine_raises_comes_out_and_left_tasks_are_cancelled() -> None:
    ended = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            ended.append(asyncio.get_running_loop().time())
            raise

    async def main() -> None:
        task = asyncio.create_task(background())
        await asyncio.sleep(1)
        assert not task.done()
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        run_virtual(main)
    assert ended == [1.0]


def test_threads_run_in_place() -> None:
    async def main() -> tuple[int, float]:
        value = await asyncio.to_thread(lambda a, b: a + b, 2, b=3)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return value, asyncio.get_running_loop().time()

    assert run_virtual(main) == (5, 0.0)


def test_queues_between_tasks_work() -> None:
    async def main() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

        async def produce() -> None:
            for i in range(5):
                await asyncio.sleep(0.1)
                await queue.put(i)

        task = asyncio.create_task(produce())
        got = [await queue.get() for _ in range(5)]
        await task
        return got

    assert run_virtual(main) == [0, 1, 2, 3, 4]


def test_the_virtual_clock_follows_the_loop_and_its_wall_can_be_off() -> None:
    async def main() -> None:
        clock: Clock = VirtualClock()
        skewed = VirtualClock(asyncio.get_running_loop(), base=1000.0, skew=-5.0)
        await asyncio.sleep(2.5)
        assert (clock.monotonic(), clock.wall()) == (2.5, WALL_BASE + 2.5)
        assert skewed.wall() == 997.5
        skewed.jump(10.0)
        assert (skewed.wall(), skewed.monotonic()) == (1007.5, 2.5)
        skewed.skew = 0.0
        assert skewed.wall() == 1002.5

    run_virtual(main)


def test_the_loop_closes_clean() -> None:
    loop = VirtualTimeLoop()
    loop.run_until_complete(asyncio.sleep(10))
    assert loop.time() == 10
    loop.close()
    assert loop.is_closed()


def test_the_system_clock_reads_the_machine() -> None:
    clock: Clock = SystemClock()
    assert time.monotonic() <= clock.monotonic() <= time.monotonic()
    assert time.time() - 60 < clock.wall() < time.time() + 60
