"""Builds a node on the real seams (hivemind DHT, gRPC, a worker process) and runs it to its end."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from peerloom.node import logs
from peerloom.node.agree import agree_on_run
from peerloom.node.announce import libp2p_announce
from peerloom.node.clock import SystemClock
from peerloom.node.config import NodeConfig, default_name
from peerloom.node.consent import consented_source
from peerloom.node.context import Context, NodeSettings
from peerloom.node.devices import check_devices
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.durable import storage_errors
from peerloom.node.facts import LONELY, Facts
from peerloom.node.folders import Folders, ensure_writable
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.http_endpoint import SERVED_AT, parse_endpoint
from peerloom.node.http_feed import SwarmFeed
from peerloom.node.http_server import HttpServer
from peerloom.node.identity import Identity, load_or_create, lock_identity
from peerloom.node.journal import JOURNAL, Journal
from peerloom.node.metrics import exposition
from peerloom.node.node import Node
from peerloom.node.phases import Phases
from peerloom.node.ports import RememberedPorts
from peerloom.node.reaching import Reaching, desk_limits, listen_for_legs, port_mapping_of
from peerloom.node.seams import FIRST_STEP, SeedflowPort, WorkerPort
from peerloom.node.specs import verify_spec
from peerloom.node.stopping import Stopper
from peerloom.node.tensorboard import TensorBoard
from peerloom.node.throttle import Caps, Traffic
from peerloom.node.tls import load_or_make
from peerloom.node.view import SwarmView
from peerloom.node.worker.calls import WorkerCalls
from peerloom.node.worker.port import WorkerProcess
from peerloom.node.worker.seedflow_port import SeedflowProcess
from peerloom.protocol.errors import DiscoveryLost, IdentityInUse, InviteError, PeerloomError
from peerloom.protocol.invite import Invite, parse_invite
from peerloom.protocol.progress import StepPace
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, Role, RunId, SignedSpec

log = logging.getLogger(__name__)

OTHER_SELF_S = 3.0  # how long a live namesake gets to answer before it counts as gone


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Where a node can be found."""

    peer_id: PeerId
    run_id: RunId
    invites: list[str]


