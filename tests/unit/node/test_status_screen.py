"""The full-screen watch: keys, order, what fits."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from peerloom.node import cli_status
from peerloom.node.config import load_config
from peerloom.node.status import NodeRow, rows_of
from peerloom.node.status_screen import COLUMNS, Keyboard, View, frame, keys_of
from peerloom.protocol.runspec import RunSpec
from tests import screenshots
from tests.unit.node.test_status import NOW, status


def swarm(count: int, **every: Any) -> list[NodeRow]:
    return rows_of(
        [status(f"node-{n:03}", round=n, loss=3 - n / 1000 if n % 2 else None, **every) for n in range(count)], NOW
    )


def drawn(view: View, rows: list[NodeRow], width: int = 80, height: int = 24) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(frame(view, RunSpec(), RunSpec().run_id, rows, width, height))
    return out.getvalue().splitlines()


def press(view: View, rows: list[NodeRow], *keys: str) -> None:
    for key in keys:
        view.key(key, len(view.shown(rows)))
        drawn(view, rows)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (200, 50), (80, 200)])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_a_frame_fills_the_screen_and_never_more(width: int, height: int, count: int) -> None:
    lines = drawn(View(), swarm(count), width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert f"of {count}" in lines[-1]


def test_every_one_of_200_nodes_comes_into_sight_by_scrolling() -> None:
    rows, view, seen = swarm(200), View(), set[str]()
    for _ in range(30):
        seen |= {word for text in drawn(view, rows) for word in text.split() if word.startswith("node-")}
        press(view, rows, "pagedown")
    assert {row.name for row in rows} <= seen
    assert "200 of 200" in drawn(view, rows)[-1]
    press(view, rows, "home")
    assert (view.top, view.marked) == (0, 0)


def test_sorting_goes_through_the_columns_and_puts_the_unknown_last() -> None:
    rows, view = swarm(6), View()
    loss = next(number for number, column in enumerate(COLUMNS) if column.heading == "loss")
    press(view, rows, *["s"] * (loss + 1))
    assert [row.name[-1] for row in view.shown(rows)] == ["5", "3", "1", "0", "2", "4"]
    assert any("loss▲" in text for text in drawn(view, rows))
    press(view, rows, "r")
    assert [row.name[-1] for row in view.shown(rows)] == ["1", "3", "5", "0", "2", "4"]
    press(view, rows, "S")
    assert view.sort == loss - 1 and not view.reverse


def test_filtering_takes_letters_that_are_commands_otherwise() -> None:
    rows, view = [*swarm(20), *rows_of([status("quartz", state="stalled", reason="frozen")], NOW)], View()
    press(view, rows, "/", *"quaxx", "\x7f", "\x7f")
    assert not view.over and [row.name for row in view.shown(rows)] == ["quartz"]
    assert "filter: qua" in drawn(view, rows)[-1]
    press(view, rows, "\r")
    assert any("stalled: frozen" in text for text in drawn(view, rows))
    press(view, rows, "escape")
    assert len(view.shown(rows)) == 21
    press(view, rows, "/", *"STALLED", "\n")
    assert [row.name for row in view.shown(rows)] == ["quartz"]


def test_the_mark_stays_in_sight_when_rows_go() -> None:
    view = View()
    press(view, swarm(200), "end")
    assert view.marked == 199
    assert sum("node-" in text for text in drawn(view, swarm(3))) >= 3
    assert view.marked == 2


def test_keys_of_a_terminal() -> None:
    assert list(keys_of("q\x1b[A\x1b[6~é")) == ["q", "up", "pagedown", "é"]
    assert list(keys_of("\x1b")) == ["escape"]
    assert list(keys_of("\x1b[15~x")) == ["x"]  # F5 is none of ours


async def test_keys_are_read_without_enter_and_the_terminal_is_given_back() -> None:
    import termios

    ours, theirs = pty.openpty()
    try:
        before, keys, got = termios.tcgetattr(theirs), list[str](), asyncio.Event()
        with Keyboard(lambda key: (keys.append(key), got.set())[0], theirs):
            os.write(ours, b"j")
            await got.wait()
        assert keys == ["j"]
        assert termios.tcgetattr(theirs)[3] == before[3]
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_watch_takes_the_screen_until_q(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    out = io.StringIO()

    async def watch(config: Any, invites: list[str], interval_s: float) -> AsyncIterator[Any]:
        yield RunSpec(), [status("only-node", age_s=NOW - time.time())]
        os.write(ours, b"sq")  # sorted, drawn again, left
        await asyncio.Event().wait()

    monkeypatch.setitem(sys.modules, "peerloom.node.observer", SimpleNamespace(watch_swarm=watch))
    monkeypatch.setattr(
        cli_status, "Console", lambda: Console(file=out, force_terminal=True, width=80, height=24, _environ={})
    )
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        config = load_config(home=tmp_path)
        assert cli_status.status(config, ["/ip4/127.0.0.1/tcp/1/p2p/x"], watch=True, as_json=False) == 0
    os.close(ours)
    text = out.getvalue()
    assert text.startswith("\x1b[?1049h") and "only-node" in text and "peer▲" in text
    assert text.endswith("\x1b[?25h\x1b[?1049l"), "the terminal is given back"


def test_the_picture_in_the_readme_is_of_today(tmp_path: Path) -> None:
    def text(file: Path) -> list[str]:
        return re.findall(r">([^<>]+)</text>", file.read_text())

    screenshots.terminal(screenshots.swarm(), tmp_path)
    shown = text(screenshots.FOLDER / "status.svg")
    assert len(shown) > 20 and shown == text(tmp_path / "status.svg"), "make it anew: python -m tests.screenshots"
