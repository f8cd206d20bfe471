"""What a user sees when a command fails: one sentence on stderr and a stable exit code."""

from __future__ import annotations

import errno
import inspect
import os
import sys
import traceback
from collections.abc import Callable

from peerloom.protocol import errors
from peerloom.protocol.errors import PeerloomError, StorageError

OK = 0
UNEXPECTED = PeerloomError.exit_code
USAGE = 2
DEGRADED = 40
EMPTY = 41
DOCTOR_FAILS = 42

_DISK = {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR}


def exit_codes() -> dict[int, str]:
    """Every exit code of `peer` and its meaning in one sentence: the error tree's, and those no error stands behind."""
    codes = {
        OK: "All went well; also after Ctrl-C, SIGTERM, and a terminal that was closed.",
        UNEXPECTED: "Something failed that has no code of its own; or the demo did not reach its marks.",
        USAGE: "The command line does not parse.",
    }
    for error in _error_classes():
        codes.setdefault(error.exit_code, _meaning(error))
    codes[DEGRADED] = "`peer status`: a node is silent, a trainer is not training, or a stage is missing."
    codes[EMPTY] = "`peer status`: no trainer is there."
    codes[DOCTOR_FAILS] = "`peer doctor`: a check fails."
    return dict(sorted(codes.items()))


def exit_code_help() -> str:
    """The exit codes as `peer --help` lists them."""
    return "\n".join(["Exit codes:", *(f"  {code:<3} {meaning}" for code, meaning in exit_codes().items())])


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Runs a command and returns its exit code; an error becomes one sentence, with `debug` after its traceback."""
    try:
        return command()
    except KeyboardInterrupt:
        return OK
    except BrokenPipeError:  # the reader of our stdout went away, as in `peer status | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        if debug:
            traceback.print_exc(file=sys.stderr)
        code, sentence = explain(error)
        print(f"peer: {sentence}", file=sys.stderr, flush=True)
        return code


def explain(error: Exception) -> tuple[int, str]:
    """Exit code and sentence of an error; several errors raised together give the first one's code."""
    if isinstance(error, ExceptionGroup):
        explained = [explain(inner) for inner in error.exceptions]
        return explained[0][0], "; ".join(sentence for _, sentence in explained)
    if isinstance(error, PeerloomError):
        return error.exit_code, str(error) or _meaning(error)
    if isinstance(error, OSError) and error.errno in _DISK:
        where = f" {error.filename}" if error.filename else " a file"
        return StorageError.exit_code, f"cannot use{where}: {error.strerror}; free or change it, or pass another --home"
    return UNEXPECTED, (
        f"unexpected {type(error).__name__}: {error}; this is a fault of Peerloom's, "
        "run again with --debug for a traceback to report"
    )


def _error_classes() -> list[type[PeerloomError]]:
    """All classes of the tree, parents before children."""
    found = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PeerloomError)
    ]
    return sorted(found, key=lambda error: len(error.__mro__))


def _meaning(error: type[PeerloomError] | PeerloomError) -> str:
    """The first clause of its docstring, which says what it is."""
    return (inspect.getdoc(error) or "").split("\n")[0].split(";")[0].rstrip(".") + "."
