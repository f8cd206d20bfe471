"""The process of rank 1, 2, ...: `python -m peerloom.node.worker.rank PIPE_FD MEMORY_FD PARENT_PID LEADER_FD`.

It does what rank 0 tells it, and ends with it, or with the daemon; the daemon sees its death by the pipe between them.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from peerloom.node.worker.main import guarded, import_libraries, prepare_process, step_back
from peerloom.protocol.errors import PeerloomError


def follow(leader: Connection[Any, Any], memory_fd: int) -> None:
    """Obeys rank 0 until it is gone."""
    from peerloom.node.worker.group import Call, Join, Joined
    from peerloom.node.worker.memory import SharedBlock
    from peerloom.node.worker.model import model_over
    from peerloom.node.worker.shard import Shard, join

    shard: Shard | None = None
    joined: Join | None = None
    while True:
        try:
            if joined is not None:
                wait_for(leader, joined.leader, joined.setup.lost_s)
            message = leader.recv()
        except (EOFError, OSError):
            return
        answer: object = None
        if isinstance(message, Join):
            joined = message
            step_back(message.setup.nice)
            spec, block = message.setup.spec, SharedBlock(memory_fd, message.layout)
            try:
                model = model_over(spec, block.view("params"))  # before they meet: then each waits for the slowest
                mesh = join(message.place)
                shard = Shard(model, spec.train, mesh, message.place.device, block, lost_s=message.setup.lost_s)
                answer = Joined(os.getpid())
            except PeerloomError as error:
                answer = Joined(os.getpid(), refused=str(error))
        elif shard is None:
            raise RuntimeError(f"rank 0 said {type(message).__name__} before there was a shard")
        elif isinstance(message, Call):
            answer = getattr(shard, message.method)(*message.arguments)
            if message.method == "step":
                answer = None  # rank 0 has the loss
        leader.send(answer)


def wait_for(leader: Connection[Any, Any], pid: int, lost_s: float) -> None:
    """Returns when rank 0 has said something, or is gone; raises RankLost when it has been stopped for that long.

    It may be busy with its own for long, and so it is looked at; twice, since whoever stops a whole node and lets it go
    on does not wake all its processes at once.
    """
    from peerloom.node.worker.group import is_stopped
    from peerloom.optim.matrix_fsdp import RankLost

    seen = 0
    while not leader.poll(lost_s / 2):
        seen = seen + 1 if is_stopped(pid) else 0
        if seen == 2:
            raise RankLost((0,), "the node's work", "its process is stopped")


def main() -> int:
    """The process, from its first line to its exit code."""
    pipe_fd, memory_fd, parent_pid, leader_fd = map(int, sys.argv[1:5])
    prepare_process(parent_pid)
    leader: Connection[Any, Any] = Connection(leader_fd)

    def run() -> None:
        import_libraries()
        follow(leader, memory_fd)

    return guarded(Connection(pipe_fd), run)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
