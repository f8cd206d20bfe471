from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from peerloom.node import logs

logger = logging.getLogger("peerloom.node.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives back the loggers and variables that `setup` changes."""
    for name in ("HIVEMIND_LOGLEVEL", "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, "ERROR")
    touched = [logging.getLogger(name) for name in (None, "peerloom", *logs.THIRD_PARTY)]
    before = [(one, one.level, one.propagate, list(one.handlers)) for one in touched]
    yield
    logging.captureWarnings(False)
    for one, level, propagate, handlers in before:
        one.setLevel(level)
        one.propagate, one.handlers[:] = propagate, handlers


def test_every_record_says_which_node_and_round() -> None:
    stream = io.StringIO()
    logs.setup(stream=stream)

    async def node(run: str, peer: str, round: int) -> None:
        context = logs.bind(run=run, peer=peer)
        context.round = round

        async def inner() -> None:
            logger.info("hello")
            context.round = round + 1
            logger.warning("again")

        await asyncio.create_task(inner())

    async def both() -> None:
        await asyncio.gather(node("aa", "12D3KooWpeerAAAA", 1), node("bb", "12D3KooWpeerBBBB", 7))

    asyncio.run(both())
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sorted((r["run"], r["peer"], r["round"], r["level"], r["message"]) for r in records) == [
        ("aa", "peerAAAA", 1, "info", "hello"),
        ("aa", "peerAAAA", 2, "warning", "again"),
        ("bb", "peerBBBB", 7, "info", "hello"),
        ("bb", "peerBBBB", 8, "warning", "again"),
    ]


@pytest.mark.parametrize(
    ("format", "stream", "human"),
    [
        ("auto", Terminal(), True),
        ("auto", io.StringIO(), False),
        ("json", Terminal(), False),
        ("human", io.StringIO(), True),
    ],
)
def test_humans_read_lines_and_machines_json(format: logs.LogFormat, stream: io.StringIO, human: bool) -> None:
    logs.setup(format, stream=stream)
    logger.info("hello %s", "you")
    line = stream.getvalue()
    assert line.count("\n") == 1 and line.endswith("info    hello you\n") is human
    assert line.startswith("{") is not human


@pytest.mark.parametrize("format", ["human", "json"])
def test_what_a_peer_sent_neither_forges_a_line_nor_reaches_the_terminal(format: logs.LogFormat) -> None:
    stream = io.StringIO()
    logs.setup(format, stream=stream)
    logger.warning("peer said %s", "x\n12:00:00 info all is well\x1b[2J")
    assert stream.getvalue().count("\n") == 1 and "\x1b" not in stream.getvalue()


def test_a_traceback_is_kept() -> None:
    for format, mark in (("human", "\n    ValueError: no"), ("json", "\\nValueError: no")):
        stream = io.StringIO()
        logs.setup(format, stream=stream)  # type: ignore[arg-type]
        try:
            raise ValueError("no")
        except ValueError:
            logger.exception("failed")
        assert mark in stream.getvalue()


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [(0, {"ours-info", "theirs-error"}), (1, {"ours-info", "ours-debug", "theirs-error"})],
)
def test_others_are_quiet_until_debug(verbosity: int, shown: set[str]) -> None:
    stream = io.StringIO()
    foreign = logging.StreamHandler(io.StringIO())
    logging.getLogger("hivemind").addHandler(foreign)
    logging.getLogger("hivemind").propagate = False
    logs.setup(verbosity=verbosity, stream=stream)
    theirs = logging.getLogger("hivemind.p2p")
    for level in ("debug", "info", "warning", "error"):
        getattr(theirs, level)("theirs-%s", level)
    logger.info("ours-info")
    logger.debug("ours-debug")
    assert {json.loads(line)["message"] for line in stream.getvalue().splitlines()} == shown
    assert foreign not in logging.getLogger("hivemind").handlers


def test_debug_shows_everybody_and_a_second_setup_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.setup(stream=first)
    logs.setup(verbosity=2, stream=second)
    logging.getLogger("grpc._x").debug("theirs")
    assert first.getvalue() == "" and second.getvalue().count("theirs") == 1


def test_a_reason_is_logged_once_when_it_changes() -> None:
    stream = io.StringIO()
    logs.setup(stream=stream)
    logs.bind(run="cc", peer="p")
    for sentence in ("no partner", "no partner", "", "no partner", "fetching", "fetching"):
        logs.log_if_changed(logger, "waiting", sentence)
    logs.log_if_changed(logger, "other", "fetching")
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages == ["no partner", "no partner", "fetching", "fetching"]
