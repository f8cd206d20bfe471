"""A joiner takes nothing from a donor that it could not train on."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncGenerator

import pytest

from peerloom.node.donor import manifest_of
from peerloom.node.joiner import Joiner
from peerloom.node.memory_transport import MemoryTransport
from peerloom.protocol.errors import NoDonor
from peerloom.protocol.messages import FetchRequest, StateMessage, StatePiece
from peerloom.protocol.transfer import FetchMachine
from peerloom.protocol.types import PeerId, PeerRecord

LIAR, HONEST = PeerId("liar"), PeerId("honest")
GOOD = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)
BAD = struct.pack("<4f", 1.0, math.nan, 3.0, 4.0)


class Donors(MemoryTransport):
    """Serves NaN as the liar and numbers as the honest one, each with the digests that fit."""

    def __init__(self) -> None:
        pass

    async def fetch(self, peer: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        data = BAD if peer.peer_id == LIAR else GOOD
        yield manifest_of(data, round=10**9 if data is BAD else 7, step=70, layout="L", held_out_loss=1.0)
        yield StatePiece(0, data)


def record(peer: PeerId) -> PeerRecord:
    return PeerRecord(
        peer_id=peer, name=peer, role="trainer", addresses=("a:1",), cert_der=b"", version="0", instance="0",
        started_at=0.0, issued_at=0.0,
    )  # fmt: skip


async def test_nan_is_refused_scored_and_the_next_donor_asked() -> None:
    scored: list[tuple[PeerId, str]] = []
    joiner = Joiner(Donors(), record, lambda peer, fault: scored.append((peer, fault)), lambda what, share: None)
    state = await joiner.fetch(FetchMachine([LIAR, HONEST], "L", len(GOOD), 8), len(GOOD))
    assert (state.round, bytes(state.theta)) == (7, GOOD)
    assert scored == [(LIAR, "bad_state")]


async def test_liars_alone_leave_no_donor() -> None:
    joiner = Joiner(Donors(), record, lambda peer, fault: None, lambda what, share: None)
    with pytest.raises(NoDonor, match="non-finite parameters in piece 0"):
        await joiner.fetch(FetchMachine([LIAR], "L", len(GOOD), 8), len(GOOD))
