"""Child processes of one command, each in a session of its own, with its output in log files and no orphan left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import psutil

from peerloom.node.parent import ENDS_WITH

_TAIL_BYTES = 4000


class Child:
    """A started process: its first line of stdout as an awaitable, its stdout and stderr in `NAME.out`, `NAME.log`."""

    def __init__(self, name: str, process: Process, stdout: BinaryIO, folder: Path) -> None:
        self.name = name
        self.process = process
        self._stdout = stdout
        self.log = folder / f"{name}.log"
        self.out = folder / f"{name}.out"
        self._first_line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reader = asyncio.create_task(self._read_stdout())

    async def first_line(self) -> str:
        """The first line of stdout, "" when it ended without one."""
        return await asyncio.shield(self._first_line)

    def signal(self, number: signal.Signals) -> None:
        """Signals the process and all it started; nothing happens when they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def terminate(self) -> None:
        """Asks the process itself to stop; what it started is its own to stop."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def how_it_ended(self) -> str:
        """Exit code or signal, in words."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def tail(self) -> str:
        """The end of its log, and of its stdout if the log is empty."""
        text = _end_of(self.log) or _end_of(self.out)
        return f"--- {self.name}: end of its log ---\n{text or '(empty)'}"

    async def _read_stdout(self) -> None:
        lines = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(lines)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._stdout)
        try:
            with self.out.open("wb") as out:
                while line := await lines.readline():
                    out.write(line)
                    out.flush()
                    if not self._first_line.done():
                        self._first_line.set_result(line.decode(errors="replace").strip())
        finally:
            transport.close()
            if not self._first_line.done():
                self._first_line.set_result("")


class Children:
    """Starts children, notices when one ends, and stops them all."""

    def __init__(self, folder: Path, *, stop_within_s: float) -> None:
        self._folder = folder
        self._stop_within_s = stop_within_s
        self._children: list[Child] = []
        self._waits: list[asyncio.Task[int]] = []
        self._one_ended = asyncio.Event()

    async def start(self, name: str, command: Iterable[str]) -> Child:
        """Starts `command` with this process's environment, less the user's own PEER_* settings."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PEER_")}
        environment[ENDS_WITH] = str(os.getpid())  # who is killed cannot stop them
        # a pipe of our own: with asyncio's, wait() lasts until all who inherited it are gone, not just the child
        read_end, write_end = os.pipe()
        with (self._folder / f"{name}.log").open("wb") as log, os.fdopen(write_end, "wb") as stdout:
            reading = os.fdopen(read_end, "rb", buffering=0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=DEVNULL, stdout=stdout, stderr=log, env=environment, start_new_session=True
                )
            except BaseException:
                reading.close()
                raise
        child = Child(name, process, reading, self._folder)
        self._children.append(child)
        wait = asyncio.create_task(process.wait())
        wait.add_done_callback(lambda _: self._one_ended.set())
        self._waits.append(wait)
        return child

    async def first_exit(self) -> None:
        """Returns when any child has ended."""
        await self._one_ended.wait()

    def ended(self) -> list[Child]:
        """The children that have ended so far."""
        return [child for child in self._children if child.process.returncode is not None]

    async def stop(self) -> list[str]:
        """SIGTERM to all, SIGKILL to what is left after `stop_within_s`; returns the names of those killed.

        Raises RuntimeError when a process survives even that.
        """
        for child in self._children:
            child.terminate()
        if self._waits:
            await asyncio.wait(self._waits, timeout=self._stop_within_s)
        killed = [child.name for child in self._children if child.process.returncode is None]
        for child in self._children:
            child.signal(signal.SIGKILL)  # also what a dead leader left behind
        await asyncio.gather(*self._waits, *(child.reader for child in self._children))
        sessions = {child.process.pid for child in self._children}
        _, left = await asyncio.to_thread(psutil.wait_procs, members_of(sessions), timeout=5)
        if left:
            raise RuntimeError(f"processes {sorted(process.pid for process in left)} could not be ended")
        return killed


def members_of(sessions: set[int]) -> list[psutil.Process]:
    """The live processes in these sessions, zombies left out."""
    members = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) in sessions and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def _end_of(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
