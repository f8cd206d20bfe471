"""`peer bootstrap` and `peer join`: a node in the foreground, until Ctrl-C, SIGTERM, SIGHUP or its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerloom.node.listeners import Listeners, NodeInfo
from peerloom.node.specs import embedded_spec, load_spec
from peerloom.protocol.types import NodeStatus, Role

if TYPE_CHECKING:
    from rich.progress import Progress

    from peerloom.node.config import NodeConfig


def serve(config: NodeConfig, *, role: Role, invites: list[str], run_file: Path | None, verbose: bool) -> int:
    """Runs a node to its end and returns its exit code.

    A node that starts a swarm prints `peer join INVITE` on stdout once it can be joined, a line for each address it
    can be dialled at, the best first; what a late joiner's state cost is printed there too.
    """
    starts_swarm = not invites and not config.seeds
    spec = load_spec(run_file) if run_file is not None else embedded_spec() if starts_swarm else None
    from peerloom.node.daemon import run_node

    def on_joinable(info: NodeInfo) -> None:
        if starts_swarm:
            print("\n".join(f"peer join {invite}" for invite in info.invites), flush=True)

    def on_started(phases: list[tuple[str, float]]) -> None:
        if verbose:
            print(start_times(phases), file=sys.stderr, flush=True)

    with StartProgress() as progress:
        listeners = Listeners(
            on_joinable=on_joinable,
            on_started=on_started,
            on_status=progress.update,
            on_said=lambda sentence: print(sentence, flush=True),
        )
        return _run(run_node(config, role=role, invites=invites, spec=spec, listeners=listeners))


def start_times(phases: list[tuple[str, float]]) -> str:
    """Where the seconds of a start went, in one line."""
    parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases)
    return f"started in {sum(seconds for _, seconds in phases):.1f} s: {parts}"


def _run(node: Coroutine[Any, Any, int]) -> int:
    """Runs on uvloop where there is one."""
    if sys.platform == "win32":
        return asyncio.run(node)
    import uvloop

    code: int = uvloop.run(node)
    return code


class StartProgress:
    """A progress bar on stderr, if that is a terminal, while the node prepares: tokenizing, fetching the model.

    What it is about is the status's `reason`; `counters["progress"]`, where present, is the share that is done.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __enter__(self) -> StartProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()

    def update(self, status: NodeStatus) -> None:
        """Shows, moves or removes the bar."""
        record = status.record
        if record.state not in ("starting", "fetching") or not record.reason:
            self._hide()
        elif sys.stderr.isatty():
            self._show(record.reason, status.counters.get("progress"))

    def _show(self, what: str, share: float | None) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(what)
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, description=what, total=1.0 if share else None, completed=share or 0.0)

    def _hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
