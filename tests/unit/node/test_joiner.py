"""A joiner takes nothing from a donor that it could not train on."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from peerloom.node.donor import manifest_of
from peerloom.node.joiner import MAX_STEPS_A_ROUND, STALL_S, FetchedState, Joiner
from peerloom.node.least_rate import left_s
from peerloom.node.memory_transport import MemoryTransport
from peerloom.node.place import Held, Place
from peerloom.node.virtual_time import run_virtual
from peerloom.protocol.errors import LinkError, NoDonor
from peerloom.protocol.limits import LEAST_CHUNK_BYTES, LEAST_RATE, MAX_PAST_RECORD, MAX_STEPS_PAST_RECORD, MAX_TAKEN
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
        yield manifest_of(data, round=8 if data is BAD else 7, step=70, layout="L", held_out_loss=1.0)
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
    assert state.donors == (HONEST,)


async def test_liars_alone_leave_no_donor() -> None:
    joiner = Joiner(Donors(), record, lambda peer, fault: None, lambda what, share: None)
    with pytest.raises(NoDonor, match="non-finite parameters in piece 0"):
        await joiner.fetch(FetchMachine([LIAR], "L", len(GOOD), 8), len(GOOD))


class OneDonor(Donors):
    """Serves good numbers under a round and a step of its choice."""

    def __init__(self, round: int, step: int = 70) -> None:
        self._at = (round, step)

    async def fetch(self, peer: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        yield manifest_of(GOOD, round=self._at[0], step=self._at[1], layout="L", held_out_loss=1.0)
        yield StatePiece(0, GOOD)


@pytest.mark.parametrize(
    ("round", "step"), [(MAX_PAST_RECORD + 1, 70), (4, 70), (7, MAX_TAKEN + 1), (7, MAX_STEPS_PAST_RECORD + 1)]
)
async def test_a_position_nobody_could_go_on_from_is_refused_with_its_manifest(round: int, step: int) -> None:
    scored: list[tuple[PeerId, str]] = []
    joiner = Joiner(
        OneDonor(round, step), record, lambda peer, fault: scored.append((peer, fault)), lambda what, share: None
    )
    with pytest.raises(NoDonor, match=f"its state is of round {round}, step {step}"):
        await joiner.fetch(FetchMachine([LIAR], "L", len(GOOD), 8), len(GOOD), least_round=5)
    assert scored == [(LIAR, "bad_state")]


@pytest.mark.parametrize(("round", "step"), [(7, 9 * MAX_STEPS_A_ROUND), (7, 9 * MAX_STEPS_A_ROUND + 1)])
async def test_a_step_that_no_such_round_could_have_is_refused_though_the_record_says_it_too(
    round: int, step: int
) -> None:
    scored: list[tuple[PeerId, str]] = []

    def lying(peer: PeerId) -> PeerRecord:
        return replace(record(peer), round=round, step=step)

    joiner = Joiner(
        OneDonor(round, step), lying, lambda peer, fault: scored.append((peer, fault)), lambda what, share: None
    )
    machine = FetchMachine([LIAR], "L", len(GOOD), 8)
    if step <= 9 * MAX_STEPS_A_ROUND:  # the rounds before, this one, and what runs beneath its exchange
        assert (await joiner.fetch(machine, len(GOOD))).step == step
    else:
        with pytest.raises(NoDonor, match=f"its state is of round {round}, step {step}"):
            await joiner.fetch(machine, len(GOOD))
        assert scored == [(LIAR, "bad_state")]


def test_a_donor_that_drips_has_its_time_and_one_at_the_least_rate_as_long_as_it_takes() -> None:
    async def scenario() -> None:
        loop, began, received = asyncio.get_running_loop(), asyncio.get_running_loop().time(), 0
        with pytest.raises(LinkError, match="slower than 32 KiB/s over the whole transfer"):
            while True:
                assert left_s(began, received, STALL_S) <= STALL_S
                await asyncio.sleep(STALL_S - 1)
                received += LEAST_CHUNK_BYTES
        assert loop.time() - began < 2 * STALL_S
        began, received = loop.time(), 0
        for _ in range(1000):  # at the least rate, and a little more
            assert left_s(began, received, STALL_S) > 0
            await asyncio.sleep(0.99 * LEAST_CHUNK_BYTES / LEAST_RATE)
            received += LEAST_CHUNK_BYTES

    run_virtual(scenario)


class Dripping(Donors):
    """Both serve pieces of the least size; the liar takes nearly STALL_S for each."""

    async def fetch(self, peer: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        data = bytes(100 * LEAST_CHUNK_BYTES)
        yield manifest_of(data, round=7, step=70, layout="L", held_out_loss=1.0, piece_bytes=LEAST_CHUNK_BYTES)
        for index in range(request.start_piece, 100):
            await asyncio.sleep(STALL_S - 1 if peer.peer_id == LIAR else 0.99 * LEAST_CHUNK_BYTES / LEAST_RATE)
            yield StatePiece(index, bytes(LEAST_CHUNK_BYTES))


@pytest.mark.parametrize("fp32", [True, False])
def test_who_drips_is_left_for_the_next_donor(fp32: bool) -> None:
    async def scenario() -> None:
        loop, size = asyncio.get_running_loop(), 100 * LEAST_CHUNK_BYTES
        joiner, began = Joiner(Dripping(), record, lambda peer, fault: None, lambda what, share: None), loop.time()
        machine, into = FetchMachine([LIAR, HONEST], "L", size, 8), bytearray(size)
        _, donors = await joiner.fetch_into(machine, lambda at, data: into.__setitem__(at, data[0]), fp32=fp32)
        assert donors == (LIAR, HONEST)  # a piece of the one, all others of the other
        assert loop.time() - began < 2 * STALL_S + size / LEAST_RATE

    run_virtual(scenario)


class Silent(Donors):
    """The liar takes the call and says nothing; the honest one serves."""

    async def fetch(self, peer: PeerRecord, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        if peer.peer_id == LIAR:
            await asyncio.Event().wait()
        async for message in super().fetch(peer, request):
            yield message


def test_silence_costs_one_donor_half_of_the_time_and_all_of_them_all_of_it() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        joiner = Joiner(Silent(), record, lambda peer, fault: None, lambda what, share: None)
        began = loop.time()
        machine = FetchMachine([LIAR, HONEST], "L", len(GOOD), 8)
        state = await joiner.fetch(machine, len(GOOD), manifest_within_s=4.0)
        assert state.donors == (HONEST,)
        assert loop.time() - began == pytest.approx(2.0)
        began = loop.time()
        with pytest.raises(NoDonor, match="it sent nothing for too long"):
            await joiner.fetch(FetchMachine([LIAR], "L", len(GOOD), 8), len(GOOD), manifest_within_s=4.0)
        assert loop.time() - began == pytest.approx(4.0)

    run_virtual(scenario)


@pytest.mark.parametrize(("donors", "blamed"), [("a", "a"), ("ab", "a"), ("abc", "ab")])
def test_who_is_to_blame_for_a_state_of_several(donors: str, blamed: str) -> None:
    state = FetchedState(7, 70, bytearray(), 1.0, tuple(map(PeerId, donors)))
    assert state.to_blame() == tuple(blamed)


@pytest.mark.parametrize(("named", "kind"), [("", "fetch"), ("aa" * 32, "fresh")])
def test_who_began_from_another_model_than_the_run_names_leads_nobody(named: str, kind: str) -> None:
    """Two of three nodes announce another theta_0: without a name they are the majority."""
    facts = SimpleNamespace(round=0, init_digest="aa" * 32, layout_digest="L", started_at=1.0)
    others = [replace(record(PeerId(name)), init_digest="bb" * 32, layout_digest="L") for name in "ab"]
    context: Any = SimpleNamespace(
        facts=facts,
        clock=SimpleNamespace(monotonic=lambda: 0.0, wall=lambda: others[0].issued_at),
        view=SimpleNamespace(believed=lambda: others, record_of=None, score=None, seen_s=lambda: {}),
        transport=None,
        progress=None,
        spec=SimpleNamespace(model=SimpleNamespace(digest=named), gasloc=SimpleNamespace(max_round_skew=5)),
    )
    worker: Any = None
    assert Place(context, worker, Held(0.0))._decide(resumed=False).kind == kind
