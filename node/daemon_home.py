"""What a node has before it knows its run: an identity that nobody else uses, ports, the DHT, a worker that starts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from peerloom.node import logs
from peerloom.node.announce import libp2p_announce
from peerloom.node.clock import SystemClock
from peerloom.node.config import NodeConfig
from peerloom.node.discovery import DhtDiscovery
from peerloom.node.folders import ensure_writable
from peerloom.node.identity import Identity, load_or_create, lock_identity
from peerloom.node.logs import LogContext
from peerloom.node.phases import Phases
from peerloom.node.ports import RememberedPorts
from peerloom.node.worker.calls import WorkerCalls
from peerloom.node.worker.port import WorkerProcess
from peerloom.node.worker.seedflow_port import SeedflowProcess
from peerloom.node.worker_seams import SeedflowPort, WorkerPort
from peerloom.protocol.errors import InviteError
from peerloom.protocol.invite import Invite, parse_invite
from peerloom.protocol.types import Role


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A node on its machine; what has to be ended is on the stack that it was opened with."""

    config: NodeConfig
    role: Role
    clock: SystemClock
    phases: Phases
    seeds: list[Invite]
    identity: Identity
    ports: RememberedPorts
    grpc_port: int
    relay_port: int
    log_context: LogContext
    workers: Workers
    discovery: DhtDiscovery


async def open_home(config: NodeConfig, role: Role, invites: list[str], stack: AsyncExitStack) -> Home:
    """Takes hold of the identity, chooses ports, launches a trainer's worker and joins the DHT.

    Raises InviteError, IdentityInUse, StorageError, PortInUse, ConfigError, or what discovery raises.
    """
    clock = SystemClock()
    phases = Phases(clock)
    seeds = [parse_invite(text) for text in (*invites, *config.seeds)]
    folders = config.folders
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
    return Home(
        config=config,
        role=role,
        clock=clock,
        phases=phases,
        seeds=seeds,
        identity=identity,
        ports=ports,
        grpc_port=grpc_port,
        relay_port=relay_port,
        log_context=log_context,
        workers=workers,
        discovery=discovery,
    )


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
