"""Keeps an eye on a relay: a stream that asks it for a sign of life again and again, and holds a place at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peerloom.node.p2pd import Stream
from peerloom.node.seams import Clock
from peerloom.node.tunnel import Tunnels
from peerloom.protocol.errors import MalformedMessage, PeerError
from peerloom.protocol.tunnel import PING, Keep, TunnelRefused
from peerloom.protocol.types import PeerId

PING_S = 1.5  # between signs of life ...
PONG_S = 2.5  # ... each of which may take so long: a relay that vanishes is missed within 4 s

Measured = Callable[[float, float], None]  # seconds of a round trip, load 0 to 1


async def keep(tunnels: Tunnels, relay: PeerId, clock: Clock, measured: Measured, *, place: bool) -> str:
    """Runs until the relay is lost; returns the fault to hold against it, one of RelayBook's."""
    try:
        stream = await tunnels.open(relay, Keep(place))
    except TunnelRefused:
        return "refused"
    except MalformedMessage:
        return "corrupt"
    except PeerError:
        return "gone"
    try:
        while True:
            measured(*await _ping(stream, clock))
            await asyncio.sleep(PING_S)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return "gone"
    finally:
        stream[1].close()


async def measure(tunnels: Tunnels, relay: PeerId, clock: Clock) -> tuple[float, float] | None:
    """One round trip and the load; None when it does not answer."""
    try:
        stream = await tunnels.open(relay, Keep(place=False))
    except PeerError:
        return None
    try:
        return await _ping(stream, clock)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None
    finally:
        stream[1].close()


async def _ping(stream: Stream, clock: Clock) -> tuple[float, float]:
    began = clock.monotonic()
    async with asyncio.timeout(PONG_S):
        stream[1].write(PING)
        await stream[1].drain()
        load = (await stream[0].readexactly(1))[0] / 255
    return clock.monotonic() - began, load
