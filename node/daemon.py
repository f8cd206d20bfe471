"""Builds a node on the real seams (hivemind DHT, gRPC, a worker process) and runs it to its end."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from peerloom.node import logs
from peerloom.node.clock import SystemClock
from peerloom.node.config import NodeConfig
from peerloom.node.context import Context, NodeSettings
from peerloom.node.daemon_home import Home, open_home
from peerloom.node.daemon_links import Links, open_links, refuse_second_self, serve_http
from peerloom.node.daemon_run import AgreedRun, agree
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.facts import LONELY, Facts
from peerloom.node.journal import JOURNAL, Journal
from peerloom.node.listeners import Listeners, NodeInfo
from peerloom.node.node import Node
from peerloom.node.phases import Phases
from peerloom.node.stopping import Stopper
from peerloom.node.tensorboard import TensorBoard
from peerloom.node.view import SwarmView
from peerloom.node.worker_seams import FIRST_STEP
from peerloom.protocol.errors import DiscoveryLost
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, Role

log = logging.getLogger(__name__)


async def run_node(
    config: NodeConfig, *, role: Role, invites: list[str], spec: RunSpec | None, listeners: Listeners
) -> int:
    """Runs one node until a signal (see stopping.py) or the end of the run; raises a PeerloomError that says why.

    `spec` starts a run, or must be the run of the invites; None takes the run that the invites lead to.
    """
    stopper = Stopper()
    stopper.install()
    try:
        async with AsyncExitStack() as stack:
            home = await open_home(config, role, invites, stack)
            node = await _build(home, await agree(home, spec), listeners, stack)
            stopper.drains(node)
            await _run_while_discoverable(node, home.discovery)
        return 0
    except asyncio.CancelledError:
        if stopper.early:
            return 0
        raise
    finally:
        stopper.remove()


async def _build(home: Home, run: AgreedRun, listeners: Listeners, stack: AsyncExitStack) -> Node:
    links = await open_links(home, run, stack)
    await serve_http(home, run, links, stack)
    await refuse_second_self(links)
    journal = _journal(home.config, run.directory, home.clock, stack)
    context = _context(home, run, links, listeners, journal)
    _tell_changes(links.facts, home.log_context, links.view, home.phases, listeners)
    return Node(context, home.discovery, home.workers if home.role == "trainer" else None, jobs=links.jobs)


def _context(home: Home, run: AgreedRun, links: Links, listeners: Listeners, journal: Journal) -> Context:
    def joinable() -> None:
        host, port = links.transport.local()
        links.reaching.tunnels.serve(host, port)
        home.ports.remember("grpc", port)
        listeners.on_joinable(NodeInfo(peer_id=links.facts.peer_id, run_id=run.spec.run_id, invites=run.invites))

    return Context(
        settings=_settings(home, run),
        spec=run.spec,
        facts=links.facts,
        clock=home.clock,
        rng=random.Random(secrets.randbits(64)),
        transport=links.transport,
        view=links.view,
        phases=home.phases,
        journal=journal,
        progress=_progress(links.facts, listeners.on_status),
        joinable=joinable,
        say=listeners.on_said,
        sign=home.identity.sign,
    )


def _settings(home: Home, run: AgreedRun) -> NodeSettings:
    config = home.config
    return NodeSettings(
        run_dir=run.directory,
        cache_dir=config.folders.cache,
        data_source=run.data_source,
        device=config.devices[0] if len(config.devices) == 1 else config.device,
        devices=config.devices if len(config.devices) > 1 else (),
        threads=config.threads,
        nice=config.nice,
        stage=config.stage,
        checkpoint_every_s=config.checkpoint_every_s,
        keep_checkpoints=config.keep_checkpoints,
        donor_patience_s=config.startup_timeout_s,
        expect_peers=bool(home.seeds),
    )


def _journal(config: NodeConfig, run_dir: Path, clock: SystemClock, stack: AsyncExitStack) -> Journal:
    if config.tensorboard is None:
        return Journal(run_dir / JOURNAL, clock.wall)
    curves = TensorBoard(config.tensorboard)
    stack.callback(curves.close)
    return Journal(run_dir / JOURNAL, clock.wall, curves.take)


async def _run_while_discoverable(node: Node, discovery: DhtDiscovery) -> None:
    """Runs the node; when the DHT is lost for good it drains, saves, and raises DiscoveryLost."""
    running = asyncio.ensure_future(node.run())
    closed = asyncio.ensure_future(discovery.closed.wait())
    try:
        await asyncio.wait((running, closed), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            node.drain()
        await running
        if discovery.failure is not None:
            raise DiscoveryLost(f"{discovery.failure}; the model is saved: start the node again")
    finally:
        running.cancel()
        closed.cancel()
        await asyncio.gather(running, closed, return_exceptions=True)


def _progress(facts: Facts, on_status: Callable[[NodeStatus], None]) -> Callable[[str, float], None]:
    def progress(what: str, share: float) -> None:
        facts.counters["progress"] = share
        if facts.state in ("starting", "fetching"):
            facts.reason = what
        on_status(facts.status())

    return progress


def _lasting(facts: Facts) -> str:
    """What goes wrong round after round, without the numbers that would make each time a new sentence."""
    if facts.warning:
        return facts.warning
    return f"this node meets nobody: {facts.alone_because}" if facts.alone >= LONELY and facts.alone_because else ""


def _tell_changes(
    facts: Facts,
    log_context: logs.LogContext,
    view: SwarmView,
    phases: Phases,
    listeners: Listeners,
) -> None:
    """Passes every change on; `on_started` once: after the first optimizer step, or when a bootstrap peer serves."""
    pending = [listeners.on_started]

    def changed() -> None:
        log_context.round = facts.round if facts.role == "trainer" else None
        logs.log_if_changed(log, "warning", _lasting(facts), logging.WARNING)
        view.tell()
        listeners.on_status(facts.status())
        if pending and (facts.state == "serving" or phases.has(FIRST_STEP)):
            pending.pop()(list(phases.seconds))

    facts.changed = changed
