"""A process that ends when the one that started it does, whatever ends that; on Linux, whose kernel sees to it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
ENDS_WITH = "PEERLOOM_ENDS_WITH"  # in the environment of a `peer` command: the pid of the parent that it ends with


def die_with(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to send this process `number` when the thread that started it ends; elsewhere does nothing.

    Exits at once when the parent is gone already.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the request
        raise SystemExit(0)


def heed_parent() -> None:
    """Ends this process in order, as SIGTERM does, with the parent that asked for it by ENDS_WITH, if one did."""
    if parent := os.environ.pop(ENDS_WITH, ""):
        die_with(int(parent), signal.SIGTERM)
