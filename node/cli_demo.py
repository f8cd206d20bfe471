"""`peer demo`: what it shows while it runs and what it says at the end; the swarm itself is `demo`'s."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peerloom.node.config import load_config
from peerloom.node.demo import DemoOutcome, DemoPlan, Watch, available_cores, run_demo
from peerloom.node.demo_seedflow import make_run
from peerloom.node.failures import OK, UNEXPECTED
from peerloom.node.specs import demo_spec
from peerloom.node.status import rows_of, totals_of
from peerloom.node.status_table import render, summary
from peerloom.node.stopping import stop_signals
from peerloom.protocol.errors import ConfigError
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus

METHODS = ("gasloc", "seedflow", "pipeline")
SAID = {
    "gasloc": "trained, exchanged with one another and agree",
    "seedflow": "fine-tuned one model and hold it, bit for bit",
    "pipeline": "trained one model, a stage each",
}
WATCH_S = 1.0
LINE_EVERY_S = 10.0  # where there is no terminal to redraw


def demo(*, nodes: int, seconds: float, method: str, json_file: Path | None, keep: bool) -> int:
    """Runs the demo in a temporary folder, which stays with `keep`; 0 when it reached its marks or was interrupted."""
    if method not in METHODS:
        raise ConfigError(f"--method {method}: this version has {', '.join(METHODS)}")
    folder = Path(tempfile.mkdtemp(prefix="peerloom-demo-"))
    console = Console()
    try:
        began = time.monotonic()
        if method == "seedflow":
            spec = _seedflow_run(folder, nodes, seconds, console)
            seconds = max(1.0, seconds - (time.monotonic() - began))
        else:
            spec = demo_spec(method, nodes)
        (folder / "run.toml").write_text(spec.canonical())
        plan = DemoPlan(
            folder=folder,
            nodes=nodes,
            seconds=seconds,
            method=method,
            run_file=folder / "run.toml",
            steps=spec.seedflow.max_steps,
        )
        outcome = asyncio.run(_run(plan, spec, console))
    finally:
        if keep:
            console.print(f"Homes and logs of the nodes are in {folder}", soft_wrap=True)
        else:
            shutil.rmtree(folder)
    if json_file is not None:
        json_file.write_text(json.dumps(outcome.to_json(), indent=2) + "\n")
    _report(outcome, console)
    return OK if outcome.interrupted or not outcome.failures else UNEXPECTED


def _seedflow_run(folder: Path, nodes: int, seconds: float, console: Console) -> RunSpec:
    """The run over a base model that is made first."""
    console.print("Making a base model: a small Llama learns the source of Python's standard library, alone.")
    spec, made = asyncio.run(make_run(folder, nodes, seconds, available_cores()))
    console.print(
        f"It took {made['steps']} steps in {made['seconds']:.0f} s, to a loss of {made['loss']:.2f} nats a byte. Each "
        f"node now takes {spec.seedflow.max_steps} SeedFlow steps on other source files, in capital letters.",
        soft_wrap=True,
    )
    return spec


async def _run(plan: DemoPlan, spec: RunSpec, console: Console) -> DemoOutcome:
    interrupted, numbers = asyncio.Event(), stop_signals()
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, interrupted.set)
    try:
        with _Screen(spec, plan, console, interrupted) as screen:
            return await run_demo(plan, _observer(plan.folder), screen.show, interrupted, screen.page_is_at)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _observer(folder: Path) -> Watch:
    """Watches the swarm as `peer status --watch` does, with a home of its own."""

    async def watch(invites: list[str]) -> AsyncIterator[list[NodeStatus]]:
        from peerloom.node.observer import watch_swarm

        config = load_config(home=folder / "observer", listen="127.0.0.1", port=0, grpc_port=0)
        async for _, statuses in watch_swarm(config, invites, WATCH_S):
            yield statuses

    return watch


class _Screen:
    """A live table with a countdown; where there is no terminal, a line now and then."""

    def __init__(self, spec: RunSpec, plan: DemoPlan, console: Console, interrupted: asyncio.Event) -> None:
        self._spec = spec
        self._interrupted = interrupted
        self._ends_at = time.monotonic() + plan.seconds
        self._console = console
        self._statuses: list[NodeStatus] = []
        self._live = Live(console=console, get_renderable=self._render) if console.is_terminal else None
        self._said_at = 0.0
        console.print(
            f"Starting a bootstrap node and {plan.nodes} trainers with {plan.threads} CPU thread(s) each, "
            f"for {plan.seconds / 60:g} minutes."
        )

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, statuses: list[NodeStatus]) -> None:
        """Takes the newest word of every node."""
        self._statuses = statuses
        now = time.monotonic()
        if self._live is None and now >= self._said_at + LINE_EVERY_S:
            self._said_at = now
            self._console.print(f"{self._left()}; {summary(totals_of(rows_of(statuses, time.time())))}", soft_wrap=True)

    def page_is_at(self, url: str) -> None:
        """Says where to watch it in a browser."""
        self._console.print(f"Watch it in a browser while it runs: {url}", soft_wrap=True)

    def _render(self) -> Group:
        rows = rows_of(self._statuses, time.time())
        return Group(render(self._spec, self._spec.run_id, rows), Text(self._left(), "dim"))

    def _left(self) -> str:
        left_s = max(0.0, self._ends_at - time.monotonic())
        if self._interrupted.is_set() or not left_s:
            return "stopping the nodes"
        return f"{int(left_s // 60)}:{int(left_s % 60):02d} left, Ctrl-C ends it"


def _report(outcome: DemoOutcome, console: Console) -> None:
    if outcome.tail:
        console.print(outcome.tail, markup=False, highlight=False, soft_wrap=True)
    console.print(_seedflow_table(outcome) if outcome.seedflow else _table(outcome))
    if outcome.spread is not None and not outcome.seedflow:
        console.print(f"Spread of loss between nodes: {outcome.spread:.3f} nats a byte")
    for name in outcome.killed:
        console.print(f"{name} was slow to stop and was killed", style="yellow")
    if outcome.failures and outcome.interrupted:
        console.print("Ended before its time, so not judged.")
    for failure in [] if outcome.interrupted else outcome.failures:
        Console(stderr=True).print(f"peer: the demo failed: {failure}", markup=False, highlight=False, soft_wrap=True)
    if not outcome.failures:
        console.print(f"All nodes {SAID.get(outcome.method, SAID['gasloc'])}.", style="green")


def _seedflow_table(outcome: DemoOutcome) -> Table:
    """The nodes' state hashes, one below the other."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("node")
    for heading in ("steps", "messages", "held-out loss"):
        table.add_column(heading, justify="right")
    table.add_column("state hash", overflow="fold")
    for node in outcome.seedflow:
        before, after = (f"{loss:.3f}" if loss is not None else "?" for loss in (node.loss_before, node.loss_after))
        table.add_row(node.name, str(node.steps), str(node.messages), f"{before} to {after}", node.state_hash)
    return table


def _table(outcome: DemoOutcome) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("node")
    for heading in ("held-out loss", "rounds", "partners", "tokens"):
        table.add_column(heading, justify="right")
    for node in outcome.nodes:
        loss = "" if node.loss is None else f"{node.loss:.3f}"
        table.add_row(node.name, loss, str(node.rounds), str(node.partners), f"{node.tokens:,}")
    return table
