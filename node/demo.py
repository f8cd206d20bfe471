"""`peer demo`: a real swarm of local processes, watched and judged; see `cli_demo` for what is shown.

The JSON of `peer demo --json FILE`, schema 1; keys are only ever added. null where a node never said.

    {"schema": 1, "method": str, "minutes": float, "passed": bool, "failures": [str], "interrupted": bool,
     "spread": float | null,
     "nodes": [{"name": str, "peer_id": str, "loss": float | null, "rounds": int, "partners": int, "tokens": int}],
     "seedflow": [{"name": str, "steps": int, "messages": int, "state_hash": str, "loss_before": float | null,
                   "loss_after": float | null}]}

`minutes` is how long it ran, `loss` the node's last held-out loss in nats a byte, `partners` the number of different
peers it committed an exchange with, `spread` the largest loss minus the smallest. `seedflow` is empty for other
methods; the hash is that of the sums in the node's home.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peerloom.node.children import Child, Children
from peerloom.node.demo_seedflow import SeedflowFigures, agreed, faults_of, figures_of
from peerloom.node.http_endpoint import DEFAULT, OFF, SERVED_AT
from peerloom.node.status import LastHeard
from peerloom.protocol.errors import PeerloomError
from peerloom.protocol.types import NodeStatus

SCHEMA = 1
LOSS_BELOW = 2.5  # nats a byte on the embedded spec; a uniform guess scores 5.55
PIPELINE_LOSS_BELOW = 2.9  # of four processes that make one model; byte frequencies alone score 3.2
SPREAD_BELOW = 0.1
PARTNERS = 2
INVITE_WITHIN_S = 60.0

Watch = Callable[[list[str]], AsyncIterator[list[NodeStatus]]]
Show = Callable[[list[NodeStatus]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What to run: `folder` holds one home a node and the logs; `command` starts a node."""

    folder: Path
    nodes: int = 4
    seconds: float = 180.0  # counted from the demo's start
    method: str = "gasloc"
    run_file: Path | None = None  # None: the embedded run
    steps: int = 0  # SeedFlow's of a node, after which the demo is over
    command: tuple[str, ...] = (sys.executable, "-m", "peerloom.node")
    stop_within_s: float = 10.0

    @property
    def threads(self) -> int:
        """CPU threads a node: the machine's cores, shared out."""
        return max(1, available_cores() // self.nodes)

    @property
    def names(self) -> list[str]:
        """The trainers' names."""
        return [f"node-{index}" for index in range(1, self.nodes + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """One node's line, field for field the JSON's `nodes` entry."""

    name: str
    peer_id: str
    loss: float | None
    rounds: int
    partners: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOutcome:
    """How the demo went; `failures` holds one sentence a mark not reached.

    `killed` names the nodes that had to be, being slow to stop; `tail` is the log's end of any that died before.
    """

    method: str
    seconds: float
    interrupted: bool
    nodes: list[NodeFigures]
    spread: float | None
    failures: list[str]
    killed: list[str] = field(default_factory=list)
    tail: str = ""
    seedflow: list[SeedflowFigures] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The object that the module's docstring describes."""
        return {
            "schema": SCHEMA,
            "method": self.method,
            "minutes": self.seconds / 60,
            "passed": not self.failures,
            "failures": self.failures,
            "interrupted": self.interrupted,
            "spread": self.spread,
            "nodes": [asdict(node) for node in self.nodes],
            "seedflow": [asdict(node) for node in self.seedflow],
        }


def available_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def run_demo(
    plan: DemoPlan,
    watch: Watch,
    show: Show,
    interrupted: asyncio.Event,
    on_page: Callable[[str], None] = lambda url: None,
) -> DemoOutcome:
    """Starts the swarm, follows it for `plan.seconds` or until `interrupted`, stops it and judges it.

    No process it started is left when it returns or raises. `watch` yields the swarm's statuses, given the invites;
    its errors are raised. `on_page` is told where the bootstrap node serves its page.
    """
    clock = asyncio.get_running_loop().time
    started = clock()
    children = Children(plan.folder, stop_within_s=plan.stop_within_s)
    progress = _Progress(show, on_page)
    try:
        await _first(
            _live(plan, children, watch, progress),
            children.first_exit(),
            interrupted.wait(),
            asyncio.sleep(started + plan.seconds - clock()),
        )
    finally:
        seconds, dead = clock() - started, [child for child in children.ended() if not _may_end(plan, child)]
        killed = await children.stop()
    figures, failures = judge(progress.statuses, plan.nodes, plan.method)
    states = [figures_of(plan.folder / name) for name in plan.names] if plan.method == "seedflow" else []
    if states:
        failures = faults_of(states, plan.steps)
    if dead:
        failures = [f"{child.name} ended early with {child.how_it_ended()}" for child in dead]
    return DemoOutcome(
        method=plan.method,
        seconds=seconds,
        interrupted=interrupted.is_set(),
        nodes=figures,
        spread=spread_of(figures),
        failures=failures,
        killed=killed,
        tail="\n".join(child.tail() for child in dead),
        seedflow=states,
    )


def _may_end(plan: DemoPlan, child: Child) -> bool:
    """A node of SeedFlow ends by itself some time after all have taken their steps."""
    return plan.method == "seedflow" and child.name in plan.names and child.process.returncode == 0


def judge(statuses: list[NodeStatus], nodes: int, method: str = "gasloc") -> tuple[list[NodeFigures], list[str]]:
    """The figures of all trainers by name, and one sentence for each mark that was not reached."""
    partners = min(1 if method == "pipeline" else PARTNERS, nodes - 1)
    figures = sorted((_figures(status) for status in statuses if status.record.role == "trainer"), key=lambda n: n.name)
    failures = [sentence for node in figures for sentence in _faults(node, partners, method)]
    if len(figures) < nodes:
        failures.insert(0, f"only {len(figures)} of {nodes} nodes were seen in the swarm")
    spread = spread_of(figures)
    if spread is not None and spread >= SPREAD_BELOW:
        failures.append(f"the nodes' losses lie {spread:.3f} apart, not under {SPREAD_BELOW}")
    return figures, failures


def spread_of(figures: list[NodeFigures]) -> float | None:
    """Largest loss minus smallest; None before any is known."""
    losses = [node.loss for node in figures if node.loss is not None]
    return max(losses) - min(losses) if losses else None


def _figures(status: NodeStatus) -> NodeFigures:
    record = status.record
    return NodeFigures(
        name=record.name,
        peer_id=record.peer_id,
        loss=record.loss,
        rounds=record.round,
        partners=sum(count > 0 for count in status.partners.values()),
        tokens=record.tokens,
    )


def _faults(node: NodeFigures, partners: int, method: str) -> list[str]:
    counts_tokens = method != "pipeline"  # whose first stage counts them for all
    if (counts_tokens and node.tokens == 0) or node.rounds == 0:
        return [f"{node.name} finished no round"]
    faults = []
    mark = PIPELINE_LOSS_BELOW if method == "pipeline" else LOSS_BELOW
    if node.loss is None:
        faults.append(f"{node.name} never measured its held-out loss")
    elif not node.loss < mark:
        faults.append(f"{node.name}'s held-out loss is {node.loss:.3f}, not under {mark}")
    if node.partners < partners:
        faults.append(f"{node.name} exchanged with {node.partners} different peers, fewer than {partners}")
    return faults


@dataclass(slots=True)
class _Progress:
    """The newest word of every node, kept past the end of the watch."""

    show: Show
    on_page: Callable[[str], None]
    statuses: list[NodeStatus] = field(default_factory=list)


async def _live(plan: DemoPlan, children: Children, watch: Watch, progress: _Progress) -> None:
    """Starts a bootstrap node and the trainers, then follows them; runs until cancelled, or SeedFlow's are done."""
    _share_cache(plan)
    bootstrap = await children.start("bootstrap", _command(plan, "bootstrap", []))
    invites = await _invites(bootstrap)
    if page := _page_of(bootstrap):
        progress.on_page(page)
    await asyncio.gather(
        *(children.start(name, _command(plan, name, invites)) for name in plan.names),
    )
    view = LastHeard()
    async for statuses in watch(invites):
        progress.statuses = view.observe(statuses)
        progress.show(progress.statuses)
        if plan.method == "seedflow" and agreed(statuses, plan.nodes, plan.steps):
            return


def _share_cache(plan: DemoPlan) -> None:
    """One cache for all homes, so that the text is tokenized once."""
    cache = plan.folder / "cache"
    cache.mkdir()
    for name in plan.names:
        (plan.folder / name).mkdir(mode=0o700)
        (plan.folder / name / "cache").symlink_to(cache, target_is_directory=True)


async def _invites(bootstrap: Child) -> list[str]:
    """Reads `peer join INVITE…`, the first line a bootstrap node prints."""
    try:
        async with asyncio.timeout(INVITE_WITHIN_S):
            line = await bootstrap.first_line()
    except TimeoutError:
        raise PeerloomError(f"the bootstrap node printed no invite within {INVITE_WITHIN_S:.0f} s") from None
    if not line:  # it is ending: let its end be reported
        await asyncio.Event().wait()
    return [word for word in line.split() if word.startswith("/")]


def _page_of(node: Child) -> str:
    """Where a node that others can join serves its page, as its log says; "" if it does not."""
    with node.log.open(encoding="utf-8", errors="replace") as lines:
        told = [json.loads(line)["message"] for line in lines if line.startswith("{") and line.endswith("}\n")]
    return next((line.removeprefix(SERVED_AT) for line in told if line.startswith(SERVED_AT)), "")


def _command(plan: DemoPlan, name: str, invites: list[str]) -> list[str]:
    run = ["--run", str(plan.run_file)] if plan.run_file is not None else []
    role = ["join", *invites] if invites else ["bootstrap", *run]
    return [
        *plan.command, *role,
        "--home", str(plan.folder / name),
        "--name", name,
        "--listen", "127.0.0.1",
        "--port", "0",
        "--grpc-port", "0",
        "--device", "cpu",
        "--threads", str(plan.threads),
        "--http", DEFAULT if name == "bootstrap" else OFF,
        "--log-format", "json",
        *(["--trust-paths"] if plan.method == "seedflow" and invites else []),  # the demo's own base model and text
    ]


async def _first(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Runs them until one ends, cancels the rest, and raises what went wrong in any."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
