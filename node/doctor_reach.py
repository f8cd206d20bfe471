"""The check of `peer doctor` whether others can dial this machine: it listens, and asks two peers to dial back."""

from __future__ import annotations

import ipaddress
import random
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from peerloom.node.clock import SystemClock
from peerloom.node.config import NodeConfig
from peerloom.node.doctor import Finding
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import Identity
from peerloom.node.observer import Observer
from peerloom.node.ports import RememberedPorts
from peerloom.node.reaching import port_mapping_of
from peerloom.node.seams import MessageStream
from peerloom.node.tls import make_certificate
from peerloom.protocol.errors import LinkError, PeerloomError, PortInUse
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.services import Service
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

ASKED = 2  # peers that are to answer
TRIED = 6  # at most
NAME = "reachability"

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


async def ask_back(config: NodeConfig, observer: Observer) -> Finding:
    """Whether peers reach this machine where a node of it would listen, and if not, what is in the way."""
    clock, spec = SystemClock(), observer.spec
    records = [record for record in await observer.discovery.peers() if record.addresses]
    async with AsyncExitStack() as stack:
        try:
            port = RememberedPorts(config.folders.ports_file).choose("grpc", config.listen[0], config.grpc_port)
            transport = GrpcTransport(
                identity=Identity.generate(),
                certificate=make_certificate(clock.wall()),
                run_id=spec.run_id,
                spec_hash=spec.spec_hash(),
                listen=tuple((host, port) for host in config.listen),
                announce=config.announce,
                clock=clock,
                rng=random.Random(secrets.randbits(64)),
            )
            stack.push_async_callback(transport.stop)
            addresses = await transport.start(_Nobody())
            if (mapping := port_mapping_of(config, transport)) is not None:
                stack.push_async_callback(mapping.withdraw)
                addresses = (*await mapping.once(), *addresses)
        except PortInUse:
            text = f"not checked: port {config.grpc_port} is taken, maybe by this machine's own node"
            return Finding(NAME, "warn", text, "see `where` of that node in peer status")
        return finding_of(addresses, *await _answers(transport, records, addresses), relays_among(records))


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


def finding_of(
    addresses: tuple[str, ...], answers: list[tuple[str, ...]], refusals: list[str], relays: int
) -> Finding:
    """The line: direct when every peer that answered reached an address, else what is in the way and who relays."""
    tried = ", ".join(addresses)
    if not answers:
        why = refusals[0] if refusals else "no other node is there to ask"
        return Finding(NAME, "warn", f"not checked: {why}", "try again when more nodes are there")
    if all(answers):
        reached = ", ".join(dict.fromkeys(address for answer in answers for address in answer))
        return Finding(NAME, "ok", f"direct: {len(answers)} of {len(answers)} peers dialled back at {reached}")
    carried = f"{relays} of the nodes carry it" if relays else "and no node that carries others is there"
    text = f"{sum(map(bool, answers))} of {len(answers)} peers reached {tried}: {_in_the_way(addresses)}; {carried}"
    port = addresses[-1].rpartition(":")[2]
    remedy = (
        f"nothing needs to be done while a relay is there; to be dialled, turn UPnP or NAT-PMP on in the router, or "
        f"open TCP port {port} (--grpc-port) in the firewall and forward it in the router, or say --announce "
        f"HOST:{port} for where others reach this machine"
    )
    return Finding(NAME, "warn" if relays else "fail", text, remedy)


def _in_the_way(addresses: tuple[str, ...]) -> str:
    if any(_is_public(address.rpartition(":")[0].strip("[]")) for address in addresses):
        return "a firewall on this machine or before it drops what comes in"
    return "it has private addresses alone, so a router (NAT) stands before it"


def _is_public(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True  # a name, announced on purpose
