"""Child processes pinned to a core, stopped and continued as whole sessions."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil

STOP_S = 15.0
LOOK_S = 0.05
T = TypeVar("T")


class Ended(Exception):
    """A process of the benchmark ended by itself, or said nothing in time; the message has the end of its output."""


class Session:
    """One command and all that it starts, on one core or, with None, on all; its output goes to the file `output`."""

    def __init__(self, command: Sequence[str], core: int | None, output: Path) -> None:
        self.output = output
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, before if core is None else {core})  # inherited, from the first instruction on
        try:
            with output.open("wb") as file:
                self.started_at = time.time()
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
        finally:
            os.sched_setaffinity(0, before)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.go_on()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        for process in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Of the command itself."""
        return self._process.pid

    def kill(self) -> None:
        """kill -9 of the command alone, as it would happen to it."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stops every process of it."""
        for process in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def go_on(self) -> None:
        """Continues them, parents last, so that none waits for one that is stopped."""
        for process in reversed(self._members()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def wait_for(self, look: Callable[[], T | None], timeout_s: float) -> T:
        """What `look` returns, once it is not None; raises Ended."""
        give_up_at = time.monotonic() + timeout_s
        while (found := look()) is None:
            self.check()
            if time.monotonic() > give_up_at:
                raise Ended(self._said(f"gave nothing for {timeout_s:.0f} s"))
            time.sleep(LOOK_S)
        return found

    def check(self) -> None:
        """Raises Ended when the command has ended by itself."""
        if self._process.poll() is not None:
            raise Ended(self._said(f"ended with {self._process.returncode}"))

    def _said(self, how: str) -> str:
        return f"{self.output.name} {how}: {self.output.read_text(errors='replace')[-2000:]}"

    def _members(self) -> list[psutil.Process]:
        """The command, its descendants, and theirs in sessions of their own (p2pd)."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextlib.contextmanager
def paused(sessions: Sequence[Session]) -> Iterator[None]:
    """Stops these sessions for as long as it is entered; the newest signal first to those started last."""
    for session in reversed(sessions):
        session.pause()
    try:
        yield
    finally:
        for session in sessions:
            session.go_on()
