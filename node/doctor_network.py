"""The checks of `peer doctor` that ask others: names, seeds one by one, the clock, reachability, bandwidth."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from peerloom.node.clock import SystemClock
from peerloom.node.config import NodeConfig
from peerloom.node.doctor import Finding
from peerloom.node.doctor_reach import ask_back
from peerloom.node.observer import Observer, open_observer
from peerloom.node.p2pd import P2pDaemon, P2pdOptions
from peerloom.node.seeds import PROBE, SeedReport, check_clock, probe_seeds
from peerloom.protocol.errors import ClockSkew, InviteError, PeerloomError
from peerloom.protocol.invite import Invite, parse_invite
from peerloom.protocol.messages import FetchRequest, StatePiece
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerRecord

log = logging.getLogger(__name__)

MEASURE_S = 3.0  # of each direction
UPLOAD_BYTES = 512 << 10  # of one request; hivemind takes up to 4 MiB
UPLOADS_AT_ONCE = 4
DOWNLOAD_BYTES = 64 << 20  # at most
LOOK_S = 20.0

AskBack = Callable[[NodeConfig, Observer], AsyncGenerator[Finding, None]]


@dataclass(slots=True)
class Network:
    """What was found out beside the lines: the swarm's spec and the bandwidth, None where it could not be."""

    spec: RunSpec | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


async def network_findings(
    config: NodeConfig, invites: Sequence[str], found: Network, *, measure: bool, ask_back: AskBack = ask_back
) -> AsyncIterator[Finding]:
    """All of them, in order; fills `found`. `ask_back` lets peers dial this machine."""
    if not invites:
        text = "no invite: seeds, clock, reachability and bandwidth are not checked"
        yield Finding("seeds", "warn", text, "pass it: peer doctor INVITE")
        return
    seeds = []
    for text in invites:
        try:
            seeds.append(parse_invite(text))
        except InviteError as error:
            yield Finding("seed", "fail", str(error), "ask the run's organizer for a fresh invite")
    for seed in seeds:
        if seed.protocol.startswith("dns"):
            yield await _name(seed)
    async with AsyncExitStack() as stack:
        daemon = await P2pDaemon.start(P2pdOptions())
        stack.push_async_callback(daemon.stop)
        reports: list[SeedReport] = []
        for seed in seeds:
            yield await _seed(daemon, seed, reports)
        if not reports:
            return
        yield _clock(reports)
        if measure:
            found.up_bytes_per_s = await _upload(daemon, reports[0].invite)
            yield _bandwidth("upload", found.up_bytes_per_s, "to the first seed that answers")
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(LOOK_S):
                observer = await open_observer([str(report.invite) for report in reports], stack)
                records = await observer.discovery.peers()
        except (PeerloomError, TimeoutError) as error:
            yield Finding("swarm", "fail", str(error) or "the DHT does not answer", "see the message")
            return
        found.spec = observer.spec
        trainers = [record for record in records if record.role == "trainer" and record.layout_digest]
        told = f"run {observer.spec.run_id} ({observer.spec.name}), {len(records)} nodes, {len(trainers)} of them train"
        yield Finding("swarm", "ok", told)
        async with aclosing(ask_back(config, observer)) as reaching:
            async for line in reaching:
                yield line
        if measure and trainers:
            found.down_bytes_per_s = await _download(observer, trainers)
            yield _bandwidth("download", found.down_bytes_per_s, "from a trainer")
        elif measure:
            yield Finding("download", "warn", "not measured: no trainer is there yet to fetch from")


async def _name(seed: Invite) -> Finding:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(seed.host, seed.port)
    except OSError as error:
        text = f"{seed.host} does not resolve ({error.strerror})"
        return Finding("DNS", "fail", text, "check the resolver (resolvectl status), or take an invite with an address")
    return Finding("DNS", "ok", f"{seed.host} is {', '.join(sorted({str(address[0]) for *_, address in found}))}")


async def _seed(daemon: P2pDaemon, seed: Invite, reports: list[SeedReport]) -> Finding:
    name = f"seed {seed.peer_id[-8:]}"
    try:
        (report,) = await probe_seeds(daemon, [seed], SystemClock())
    except PeerloomError as error:
        return Finding(name, "fail", str(error), "is it up, and its port open? else ask for a fresh invite")
    reports.append(report)
    reply = report.reply
    text = f"{seed.host}:{seed.port} answers in {1000 * report.round_trip_s:.0f} ms, peerloom {reply.version}"
    return Finding(name, "ok", f"{text}, run {reply.run_id or 'none yet'}")


def _clock(reports: list[SeedReport]) -> Finding:
    try:
        warning = check_clock(reports)
    except ClockSkew as error:
        return Finding("clock", "fail", str(error), "timedatectl set-ntp true")
    if warning:
        return Finding("clock", "warn", warning, "timedatectl set-ntp true")
    largest = max((report.offset_s for report in reports), key=abs)
    return Finding("clock", "ok", f"{abs(largest):.2f} s from the seeds'")


def _bandwidth(name: str, rate: float | None, to: str) -> Finding:
    if rate is None:
        return Finding(name, "warn", f"not measured: the transfer {to} failed", "try again, or with another invite")
    return Finding(name, "ok", f"{rate / 1e6:.1f} MB/s {to}")


async def _upload(daemon: P2pDaemon, seed: Invite) -> float | None:
    """Bytes a second of probes with a burden, several at once; the seed answers each with a few bytes."""
    from google.protobuf.wrappers_pb2 import BytesValue
    from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID

    clock, burden, sent = asyncio.get_running_loop().time, BytesValue(value=bytes(UPLOAD_BYTES)), 0
    began = clock()

    async def send() -> None:
        nonlocal sent
        while clock() - began < MEASURE_S:
            await daemon.p2p.call_protobuf_handler(PeerID.from_base58(seed.peer_id), PROBE, burden, BytesValue)
            sent += UPLOAD_BYTES

    try:
        async with asyncio.timeout(10 * MEASURE_S):
            await asyncio.gather(*(send() for _ in range(UPLOADS_AT_ONCE)))
    except (P2PDaemonError, P2PHandlerError, TimeoutError) as error:
        log.debug("the upload was broken off: %s", error)
    return sent / (clock() - began) if sent else None


async def _download(observer: Observer, trainers: list[PeerRecord]) -> float | None:
    """Bytes a second of a trainer's state, as a joiner takes it; what comes is not kept."""
    clock = asyncio.get_running_loop().time
    for record in trainers[:3]:
        taken, began = 0, clock()
        try:
            async with asyncio.timeout(10 * MEASURE_S):
                stream: Any = observer.transport.fetch(record, FetchRequest(record.layout_digest))
                async with aclosing(stream) as messages:
                    async for message in messages:
                        if not isinstance(message, StatePiece):
                            began = clock()
                            continue
                        taken += len(message.data)
                        if clock() - began >= MEASURE_S or taken >= DOWNLOAD_BYTES:
                            break
        except (PeerloomError, TimeoutError) as error:
            log.debug("the download was broken off: %s", error)
        if taken:
            return taken / max(clock() - began, 1e-6)
    return None
