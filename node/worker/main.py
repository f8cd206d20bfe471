"""The worker process: `python -m peerloom.node.worker.main PIPE_FD MEMORY_FD PARENT_PID [RANK_FD ...]`.

Started by `port.py` alone, with a pipe to each rank of the node's other devices.

It imports torch and transformers before its first command, so that this overlaps with the daemon's discovery; then it
obeys one command at a time. It ends when the daemon does: by a signal on Linux, by the pipe's end elsewhere.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerloom.node.parent import die_with
from peerloom.node.worker import messages
from peerloom.node.worker_seams import STEPS
from peerloom.protocol.errors import PeerloomError

if TYPE_CHECKING:
    from peerloom.node.worker.tasks import Task

TELL_STEPS_S = 1.0
AUTOGROUP = Path("/proc/self/autogroup")
SESSION_TRIES, SESSION_AGAIN_S = 30, 0.11
LIKELY_MODEL = "transformers.models.llama.modeling_llama"  # the embedded run's; others come with the model


class _Over(Exception):
    """The daemon asked this process to end, or is gone."""


class Worker:
    """Reads commands, runs them on the task, answers; looks at the pipe between local steps."""

    def __init__(
        self, pipe: Connection[Any, Any], memory_fd: int, imports_s: float, ranks: Sequence[Connection[Any, Any]] = ()
    ) -> None:
        self._pipe = pipe
        self._ranks = ranks  # of this node's other devices
        self._memory_fd = memory_fd
        self._imports_s = imports_s
        self._waiting: deque[messages.Request] = deque()
        self._task: Task | None = None
        self._over = False
        self._interrupted = -1  # the number of the local steps that are to end
        self._steps, self._told_at = 0, 0.0

    def run(self) -> None:
        """Obeys until the end; raises what a command raised unless it is the user's to mend."""
        while not self._over:
            request = self._waiting.popleft() if self._waiting else self._receive()
            if isinstance(request.command, messages.Stop):
                return
            if isinstance(request.command, messages.Interrupt):
                continue  # it came too late: those steps are over
            self._answer(request)

    def _answer(self, request: messages.Request) -> None:
        try:
            value = self._obey(request.command)
        except PeerloomError as error:
            value = messages.Refused(type(error).__name__, str(error))
        self._pipe.send(messages.Reply(request.id, value))

    def _receive(self) -> messages.Request:
        try:
            request: messages.Request = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _Over from error
        return request

    def _obey(self, command: messages.Command) -> object:
        if isinstance(command, messages.Start):
            return self._start(command)
        if isinstance(command, messages.BaseNumel):
            from peerloom.node.worker.base import numel_of

            return numel_of(command.folder)
        task = self._task
        if task is None:
            raise RuntimeError("the first command must be Start")
        return task.obey(command, self)

    def _start(self, command: messages.Start) -> messages.Started:
        from peerloom.node.worker.tasks import open_task

        step_back(command.setup.nice)  # only now: what is imported before is waited for
        task = self._task = open_task(command.setup, self._memory_fd, self._progress, self._ranks)
        return messages.Started(task.ready(), task.layout, {"imports": self._imports_s, **task.phases})

    def _progress(self, what: str, share: float) -> None:
        self._pipe.send(messages.Progress(what, share))

    def interrupted(self, number: int) -> bool:
        """Whether to end the steps of that number; commands but a Finish that is due wait. Asked after each step."""
        self._tell_steps()
        while self._pipe.poll():
            self.wait()
        return self._interrupted == number

    def wait(self) -> None:
        """Takes the next command as `interrupted` does."""
        request = self._receive()
        match request.command:
            case messages.Stop():
                raise _Over
            case messages.Interrupt(number):
                self._interrupted = number
            case messages.Finish() if self._task is not None and self._task.exchanging:
                self._answer(request)
            case _:
                self._waiting.append(request)

    def _tell_steps(self) -> None:
        """Lets the daemon see that steps are taken: it cannot tell a long round from a frozen process."""
        self._steps += 1
        now = time.monotonic()
        if now - self._told_at >= TELL_STEPS_S:
            self._told_at = now
            self._progress(STEPS, float(self._steps))


def step_back(nice: int) -> None:
    """Lowers this process's priority to `nice`, 0 to 19, where it is not as low already.

    Of the threads that exist it is the calling one's; those started later have it from there. A Linux that shares the
    CPU out by sessions (sched_autogroup) heeds it within a session alone: there it gets one of its own, as nice.
    """
    nice = max(nice, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    if AUTOGROUP.exists() and os.getsid(0) != os.getpid():
        os.setsid()
        _weigh_session(nice)


def _weigh_session(nice: int) -> None:
    """The kernel takes one such word every tenth of a second, of all processes but root's."""
    for _ in range(SESSION_TRIES):
        try:
            AUTOGROUP.write_text(f"{nice}")
        except BlockingIOError:
            time.sleep(SESSION_AGAIN_S)
        except OSError as error:  # read-only, in a container: then as nice as can be
            logging.getLogger(__name__).debug("the session keeps its weight: %s", error)
            return
        else:
            return
    logging.getLogger(__name__).warning("the kernel does not let this session step back; training has a full share")


def import_libraries() -> float:
    """Imports what every run needs; returns the seconds it took.

    Meanwhile the garbage collector rests, a fifth of the time otherwise, and what was made is its business no more.
    """
    started = time.perf_counter()
    gc.disable()
    for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for module in ("peerloom.node.worker.tasks.gasloc", LIKELY_MODEL):
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    return time.perf_counter() - started


def guarded(pipe: Connection[Any, Any], run: Callable[[], None]) -> int:
    """Runs the worker and returns the exit code; why it failed goes over the pipe, the traceback to stderr."""
    try:
        run()
    except (_Over, BrokenPipeError):
        return 0
    except Exception as error:
        traceback.print_exc()
        named = type(error).__module__.startswith("peerloom.")
        try:
            pipe.send(messages.Crashed(str(error) if named else f"{type(error).__name__}: {error}"))
        except OSError:
            return 0  # the daemon is gone: nobody is left to tell
        return 1
    return 0


def prepare_process(parent_pid: int) -> None:
    """What every process of a worker does first."""
    die_with(parent_pid)  # where that cannot be, the pipe's end ends it, a step later
    # Ctrl-C, terminals and service managers signal the whole group: what it means is the daemon's to say, which drains
    for shared in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(shared, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")


def main() -> int:
    """The process, from its first line to its exit code."""
    pipe_fd, memory_fd, parent_pid, *ranks = map(int, sys.argv[1:])
    prepare_process(parent_pid)
    pipe: Connection[Any, Any] = Connection(pipe_fd)
    others: list[Connection[Any, Any]] = [Connection(fd) for fd in ranks]
    return guarded(pipe, lambda: Worker(pipe, memory_fd, import_libraries(), others).run())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is written; taking torch down in order takes a second, and CUDA may hang in it
