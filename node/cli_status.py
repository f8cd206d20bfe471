"""`peer status`: the swarm once, or again and again."""

from __future__ import annotations

import asyncio
import json
import time

from rich.console import Console

from peerloom.node.config import NodeConfig
from peerloom.node.failures import OK
from peerloom.node.status import LastHeard, NodeRow, health_of, rows_of, to_json
from peerloom.node.status_table import render
from peerloom.protocol.errors import ConfigError
from peerloom.protocol.runspec import RunSpec

INTERVAL_S = 2.0


def status(config: NodeConfig, invites: list[str], *, watch: bool, as_json: bool) -> int:
    """Shows the swarm and returns its health as an exit code; a watch ends with q or Ctrl-C, and 0."""
    invites = invites or list(config.seeds) or last_invites(config)
    if not watch:
        return asyncio.run(_once(config, invites, as_json))
    if as_json or not Console().is_terminal:
        return asyncio.run(_lines(config, invites, as_json))
    return asyncio.run(_screen(config, invites))


def last_invites(config: NodeConfig) -> list[str]:
    """The invites this home's node used last; raises ConfigError when there are none."""
    file = config.folders.data / "last_invite"
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        raise ConfigError(
            f"no node with its files in {file.parent} has joined a swarm: pass an invite, or the --home of one that has"
        ) from None


async def _once(config: NodeConfig, invites: list[str], as_json: bool) -> int:
    from peerloom.node.observer import swarm_status

    spec, statuses = await swarm_status(config, invites)
    now = time.time()
    rows = rows_of(statuses, now)
    _print(spec, rows, now, as_json)
    return health_of(rows, spec)


async def _lines(config: NodeConfig, invites: list[str], as_json: bool) -> int:
    """JSON lines, or tables one after another where there is no terminal."""
    from peerloom.node.observer import watch_swarm

    heard = LastHeard()
    async for spec, statuses in watch_swarm(config, invites, INTERVAL_S):
        now = time.time()
        _print(spec, rows_of(heard.observe(statuses), now), now, as_json)
    return OK


def _print(spec: RunSpec, rows: list[NodeRow], now: float, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(spec, spec.run_id, rows, now)), flush=True)
    else:
        Console().print(render(spec, spec.run_id, rows))


async def _screen(config: NodeConfig, invites: list[str]) -> int:
    """The whole terminal, until q."""
    from rich.live import Live
    from rich.text import Text

    from peerloom.node.observer import watch_swarm
    from peerloom.node.status_screen import Keyboard, View, frame

    console, heard, view = Console(), LastHeard(), View()
    seen: list[tuple[RunSpec, list[NodeRow]]] = []
    over = asyncio.Event()

    def draw() -> None:
        if seen:
            spec, rows = seen[-1]
            live.update(frame(view, spec, spec.run_id, rows, *console.size), refresh=True)

    def on_key(key: str) -> None:
        view.key(key, len(view.shown(seen[-1][1])) if seen else 0)
        over.set() if view.over else draw()

    async def follow() -> None:
        async for spec, statuses in watch_swarm(config, invites, INTERVAL_S):
            seen[:] = [(spec, rows_of(heard.observe(statuses), time.time()))]
            draw()

    with Live(Text("joining the swarm …"), console=console, screen=True, auto_refresh=False) as live, Keyboard(on_key):
        live.refresh()
        following, leaving = asyncio.ensure_future(follow()), asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait((following, leaving), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            following.cancel()
            leaving.cancel()
            await asyncio.gather(following, leaving, return_exceptions=True)
    return OK
