"""Questions for a state's hash that this node puts to neighbours, over the links that stand.

A stream of its own for a question would take a link's place at the neighbour, or be refused there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from peerloom.node.flood_join import STALL_S
from peerloom.protocol.errors import LinkError
from peerloom.protocol.flood_messages import HashQuery, HashReply, Head
from peerloom.protocol.types import PeerId


class Asking:
    """The questions under way."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[PeerId, int], asyncio.Future[bytes]] = {}

    async def ask(self, peer: PeerId, heads: Sequence[Head], send: Callable[[HashQuery], None]) -> bytes:
        """The neighbour's word, b"" if it cannot tell; raises LinkError when the link ends first, or nothing comes."""
        query = HashQuery(next(self._numbers), tuple(heads))
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[peer, query.number] = future
        try:
            send(query)
            async with asyncio.timeout(STALL_S):
                return await future
        except TimeoutError:
            raise LinkError(f"no state hash within {STALL_S:.0f} s") from None
        finally:
            del self._waiting[peer, query.number]

    def answered(self, peer: PeerId, reply: HashReply) -> bool:
        """Whether it was asked for."""
        future = self._waiting.get((peer, reply.number))
        if future is None or future.done():
            return False
        future.set_result(reply.digest)
        return True

    def ended(self, peer: PeerId) -> None:
        """Its link is over."""
        for (asked, _), future in self._waiting.items():
            if asked == peer and not future.done():
                future.set_exception(LinkError("the link ended before the state hash came"))
