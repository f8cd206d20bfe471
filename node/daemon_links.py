"""What a node of a run answers to: calls of other nodes, direct or through relays, and a browser's."""

from __future__ import annotations

import logging
import random
import secrets
from asyncio import timeout
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import metadata

from peerloom.node.config import default_name
from peerloom.node.daemon_home import Home
from peerloom.node.daemon_run import AgreedRun
from peerloom.node.dht_traffic import DhtTraffic
from peerloom.node.facts import Facts
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.http_endpoint import SERVED_AT, parse_endpoint
from peerloom.node.http_feed import SwarmFeed
from peerloom.node.http_server import HttpServer
from peerloom.node.metrics import exposition
from peerloom.node.reaching import Reaching, desk_limits, leg_mapping_of, listen_for_legs, port_mapping_of
from peerloom.node.throttle import Caps, Traffic
from peerloom.node.tls import load_or_make
from peerloom.node.view import SwarmView
from peerloom.protocol.errors import IdentityInUse, PeerloomError
from peerloom.protocol.progress import StepPace

log = logging.getLogger(__name__)

OTHER_SELF_S = 3.0  # how long a live namesake gets to answer before it counts as gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """`jobs` run beside the node until it ends."""

    transport: GrpcTransport
    reaching: Reaching
    facts: Facts
    view: SwarmView
    jobs: tuple[Callable[[], Coroutine[None, None, None]], ...]


async def open_links(home: Home, run: AgreedRun, stack: AsyncExitStack) -> Links:
    """Makes all that calls go through; none is accepted before the node asks its transport to serve."""
    config, clock, spec = home.config, home.clock, run.spec
    certificate = load_or_make(config.folders.data, clock.wall())
    traffic = Traffic(clock, Caps(config.max_upload, config.max_download))
    reaching = Reaching.build(
        home.identity.peer_id,
        clock,
        desk_limits(config),
        lambda peer: view.record_of(peer),
        lambda metric, amount: facts.count(metric, amount),
        frozenset(config.allow),
        traffic,
    )
    stack.push_async_callback(reaching.stop)
    leg_port = listen_for_legs(reaching.tunnels, config, home.relay_port) if config.relay else 0
    if leg_port:
        home.ports.remember("relay", leg_port)
    transport = GrpcTransport(
        identity=home.identity,
        certificate=certificate,
        run_id=spec.run_id,
        spec_hash=spec.spec_hash(),
        listen=tuple((host, home.grpc_port) for host in config.listen),
        announce=config.announce,
        traffic=traffic,
        clock=clock,
        rng=random.Random(secrets.randbits(64)),
        allow=(lambda peer: peer in config.allow) if config.allow else None,
        dialer=reaching.dialer,
        origin_of=reaching.tunnels.origin_of,
    )
    stack.push_async_callback(transport.stop)
    facts = _facts(home, transport, certificate.der)
    view = SwarmView(home.discovery, facts, spec, clock, run.signed)
    await home.discovery.attach(reaching.tunnels.attach)
    home.discovery.room = traffic.save
    mappings = (port_mapping_of(config, transport), leg_mapping_of(config, leg_port))
    driver = reaching.driver(transport, view, facts, home.discovery, *mappings)
    dht = DhtTraffic(traffic, lambda: home.discovery.p2pd_pid, clock, facts.count)
    jobs = (driver.run, dht.run, *(each.run for each in mappings if each is not None))
    return Links(transport=transport, reaching=reaching, facts=facts, view=view, jobs=jobs)


def _facts(home: Home, transport: GrpcTransport, cert_der: bytes) -> Facts:
    return Facts(
        peer_id=home.identity.peer_id,
        name=home.config.name or default_name(home.identity.peer_id),
        role=home.role,
        version=metadata.version("peerloom"),
        instance=secrets.token_hex(8),
        cert_der=cert_der,
        clock=home.clock,
        bytes_moved=transport.bytes_moved,
        started_at=home.clock.wall(),
        pace=StepPace(home.config.stall_after_s),
    )


async def serve_http(home: Home, run: AgreedRun, links: Links, stack: AsyncExitStack) -> None:
    """The page, metrics and health, unless `--http none`."""
    endpoint = parse_endpoint(home.config.http)
    if endpoint is None:
        return
    facts, view = links.facts, links.view
    feed = SwarmFeed(run.spec, facts.status, view.records, view.left, home.clock.wall)
    metrics = exposition(facts.status, feed.totals, home.discovery.records_kept)
    server = await HttpServer.start(endpoint, feed=feed, status=facts.status, metrics=metrics)
    stack.push_async_callback(server.stop)
    log.info("%s%s", SERVED_AT, server.url)


async def refuse_second_self(links: Links) -> None:
    """Raises IdentityInUse when another live node answers with this identity; a dead one's record is no hindrance."""
    other = await links.view.own_record()
    if other is None or other.instance == links.facts.instance:
        return
    try:
        async with timeout(OTHER_SELF_S):
            answer = await links.transport.status(other)
    except (PeerloomError, TimeoutError):
        return
    if answer.record.instance != links.facts.instance:
        raise IdentityInUse(
            f"the node {answer.record.name!r} at {other.addresses[0]} runs with this identity already; stop it, or "
            "start this one with another --home"
        )
