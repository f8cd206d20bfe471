"""A child process with a pipe for messages, seen from asyncio: its messages, its stderr, and how it died."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe

from peerloom.node.worker_seams import WorkerDied

log = logging.getLogger("peerloom.worker")

ASK_S = 3.0  # a step under way may end
EXIT_S = 5.0  # between closing the pipe and having ended
KEPT_LINES = 40
# glibc gives a freed activation back to the kernel and takes fresh pages for the next one: a thousand page faults a
# step of a small model, 7 to 10 % of its time on a CPU. These keep freed memory; other C libraries ignore them.
KEEP_FREED = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


# Threads that wait for each other at the end of an operation spin, by default for milliseconds. Where another program
# has taken the core of one of them, all the others spin until it is back, thousands of times a step: two nodes with two
# threads each on two cores took 4 s for a step of 0.07 s, and take 0.11 s with this; a lone node is no slower for it.
SPIN_BRIEFLY = {"GOMP_SPINCOUNT": "1000"}


class Child:
    """Runs `python -m MODULE PIPE_FD MEMORY_FD PARENT_PID [FD ...]`, the module getting all those descriptors.

    A fresh interpreter, as `spawn` gives, but by `subprocess`: `multiprocessing` would import the daemon's `__main__`
    into the child and keep a resource tracker beside it. All that the child prints goes to the log `peerloom.worker`.
    `what` is what a death's message calls it; `code` is its exit code, negative for a signal, once it has ended.
    """

    def __init__(
        self, module: str, memory_fd: int, others: Sequence[int] = (), what: str = "the worker process"
    ) -> None:
        self.what = what
        self.code: int | None = None
        self._pipe, theirs = Pipe()
        self._stderr_fd, stderr = os.pipe()
        os.set_blocking(self._stderr_fd, False)
        fds = (theirs.fileno(), memory_fd, *others)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, (*fds[:2], os.getpid(), *others))],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=fds,
                env={**KEEP_FREED, **SPIN_BRIEFLY, **os.environ},
            )
        except OSError:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(stderr)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial_line = b""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reaper: asyncio.Task[None] | None = None
        self.last_words = ""  # what the child itself gave as the reason of its end

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def attach(self, on_message: Callable[[object], None], on_death: Callable[[WorkerDied], None]) -> None:
        """Begins to read, in the running loop; `on_death` is called once, after the last message. Safe to repeat."""
        if self._loop is not None:
            return
        self._on_message, self._on_death = on_message, on_death
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._pipe.fileno(), self._read_pipe)
        self._loop.add_reader(self._stderr_fd, self._read_stderr)

    def send(self, message: object) -> None:
        """Sends a small message; to a dead child it goes nowhere, and the death is reported by `on_death`."""
        try:
            self._pipe.send(message)
        except OSError:
            log.debug("the worker no longer reads its pipe")

    def kill(self) -> None:
        """Ends the child by force; its death is told as any other."""
        self._process.kill()

    async def end(self, farewell: object) -> None:
        """Sends `farewell`, kills the child when it is still there after ASK_S, and frees everything."""
        try:
            self.send(farewell)
            try:
                async with asyncio.timeout(ASK_S):
                    await self._ended.wait()
            except TimeoutError:
                log.warning("the worker did not end within %.0f s; killing it", ASK_S)
                self._process.kill()
                await self._ended.wait()
        finally:
            self._free()

    def _read_pipe(self) -> None:
        try:
            while self._pipe.poll():
                self._on_message(self._pipe.recv())
        except (EOFError, OSError):
            assert self._loop is not None
            self._loop.remove_reader(self._pipe.fileno())
            self._reaper = self._loop.create_task(self._reap())

    async def _reap(self) -> None:
        """The pipe is over: the process has ended or is about to."""
        assert self._loop is not None
        try:
            code = await self._loop.run_in_executor(None, self._process.wait, EXIT_S)
        except subprocess.TimeoutExpired:
            log.warning("the worker closed its pipe and went on for %.0f s; killing it", EXIT_S)
            self._process.kill()
            code = self._process.wait()
        self._read_stderr()
        self.code = code
        self._ended.set()
        self._on_death(WorkerDied(self._obituary(code)))

    def _obituary(self, code: int) -> str:
        if code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
        else:
            how = f"ended with exit code {code}"
        fatal = [line for line in self._lines if line.startswith("Fatal Python error")]
        said = self.last_words or (fatal or list(self._lines) or [""])[-1]
        return f"{self.what} {how}" + (f": {said}" if said else "")

    def _read_stderr(self) -> None:
        try:
            while chunk := os.read(self._stderr_fd, 1 << 16):
                *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
                for line in lines:
                    self._keep(line)
        except BlockingIOError:
            return  # all read that is there
        if self._loop is not None:
            self._loop.remove_reader(self._stderr_fd)
        self._keep(self._partial_line)
        self._partial_line = b""

    def _keep(self, line: bytes) -> None:
        if text := line.decode("utf-8", "replace").strip():
            self._lines.append(text)
            log.info("%s", text)

    def _free(self) -> None:
        """Also when end() was cancelled: nothing outlives it."""
        if self._reaper is not None:
            self._reaper.cancel()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._loop is not None:
            self._loop.remove_reader(self._pipe.fileno())
            self._loop.remove_reader(self._stderr_fd)
        self._close()

    def _close(self) -> None:
        self._pipe.close()
        os.close(self._stderr_fd)
