"""The first bytes of a tunnel, from either side: a header, and how it is taken."""

from __future__ import annotations

import asyncio
from typing import Literal

from peerloom.node.p2pd import P2pDaemon, Stream
from peerloom.protocol import tunnel
from peerloom.protocol.errors import LinkError
from peerloom.protocol.tunnel import Header, Offer, TunnelRefused
from peerloom.protocol.types import PeerId

Taken = Literal["taken", "moved"] | Offer


async def ask(daemon: P2pDaemon, via: PeerId, header: Header, timeout_s: float) -> tuple[Stream, Taken]:
    """Opens a stream and has its header taken; raises LinkError, MalformedMessage or TimeoutError."""
    stream = await daemon.open_stream(via, tunnel.TUNNEL, timeout_s)
    try:
        stream[1].write(tunnel.encode_header(header))
        await stream[1].drain()
        return stream, await taken_by(stream, via)
    except OSError:
        stream[1].close()
        raise LinkError(f"{via} broke the tunnel off before it stood") from None
    except BaseException:
        stream[1].close()
        raise


async def taken_by(stream: Stream, by: PeerId) -> Taken:
    """How the other side takes the tunnel; raises TunnelRefused, LinkError, MalformedMessage or OSError."""
    try:
        answer = tunnel.decode_answer(await stream[0].readexactly(1))
        if answer == "offered":
            return tunnel.decode_offer(await stream[0].readexactly(tunnel.OFFER_BYTES))
    except asyncio.IncompleteReadError:
        raise LinkError(f"{by} broke the tunnel off before it stood") from None
    if tunnel.is_refusal(answer):
        raise TunnelRefused(by, answer)
    return "moved" if answer == "moved" else "taken"


async def take(stream: Stream) -> None:
    """Says to the other side that the tunnel is taken; raises OSError."""
    stream[1].write(tunnel.encode_answer("taken"))
    await stream[1].drain()
