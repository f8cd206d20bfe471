"""Ranks of one gloo group as processes: forked from one that has imported torch and transformers, asked over pipes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tests.helpers import HELD

ANSWER_S = 300.0  # with the imports before the first, on a machine that may be busy
END_S = 10.0


class Ranks:
    """Processes in one default group; `run(work, ...)` calls `work(rank, ...)` on all of them, `work` importable."""

    def __init__(self, world_size: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(world_size)]
        self._broken = False  # an answer was not waited for: the next one would be taken for another's
        self._pipes: list[Connection[Any, Any]] = [ours for ours, _ in pairs]
        theirs = [other for _, other in pairs]
        self._host = context.Process(target=_host, args=(theirs, str(folder / "store")))
        self._host.start()
        HELD.add(self._host.pid or 0)
        for other in theirs:
            other.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._host.join(END_S)
        if self._host.exitcode is None:
            os.killpg(self._host.pid or 0, signal.SIGKILL)
            self._host.join()
        HELD.discard(self._host.pid or 0)

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The answers of all ranks; one that raised gives its exception. AssertionError for one that says nothing."""
        self.start(range(len(self._pipes)), work, *arguments)
        return [self.answer(rank) for rank in range(len(self._pipes))]

    def start(self, ranks: Sequence[int], work: Callable[..., Any], *arguments: Any) -> None:
        assert not self._broken, "these ranks hang since an earlier test"
        for rank in ranks:
            self._pipes[rank].send((work, arguments))

    def answer(self, rank: int) -> Any:
        self._broken = not self._pipes[rank].poll(ANSWER_S)
        assert not self._broken, f"rank {rank} said nothing for {ANSWER_S:.0f} s"
        return self._pipes[rank].recv()


def _host(pipes: list[Connection[Any, Any]], store: str) -> None:
    """Imports once, forks a process a rank, and ends with them."""
    os.setsid()
    import transformers.models.llama.modeling_llama  # noqa: F401

    from tests.unit.optim import matrix_board, matrix_cases, matrix_counts, matrix_faults  # noqa: F401

    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking beside threads, which a library's import may have started
        children = [context.Process(target=_rank, args=(rank, pipes, store)) for rank in range(len(pipes))]
        for child in children:
            child.start()
    for pipe in pipes:
        pipe.close()
    for child in children:
        child.join()
    os._exit(0)  # nothing to clean up, and taking the libraries down takes seconds


def _rank(rank: int, pipes: list[Connection[Any, Any]], store: str) -> None:
    for other, pipe in enumerate(pipes):
        if other != rank:
            pipe.close()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(pipes), timeout=timedelta(seconds=60)
    )
    pipe = pipes[rank]
    while True:
        try:
            work, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(work(rank, *arguments))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send(error)
    os._exit(0)  # taking down a group that has lost a rank waits for it
