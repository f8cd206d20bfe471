"""Logging of a node: human lines on a terminal, JSON lines otherwise; every record says which run, peer and round.

Loggers are the standard ones, `logging.getLogger(__name__)`; only the command line calls `setup`. What identifies a
node hangs on a context variable, so that several nodes in one process keep apart. Private keys and nonces are never
passed to a logger.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["auto", "human", "json"]
THIRD_PARTY = ("hivemind", "grpc", "asyncio", "transformers", "datasets", "urllib3", "filelock", "httpx")
_LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}  # hivemind renames the standard ones


@dataclass(slots=True)
class LogContext:
    """What every record of one node carries; `round` moves on as the node does."""

    run: str = ""
    peer: str = ""
    round: int | None = None
    said: dict[tuple[str, str], str] = field(default_factory=dict)


_PROCESS = LogContext()
_context: ContextVar[LogContext] = ContextVar("peerloom_log_context", default=_PROCESS)


def bind(*, run: str, peer: str) -> LogContext:
    """From here on, in this task and those it starts, records carry this run and peer; set `round` on the result."""
    context = LogContext(run=run, peer=short(peer))
    _context.set(context)
    return context


def short(peer: str) -> str:
    """A peer id as people read it: its last eight characters, since all begin alike."""
    return peer[-8:]


def log_if_changed(logger: logging.Logger, key: str, sentence: str, level: int = logging.INFO) -> None:
    """Logs `sentence` when it differs from the last one under `key` (a fixed name); "" forgets it silently."""
    said = _context.get().said
    if said.get((logger.name, key), "") == sentence:
        return
    said[logger.name, key] = sentence
    if sentence:
        logger.log(level, "%s", sentence)


def setup(format: LogFormat = "auto", verbosity: int = 0, stream: TextIO | None = None) -> None:
    """Sends all records of the process to `stream` (stderr); a second call replaces the first.

    verbosity 0: info; 1 (-v): our own debug records too; 2 (--debug): everybody's. Call it before hivemind and grpc are
    imported, or `quiet_libraries` after.
    """
    stream = sys.stderr if stream is None else stream
    human = format == "human" or (format == "auto" and stream.isatty())
    handler = _Handler(stream)
    handler.follows = stream is sys.stderr
    handler.addFilter(_add_context)
    handler.setFormatter(_HumanFormatter() if human else _JsonFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbosity > 1 else logging.WARNING)
    logging.getLogger("peerloom").setLevel(logging.DEBUG if verbosity > 0 else logging.INFO)
    logging.captureWarnings(True)
    quiet_libraries(verbosity)


def quiet_libraries(verbosity: int | None = None) -> None:
    """Takes away the handlers that libraries install themselves; below --debug only their errors pass.

    hivemind adds its handler when imported: call this again after that; None keeps the verbosity of `setup`.
    """
    if verbosity is None:
        verbosity = 2 if logging.getLogger().level == logging.DEBUG else 0
    if verbosity < 2:
        os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")  # read when hivemind is imported
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core writes to stderr what it raises anyway
    below = tuple(f"{name}." for name in THIRD_PARTY)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(below)]:
        logging.getLogger(name).setLevel(logging.NOTSET)  # hivemind gives each of its loggers a level
    for name in THIRD_PARTY:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
        logger.setLevel(logging.DEBUG if verbosity > 1 else logging.ERROR)


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that `setup` finds it again; follows sys.stderr, which a progress bar puts itself in front of."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        if self.follows:
            self.stream = sys.stderr
        super().emit(record)

    follows = False


def _add_context(record: logging.LogRecord) -> bool:
    record.context = _context.get()
    return True


def _of(record: logging.LogRecord) -> LogContext:
    context = getattr(record, "context", _PROCESS)
    return context if isinstance(context, LogContext) else _PROCESS


def _level(record: logging.LogRecord) -> str:
    return _LEVELS.get(record.levelno, str(record.levelno))


def _harmless(text: str) -> str:
    """What a peer sent may end up in a message: no control characters reach the terminal, no line is forged."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _HumanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        context = _of(record)
        where = [context.run[:8], context.peer, "" if context.round is None else f"round {context.round}"]
        labels = " ".join(part for part in where if part)
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        line = f"{time} {_level(record):<7} {f'[{labels}] ' if labels else ''}{_harmless(record.getMessage())}"
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return line + "".join("\n    " + _harmless(part) for part in trace.splitlines())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        context = _of(record)
        values: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": _level(record),
            "logger": record.name,
            "message": record.getMessage(),
            "run": context.run,
            "peer": context.peer,
            "round": context.round,
        }
        if record.exc_info:
            values["trace"] = self.formatException(record.exc_info)
        return json.dumps(values)