class Workers:
    """Makes the workers of a node, of a process a device; the first is launched early, to import meanwhile.

    `method` decides what they can be asked, and is set before the first call.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._early: WorkerCalls | None = None
        self.method = ""

    def launch(self) -> None:
        """Starts the first worker now."""
        self._early = WorkerCalls(ranks=self._ranks)
        self._early.launch()

    def __call__(self) -> WorkerPort | SeedflowPort:
        early, self._early = self._early, None
        return SeedflowProcess(early) if self.method == "seedflow" else WorkerProcess(early, ranks=self._ranks)

    async def stop(self) -> None:
        """Ends the early worker if nobody took it."""
        if self._early is not None:
            await self._early.stop()


async def run_node(
    config: NodeConfig,
    *,
    role: Role,
    invites: list[str],
    spec: RunSpec | None,
    on_joinable: Callable[[NodeInfo], None],
    on_started: Callable[[list[tuple[str, float]]], None],
    on_status: Callable[[NodeStatus], None],
    on_said: Callable[[str], None] = lambda sentence: None,
) -> int:
    """Runs one node until a signal (see stopping.py) or the end of the run; raises a PeerloomError that says why.

    `spec` starts a run, or must be the run of the invites; None takes the run that the invites lead to. `on_joinable`
    is called when others can join, `on_started` after the first optimizer step with the seconds of each phase,
    `on_said` with a sentence for the terminal, as of what joining cost.
    """
    stopper = Stopper()
    stopper.install()
    try:
        return await _run_node(config, role, invites, spec, stopper, on_joinable, on_started, on_status, on_said)
    except asyncio.CancelledError:
        if stopper.early:
            return 0
        raise
    finally:
        stopper.remove()


async def _run_node(
    config: NodeConfig,
    role: Role,
    invites: list[str],
    spec: RunSpec | None,
    stopper: Stopper,
    on_joinable: Callable[[NodeInfo], None],
    on_started: Callable[[list[tuple[str, float]]], None],
    on_status: Callable[[NodeStatus], None],
    on_said: Callable[[str], None],
) -> int:
    clock = SystemClock()
    phases = Phases(clock)
    seeds = [parse_invite(text) for text in (*invites, *config.seeds)]
    folders = config.folders
    async with AsyncExitStack() as stack:
        ensure_writable(folders.data)
        identity = load_or_create(folders.identity_file)
        stack.enter_context(lock_identity(folders.identity_file))
        ports = RememberedPorts(folders.ports_file)
        grpc_port = ports.choose("grpc", config.listen[0], config.grpc_port)
        relay_port = ports.choose("relay", config.listen[0], config.relay_port) if config.relay else 0
        log_context = logs.bind(run="", peer=identity.peer_id)
        workers = Workers(max(1, len(config.devices)))
        if role == "trainer":
            workers.launch()
        stack.push_async_callback(workers.stop)
        phases.mark("identity")
        _refuse_own_invite(identity, seeds)
        discovery = await _discover(config, identity, seeds, clock, stack, ports)
        phases.mark("DHT")
        signed = await agree_on_run(discovery, identity, seeds, spec, config.startup_timeout_s)
        run_spec = verify_spec(signed)
        if role == "trainer":
            check_devices(run_spec, config.devices)
        workers.method = run_spec.method
        discovery.join_run(run_spec.run_id)
        log_context.run = run_spec.run_id
        phases.mark("run spec")
        foreign = spec is None and signed.owner != identity.peer_id
        data_source = consented_source(config, run_spec) if foreign and role == "trainer" else config.data
        run_dir = ensure_writable(folders.run_dir(run_spec.run_id))
        ensure_writable(folders.cache)
        own_invites = await discovery.invites()
        _remember(folders, run_dir, signed, [*own_invites[:1], *(str(seed) for seed in seeds)])
        certificate = load_or_make(folders.data, clock.wall())
        traffic = Traffic(clock, Caps(config.max_upload, config.max_download))
        reaching = Reaching.build(
            identity.peer_id,
            clock,
            desk_limits(config),
            lambda peer: view.record_of(peer),
            lambda metric, amount: facts.count(metric, amount),
            frozenset(config.allow),
            traffic,
        )
        stack.push_async_callback(reaching.stop)
        if config.relay:
            ports.remember("relay", listen_for_legs(reaching.tunnels, config, relay_port))
        transport = GrpcTransport(
            identity=identity,
            certificate=certificate,
            run_id=run_spec.run_id,
            spec_hash=run_spec.spec_hash(),
            listen=tuple((host, grpc_port) for host in config.listen),
            announce=config.announce,
            traffic=traffic,
            clock=clock,
            rng=random.Random(secrets.randbits(64)),
            allow=(lambda peer: peer in config.allow) if config.allow else None,
            dialer=reaching.dialer,
            origin_of=reaching.tunnels.origin_of,
        )
        stack.push_async_callback(transport.stop)
        facts = Facts(
            peer_id=identity.peer_id,
            name=config.name or default_name(identity.peer_id),
            role=role,
            version=metadata.version("peerloom"),
            instance=secrets.token_hex(8),
            cert_der=certificate.der,
            clock=clock,
            bytes_moved=transport.bytes_moved,
            started_at=clock.wall(),
            pace=StepPace(config.stall_after_s),
        )
        view = SwarmView(discovery, facts, run_spec, clock, signed)
        await discovery.attach(reaching.tunnels.attach)
        mapping = port_mapping_of(config, transport)
        driver = reaching.driver(transport, view, facts, discovery, mapping)

        def joinable() -> None:
            host, port = transport.local()
            reaching.tunnels.serve(host, port)
            ports.remember("grpc", port)
            on_joinable(NodeInfo(peer_id=facts.peer_id, run_id=run_spec.run_id, invites=own_invites))

        await _serve_http(config, run_spec, facts, view, clock, stack, discovery.records_kept)
        await _refuse_second_self(view, transport, facts)
        context = Context(
            settings=NodeSettings(
                run_dir=run_dir,
                cache_dir=folders.cache,
                data_source=data_source,
                device=config.devices[0] if len(config.devices) == 1 else config.device,
                devices=config.devices if len(config.devices) > 1 else (),
                threads=config.threads,
                nice=config.nice,
                stage=config.stage,
                checkpoint_every_s=config.checkpoint_every_s,
                keep_checkpoints=config.keep_checkpoints,
                donor_patience_s=config.startup_timeout_s,
                expect_peers=bool(seeds),
            ),
            spec=run_spec,
            facts=facts,
            clock=clock,
            rng=random.Random(secrets.randbits(64)),
            transport=transport,
            view=view,
            phases=phases,
            journal=_journal(config, run_dir, clock, stack),
            progress=_progress(facts, on_status),
            joinable=joinable,
            say=on_said,
            sign=identity.sign,
        )
        jobs = (driver.run,) if mapping is None else (driver.run, mapping.run)
        node = Node(context, discovery, workers if role == "trainer" else None, jobs=jobs)
        _tell_changes(facts, log_context, view, phases, on_status, on_started)
        stopper.drains(node)
        await _run_while_discoverable(node, discovery)
    return 0


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


async def _serve_http(
    config: NodeConfig,
    spec: RunSpec,
    facts: Facts,
    view: SwarmView,
    clock: SystemClock,
    stack: AsyncExitStack,
    dht_records: Callable[[], int],
) -> None:
    """The page, metrics and health, unless `--http none`."""
    endpoint = parse_endpoint(config.http)
    if endpoint is None:
        return
    feed = SwarmFeed(spec, facts.status, view.records, view.left, clock.wall)
    metrics = exposition(facts.status, feed.totals, dht_records)
    server = await HttpServer.start(endpoint, feed=feed, status=facts.status, metrics=metrics)
    stack.push_async_callback(server.stop)
    log.info("%s%s", SERVED_AT, server.url)


def _journal(config: NodeConfig, run_dir: Path, clock: SystemClock, stack: AsyncExitStack) -> Journal:
    if config.tensorboard is None:
        return Journal(run_dir / JOURNAL, clock.wall)
    curves = TensorBoard(config.tensorboard)
    stack.callback(curves.close)
    return Journal(run_dir / JOURNAL, clock.wall, curves.take)


def _refuse_own_invite(identity: Identity, seeds: list[Invite]) -> None:
    if seeds and all(seed.peer_id == identity.peer_id for seed in seeds):
        raise InviteError(
            "the invite is this node's own: nobody is there to join; start the node without it, or use another --home"
        )


async def _discover(
    config: NodeConfig,
    identity: Identity,
    seeds: list[Invite],
    clock: SystemClock,
    stack: AsyncExitStack,
    ports: RememberedPorts,
) -> DhtDiscovery:
    discovery = await DhtDiscovery.create(
        identity=identity,
        identity_path=config.folders.identity_file,
        seeds=seeds,
        host=config.listen,
        port=ports.choose("dht", config.listen[0], config.port),
        announce=libp2p_announce(config.announce),
        clock=clock,
        port_map=config.port_mapping,
    )
    ports.remember("dht", discovery.port)
    stack.push_async_callback(discovery.stop)
    logs.quiet_libraries()  # hivemind is imported by now
    return discovery


def _remember(folders: Folders, run_dir: Path, signed: SignedSpec, invites: list[str]) -> None:
    """Leaves the spec for `peer export`, and the invites for a `peer status` without one."""
    with storage_errors(f"the run spec {run_dir / 'run.toml'}"):
        (run_dir / "run.toml").write_text(signed.text, encoding="utf-8")
    file = folders.data / "last_invite"
    try:
        file.write_text("\n".join(invites) + "\n", encoding="utf-8")
    except OSError as error:  # a convenience: no reason not to train
        log.warning("cannot write %s (%s): `peer status` needs an invite passed to it", file, error.strerror)


async def _refuse_second_self(view: SwarmView, transport: GrpcTransport, facts: Facts) -> None:
    """Raises IdentityInUse when another live node answers with this identity; a dead one's record is no hindrance."""
    other = await view.own_record()
    if other is None or other.instance == facts.instance:
        return
    try:
        async with asyncio.timeout(OTHER_SELF_S):
            answer = await transport.status(other)
    except (PeerloomError, TimeoutError):
        return
    if answer.record.instance != facts.instance:
        raise IdentityInUse(
            f"the node {answer.record.name!r} at {other.addresses[0]} runs with this identity already; stop it, or "
            "start this one with another --home"
        )


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
    on_status: Callable[[NodeStatus], None],
    on_started: Callable[[list[tuple[str, float]]], None],
) -> None:
    """Passes every change on; `on_started` once: after the first optimizer step, or when a bootstrap peer serves."""
    pending = [on_started]

    def changed() -> None:
        log_context.round = facts.round if facts.role == "trainer" else None
        logs.log_if_changed(log, "warning", _lasting(facts), logging.WARNING)
        view.tell()
        on_status(facts.status())
        if pending and (facts.state == "serving" or phases.has(FIRST_STEP)):
            pending.pop()(list(phases.seconds))

    facts.changed = changed
