"""Processes that a benchmark asks for figures: spawned, spoken to over pipes, and gone when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

ANSWER_S = 120.0  # a turn of the long form; what takes longer hangs
END_S = 10.0


class EndFailed(Exception):
    """A process of the benchmark raised, died or said nothing; the message has its traceback."""


class Ends:
    """Some processes, each running `work(pipe, *arguments)`; `turn` asks all at once and gives their answers."""

    def __init__(self, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of this process, its threads least, is in theirs
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for each in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(work, theirs, *each))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()  # an end reads this as the order to leave
        for process in self._processes:
            process.join(END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # and what it has started and not ended
            process.join()

    @property
    def pids(self) -> list[int]:
        """The processes' ids."""
        return [process.pid or 0 for process in self._processes]

    def answers(self) -> list[Any]:
        """One message from each; raises EndFailed."""
        return [self._answer(pipe) for pipe in self._pipes]

    def tell(self, messages: Sequence[Any]) -> None:
        """Sends one message to each."""
        for pipe, message in zip(self._pipes, messages, strict=True):
            pipe.send(message)

    def turn(self, message: Any) -> list[Any]:
        """Sends the same message to all, then waits for the answer of each."""
        self.tell([message] * len(self._pipes))
        return self.answers()

    @staticmethod
    def _answer(pipe: Connection[Any, Any]) -> Any:
        if not pipe.poll(ANSWER_S):
            raise EndFailed(f"a benchmark process said nothing for {ANSWER_S:.0f} s")
        try:
            answer = pipe.recv()
        except EOFError:
            raise EndFailed("a benchmark process died") from None
        if isinstance(answer, EndFailed):
            raise answer
        return answer


def _run(work: Callable[..., None], pipe: Connection[Any, Any], *arguments: Any) -> None:
    os.setsid()  # so that all it starts can be ended with it
    try:
        work(pipe, *arguments)
    except (EOFError, BrokenPipeError):
        return  # the benchmark is over
    except Exception:
        pipe.send(EndFailed(traceback.format_exc()))


def on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` as the daemon would."""
    import uvloop

    uvloop.run(main)


async def received(pipe: Connection[Any, Any]) -> Any:
    """The next message, without holding up the loop; raises EOFError when the benchmark is over."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()
