"""`peer status`: the swarm once, or again and again."""

from __future__ import annotations

import asyncio
import json
import time

from rich.console import Console
from rich.live import Live

from peerloom.node.config import NodeConfig
from peerloom.node.failures import OK
from peerloom.node.status import LastHeard, health_of, missing_of, render, rows_of, to_json
from peerloom.protocol.errors import ConfigError
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus

INTERVAL_S = 2.0


def status(config: NodeConfig, invites: list[str], *, watch: bool, as_json: bool) -> int:
    """Shows the swarm and returns its health as an exit code; a watch ends with Ctrl-C and 0."""
    invites = invites or list(config.seeds) or last_invites(config)
    return asyncio.run(_watch(config, invites, as_json) if watch else _once(config, invites, as_json))


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
    return _Screen(as_json=as_json).show(spec, statuses)


async def _watch(config: NodeConfig, invites: list[str], as_json: bool) -> int:
    from peerloom.node.observer import watch_swarm

    view, screen = LastHeard(), _Screen(as_json=as_json, live=True)
    with screen:
        async for spec, statuses in watch_swarm(config, invites, INTERVAL_S):
            screen.show(spec, view.observe(statuses))
    return OK


class _Screen:
    """Where it is shown: JSON lines, a table that stays in place, or tables one after another."""

    def __init__(self, *, as_json: bool, live: bool = False) -> None:
        self._as_json = as_json
        self._console = Console()
        self._live = Live(console=self._console) if live and not as_json and self._console.is_terminal else None

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, spec: RunSpec, statuses: list[NodeStatus]) -> int:
        """Shows one observation and returns its health."""
        now = time.time()
        rows = rows_of(statuses, now)
        if self._as_json:
            print(json.dumps(to_json(spec, spec.run_id, rows, now)), flush=True)
        elif self._live is not None:
            self._live.update(render(spec, spec.run_id, rows))
        else:
            self._console.print(render(spec, spec.run_id, rows))
        return health_of(rows, missing_of(spec, rows))
