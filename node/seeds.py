"""Probing the seeds of an invite: which of them answer, why the others do not, and how far our clock is from theirs.

hivemind would try seeds one way only, with one long timeout and no reason given; here each is dialled with a timeout of
its own, all at once, and says in one sentence what went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peerloom.node.p2pd import P2pDaemon
from peerloom.node.seams import Clock
from peerloom.protocol import limits
from peerloom.protocol.errors import (
    ClockSkew,
    LinkError,
    MalformedMessage,
    PeerError,
    RunMismatch,
    SeedUnreachable,
    VersionMismatch,
)
from peerloom.protocol.invite import Invite
from peerloom.protocol.types import PROTOCOL_MAX, PROTOCOL_MIN, RunId

log = logging.getLogger(__name__)

PROBE: Final = "peerloom/probe/1"
PROBE_TIMEOUT_S: Final = 5.0
MAX_REPLY_BYTES: Final = 4096
SKEW_WARN_S: Final = 2.0
SKEW_LIMIT_S: Final = 3.0  # hivemind's MAX_DHT_TIME_DISCREPANCY_SECONDS: beyond it nodes refuse each other's records
_FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}


class ProbeReply(BaseModel):
    """What a node says to a probe; `wall` is its Unix time in seconds."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    wall: float = Field(ge=0, le=limits.MAX_WALL_S)
    version: str = Field(max_length=limits.MAX_VERSION_CHARS)
    protocol_min: int = Field(ge=1, le=limits.MAX_PROTOCOL)
    protocol_max: int = Field(ge=1, le=limits.MAX_PROTOCOL)
    run_id: str | None = Field(pattern=r"^[0-9a-f]{16}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedReport:
    """A seed that answered; `offset_s` is its wall clock minus ours, `round_trip_s` how long the probe took."""

    invite: Invite
    reply: ProbeReply
    offset_s: float
    round_trip_s: float


async def serve_probe(p2p: Any, answer: Callable[[], ProbeReply]) -> None:
    """Answers probes on `p2p` until it is shut down."""
    from google.protobuf.wrappers_pb2 import BytesValue

    async def handle(_request: BytesValue, _context: object) -> BytesValue:
        return BytesValue(value=answer().model_dump_json().encode())

    await p2p.add_protobuf_handler(PROBE, handle, BytesValue)


async def probe_seeds(
    daemon: P2pDaemon,
    seeds: Sequence[Invite],
    clock: Clock,
    run_id: RunId | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> list[SeedReport]:
    """Probes all at once; returns those that answered and fit, at least one.

    Raises SeedUnreachable with a reason for each seed, or RunMismatch or VersionMismatch when that is all of them.
    """
    results = await asyncio.gather(
        *(_probe_one(daemon, seed, clock, run_id, timeout_s) for seed in seeds), return_exceptions=True
    )
    good: list[SeedReport] = []
    faults: list[PeerError | RunMismatch | VersionMismatch] = []
    for seed, result in zip(seeds, results, strict=True):
        if isinstance(result, SeedReport):
            good.append(result)
        elif isinstance(result, PeerError | RunMismatch | VersionMismatch):
            log.info("seed %s %s", seed.multiaddr, result)
            faults.append(result)
        else:
            raise result
    if not good:
        raise _all_failed(seeds, faults)
    return good


def _all_failed(
    seeds: Sequence[Invite], faults: Sequence[PeerError | RunMismatch | VersionMismatch]
) -> SeedUnreachable | RunMismatch | VersionMismatch:
    told = "; ".join(f"{seed.multiaddr} {fault}" for seed, fault in zip(seeds, faults, strict=True))
    for kind in (RunMismatch, VersionMismatch):
        if all(isinstance(fault, kind) for fault in faults):
            return kind(told)
    return SeedUnreachable(
        f"no seed answered: {told}. Check that the seed runs and that its port is open, or ask for a fresh invite"
    )


async def _probe_one(
    daemon: P2pDaemon, seed: Invite, clock: Clock, run_id: RunId | None, timeout_s: float
) -> SeedReport:
    try:
        async with asyncio.timeout(timeout_s):
            address = await reach(seed.protocol, seed.host, seed.port)
            await _connect(daemon, seed, address, timeout_s)
            report = await _ask(daemon, seed, clock)
    except TimeoutError as error:
        raise LinkError(f"did not answer within {timeout_s:g} s") from error
    _check_fit(seed, report.reply, run_id)
    return report


async def reach(protocol: str, host: str, port: int) -> str:
    """The multiaddr of what listens at a place, its name resolved; raises LinkError, fast, where nothing does.

    libp2p is not asked before: for an address that failed often it would then wait for minutes by itself.
    """
    family = _FAMILIES.get(protocol, socket.AF_UNSPEC)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise LinkError(f"has a name that does not resolve ({error.strerror})") from error
    reason = "has no address"
    for *_, address in found:
        each = str(address[0])
        try:
            _, writer = await asyncio.open_connection(each, port)
        except ConnectionRefusedError:
            reason = "refused the connection: nothing listens there"
        except TimeoutError:
            raise
        except OSError as error:
            reason = f"cannot be reached ({error.strerror or error})"
        else:
            await _hang_up(writer)
            return f"/ip{6 if ':' in each else 4}/{each}/tcp/{port}"
    raise LinkError(reason)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):  # the far end may reset what we are closing
        await writer.wait_closed()


async def _connect(daemon: P2pDaemon, seed: Invite, address: str, timeout_s: float) -> None:
    try:
        await daemon.connect(seed.peer_id, address, timeout_s)
    except LinkError as error:
        text = str(error)
        if "peer id mismatch" in text.lower():
            raise LinkError("is another node: its peer id is not the invite's") from error
        raise LinkError(
            f"listens, but is no libp2p node that answers ({text.splitlines()[-1].strip()[:200]})"
        ) from error


async def _ask(daemon: P2pDaemon, seed: Invite, clock: Clock) -> SeedReport:
    from google.protobuf.message import DecodeError
    from google.protobuf.wrappers_pb2 import BytesValue
    from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID

    sent, sent_wall = clock.monotonic(), clock.wall()
    try:
        answer = await daemon.p2p.call_protobuf_handler(
            PeerID.from_base58(seed.peer_id), PROBE, BytesValue(), BytesValue
        )
    except (P2PDaemonError, P2PHandlerError, DecodeError) as error:
        raise LinkError("is a libp2p node, but not a peerloom one") from error
    round_trip = clock.monotonic() - sent
    reply = _parse_reply(answer.value)
    offset = reply.wall - (sent_wall + round_trip / 2)
    return SeedReport(invite=seed, reply=reply, offset_s=offset, round_trip_s=round_trip)


def _parse_reply(data: bytes) -> ProbeReply:
    if len(data) > MAX_REPLY_BYTES:
        raise MalformedMessage(f"answered the probe with {len(data)} bytes; the limit is {MAX_REPLY_BYTES}")
    try:
        return ProbeReply.model_validate_json(data)
    except ValidationError as error:
        raise MalformedMessage("answered the probe with what is no answer") from error


def _check_fit(seed: Invite, reply: ProbeReply, run_id: RunId | None) -> None:
    if reply.protocol_max < PROTOCOL_MIN or reply.protocol_min > PROTOCOL_MAX:
        raise VersionMismatch(
            f"speaks protocol {reply.protocol_min} to {reply.protocol_max} (peerloom {reply.version}), "
            f"and this node {PROTOCOL_MIN} to {PROTOCOL_MAX}; install the same version of peerloom on both"
        )
    for source, wanted in (("the invite", seed.run_id), ("this node", run_id)):
        if wanted is not None and reply.run_id is not None and wanted != reply.run_id:
            raise RunMismatch(f"serves run {reply.run_id}, and {source} is for run {wanted}; ask for a fresh invite")


def check_clock(reports: Sequence[SeedReport]) -> str | None:
    """A sentence when our clock is over SKEW_WARN_S from the seeds' (their median), None when it is near.

    Raises ClockSkew beyond SKEW_LIMIT_S.
    """
    if not reports:
        return None
    offset = statistics.median(report.offset_s for report in reports)
    direction = "behind" if offset > 0 else "ahead of"
    said = f"this machine's clock is {abs(offset):.1f} s {direction} the swarm's"
    if abs(offset) > SKEW_LIMIT_S:
        raise ClockSkew(
            f"{said}, and peers refuse each other beyond {SKEW_LIMIT_S:g} s; "
            "set it (timedatectl set-ntp true) and start again"
        )
    if abs(offset) > SKEW_WARN_S:
        return f"{said}; beyond {SKEW_LIMIT_S:g} s peers refuse each other: set it (timedatectl set-ntp true)"
    return None
