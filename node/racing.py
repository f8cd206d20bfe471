"""Happy eyeballs: attempts begun one after the other, the first that succeeds wins (RFC 8305, section 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from peerloom.protocol.errors import PeerloomError

T = TypeVar("T")


class NoneWon(Exception):
    """Every attempt failed; `errors` in the order of the attempts."""

    def __init__(self, errors: list[PeerloomError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors


async def race(
    attempts: Sequence[Callable[[], Awaitable[T]]], delay_s: float, discard: Callable[[T], Awaitable[None]]
) -> T:
    """Begins the next attempt when `delay_s` has passed or one has failed, and cancels the rest when one succeeds.

    Raises NoneWon; what is no PeerloomError is raised as it is. A second success is handed to `discard`.
    """
    tasks: list[asyncio.Future[T]] = []
    waiting = list(attempts)
    winner: asyncio.Future[T] | None = None
    try:
        while True:
            if waiting:
                tasks.append(asyncio.ensure_future(waiting.pop(0)()))
            running = [task for task in tasks if not task.done()]
            if not running and not waiting:
                raise NoneWon([error for task in tasks if isinstance(error := task.exception(), PeerloomError)])
            timeout = delay_s if waiting else None
            done, _ = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in (task for task in running if task in done):
                if task.exception() is None:
                    winner = task
                    return task.result()
                if not isinstance(task.exception(), PeerloomError):
                    task.result()
    finally:
        await _end([task for task in tasks if task is not winner], discard)


async def _end(tasks: list[asyncio.Future[T]], discard: Callable[[T], Awaitable[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and task.exception() is None:
            await discard(task.result())
