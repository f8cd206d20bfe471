"""The check of `peer doctor` whether others can dial this machine: it listens, and asks two peers to dial back."""

from __future__ import annotations

import ipaddress
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from peerloom.node.addresses import host_of
from peerloom.node.clock import SystemClock
from peerloom.node.config import NodeConfig
from peerloom.node.doctor import Finding
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import Identity
from peerloom.node.observer import Observer
from peerloom.node.port_mapping import PortMapping
from peerloom.node.ports import RememberedPorts
from peerloom.node.reaching import leg_mapping_of, port_mapping_of
from peerloom.node.seams import MessageStream
from peerloom.node.tls import make_certificate
from peerloom.protocol.errors import LinkError, PeerloomError, PortInUse
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.services import Service
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

ASKED = 2  # peers that are to answer
TRIED = 6  # at most
NAME = "reachability"
RELAY = "relay reachability"

M = TypeVar("M")


class _Nobody:
    """Serves nothing: a peer that dials back wants no more than a proof of who is there."""

    async def serve(self, service: Service[M], stream: MessageStream[M]) -> None:
        raise LinkError("this is peer doctor")

    async def status(self) -> NodeStatus:
        raise LinkError("this is peer doctor")

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        nothing: tuple[StateMessage, ...] = ()
        for message in nothing:
            yield message
        raise LinkError("this is peer doctor")


@dataclass(frozen=True, slots=True)
class Asked:
    """`reached`: our addresses that each peer which answered came to; `refusals`: why others did not answer."""

    addresses: tuple[str, ...]
    reached: list[tuple[str, ...]]
    refusals: list[str]

    @property
    def port(self) -> str:
        """Of this machine's own."""
        return self.addresses[-1].rpartition(":")[2]

    def everywhere(self) -> str:
        """The addresses that peers came to."""
        return ", ".join(dict.fromkeys(address for addresses in self.reached for address in addresses))


async def ask_back(config: NodeConfig, observer: Observer) -> AsyncGenerator[Finding, None]:
    """Whether peers reach this machine where a node of it would listen, and if not, what is in the way."""
    records = [record for record in await observer.discovery.peers() if record.addresses]
    calls = _Port("grpc", config.grpc_port, config.announce, lambda transport: port_mapping_of(config, transport))
    try:
        asked = await calls.ask(config, observer.spec, records)
    except PortInUse:
        yield taken(NAME, config.grpc_port)
        return
    found = finding_of(asked, relays_among(records))
    yield found
    if found.level == "ok" and config.relay:
        hosts = tuple(map(host_of, config.announce))
        relay = _Port("relay", config.relay_port, hosts, lambda transport: leg_mapping_of(config, transport.local()[1]))
        try:
            yield relay_finding(await relay.ask(config, observer.spec, records))
        except PortInUse:
            yield taken(RELAY, config.relay_port)


@dataclass(frozen=True, slots=True)
class _Port:
    """One of a node's ports, under which peers are to find a server of ours for a moment."""

    kept: str  # under which name the node remembers it
    named: int  # 0: none by the user
    announce: tuple[str, ...]
    mapping: Callable[[GrpcTransport], PortMapping | None]

    async def ask(self, config: NodeConfig, spec: RunSpec, records: Sequence[PeerRecord]) -> Asked:
        """Raises PortInUse."""
        clock = SystemClock()
        port = RememberedPorts(config.folders.ports_file).choose(self.kept, config.listen[0], self.named)
        async with AsyncExitStack() as stack:
            transport = GrpcTransport(
                identity=Identity.generate(),
                certificate=make_certificate(clock.wall()),
                run_id=spec.run_id,
                spec_hash=spec.spec_hash(),
                listen=tuple((host, port) for host in config.listen),
                announce=self.announce,
                clock=clock,
                rng=random.Random(secrets.randbits(64)),
            )
            stack.push_async_callback(transport.stop)
            addresses = await transport.start(_Nobody())
            if (mapping := self.mapping(transport)) is not None:
                stack.push_async_callback(mapping.withdraw)
                addresses = (*await mapping.once(), *addresses)
            return Asked(addresses, *await _answers(transport, records, addresses))


async def _answers(
    transport: GrpcTransport, records: Sequence[PeerRecord], addresses: tuple[str, ...]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """What each of the peers that answered reached, and why others did not answer."""
    answers: list[tuple[str, ...]] = []
    refusals: list[str] = []
    for record in records[:TRIED]:
        if len(answers) == ASKED:
            break
        try:
            answers.append(await transport.dial_back(record, addresses))
        except PeerloomError as error:
            refusals.append(f"{record.name}: {error}")
    return answers, refusals


def relays_among(records: Sequence[PeerRecord]) -> int:
    """How many nodes carry the connections of those that cannot be dialled."""
    return sum(record.relays for record in records)


def taken(name: str, port: int) -> Finding:
    """Nothing can listen there now."""
    text = f"not checked: port {port} is taken, maybe by this machine's own node"
    return Finding(name, "warn", text, "see `where` of that node in peer status")


def unanswered(name: str, asked: Asked) -> Finding:
    """Nobody said anything."""
    why = asked.refusals[0] if asked.refusals else "no other node is there to ask"
    return Finding(name, "warn", f"not checked: {why}", "try again when more nodes are there")


def finding_of(asked: Asked, relays: int) -> Finding:
    """The line: direct when every peer that answered reached an address, else what is in the way and who relays."""
    if not asked.reached:
        return unanswered(NAME, asked)
    count = f"{sum(map(bool, asked.reached))} of {len(asked.reached)} peers"
    if all(asked.reached):
        return Finding(NAME, "ok", f"direct: {count} dialled back at {asked.everywhere()}")
    carried = f"{relays} of the nodes carry it" if relays else "and no node that carries others is there"
    tried = ", ".join(asked.addresses)
    text = f"{count} reached {tried}: {_in_the_way(asked.addresses)}; {carried}"
    port = asked.port
    remedy = (
        f"nothing needs to be done while a relay is there; to be dialled, turn UPnP or NAT-PMP on in the router, or "
        f"open TCP port {port} (--grpc-port) in the firewall and forward it in the router, or say --announce "
        f"HOST:{port} for where others reach this machine"
    )
    return Finding(NAME, "warn" if relays else "fail", text, remedy)


def relay_finding(asked: Asked) -> Finding:
    """The line of the port for what is carried for others, of a machine whose port for calls is reached."""
    if not asked.reached:
        return unanswered(RELAY, asked)
    if all(asked.reached):
        return Finding(RELAY, "ok", f"others reach {asked.everywhere()}: what this node carries for them passes there")
    tried = ", ".join(asked.addresses)
    text = (
        f"{sum(map(bool, asked.reached))} of {len(asked.reached)} peers reached {tried}: what this node carries for "
        "others takes the DHT's port, and more time"
    )
    remedy = (
        f"open TCP port {asked.port} (--relay-port) in the firewall and forward it, under the same number, in the "
        "router; or carry for nobody: --no-relay"
    )
    return Finding(RELAY, "warn", text, remedy)


def _in_the_way(addresses: tuple[str, ...]) -> str:
    if any(_is_public(address.rpartition(":")[0].strip("[]")) for address in addresses):
        return "a firewall on this machine or before it drops what comes in"
    return "it has private addresses alone, so a router (NAT) stands before it"


def _is_public(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True  # a name, announced on purpose
