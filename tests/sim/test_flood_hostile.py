"""A peer that floods its neighbours with all that is allowed once, and a newcomer with another base model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from blake3 import blake3

from peerloom.node.memory_seedflow import MemorySeedflow, base_of
from peerloom.node.worker_seams import SeedflowReady, WorkerSetup
from peerloom.protocol.codec_flood import FloodWriter
from peerloom.protocol.errors import PeerloomError, RunMismatch
from peerloom.protocol.flood_messages import Batch, HashQuery, Head, Segments, Versions, Want, Wants, first_chain
from peerloom.protocol.runspec import ModelSpec
from peerloom.protocol.services import FLOOD
from tests.sim.flood_swarm import FloodSwarm, Member, identity, play, spec

HASH_S = 0.05  # a real worker's time for a state hash
EVERY_S = 0.02  # between two salvos
STEPS = 200
HOSTILE = 99


async def flood(swarm: FloodSwarm, target: Member) -> None:
    """Asks, repeats and compares without end; whenever it is thrown out, it comes again."""
    run_id = swarm.spec.run_id
    transport = swarm.hub.transport(identity(HOSTILE), run_id=run_id, spec_hash=swarm.spec.spec_hash())
    known = [member.peer_id for member in swarm.members]
    heads = tuple(Head(peer, 1, first_chain(run_id, peer)) for peer in known)
    held = target.items()[:1]
    bodies = (
        Versions(heads),
        Wants(tuple(Want(peer, 0) for peer in known)),
        HashQuery(1, ()),
        Segments(tuple(held * 50)),
    )
    try:
        while True:
            await asyncio.sleep(0.5)
            records = [record for record in swarm.registry.live(run_id) if record.peer_id == target.peer_id]
            try:
                stream = await transport.open(records[0], FLOOD)
                writer = FloodWriter()
                while True:
                    for body in bodies:
                        await stream.send(writer.write(body))
                    await asyncio.sleep(EVERY_S)
            except (PeerloomError, IndexError):
                continue
    finally:
        await transport.stop()


async def slow_hash(worker: MemorySeedflow, without: Sequence[Batch] = ()) -> bytes:
    await asyncio.sleep(HASH_S)
    return await HASH(worker, without)


HASH = MemorySeedflow.state_hash


def seconds(folder: Path, hostile: bool) -> tuple[float, FloodSwarm]:
    """Virtual seconds that four nodes take for their steps."""
    took = 0.0

    async def scenario(swarm: FloodSwarm) -> None:
        nonlocal took
        for member in swarm.members:
            member.start()
        await swarm.until("some steps", lambda: all(member.facts.step >= 20 for member in swarm.members))
        began = swarm.clock.monotonic()
        jobs = [asyncio.create_task(flood(swarm, member)) for member in swarm.members if hostile]
        await swarm.until("all steps", lambda: all(m.facts.step >= STEPS for m in swarm.members), within_s=90.0)
        took = swarm.clock.monotonic() - began
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await swarm.until("all end", lambda: all(member.running is None for member in swarm.members))

    folder.mkdir()
    with patch.object(MemorySeedflow, "state_hash", slow_hash):
        swarm = play(lambda: FloodSwarm(folder, 4, spec(max_steps=STEPS)), scenario)
    return took, swarm


def test_a_hostile_flooder_does_not_slow_an_honest_swarm(tmp_path: Path) -> None:
    alone, _ = seconds(tmp_path / "alone", hostile=False)
    attacked, swarm = seconds(tmp_path / "attacked", hostile=True)
    assert attacked <= 1.05 * alone + 2 * 32 * HASH_S  # the questions that are allowed at once, and those that follow
    assert {member.facts.state_hash for member in swarm.members} == {swarm.central()}
    for member in swarm.members:
        assert member.failure is None
        assert member.counters["flood_refused_talk"] >= 1 and member.counters["flood_refused_pace"] >= 1
        assert member.counters["peer_faults"] == member.counters["flood_refused_pace"]  # nobody honest is blamed


class OtherBase(MemorySeedflow):
    """A worker over another base model."""

    async def start(self, setup: WorkerSetup, progress: Callable[[str, float], None]) -> SeedflowReady:
        ready = await super().start(setup, progress)
        self._base = bytes(len(self._base))
        digest = blake3(self._base).hexdigest()
        return SeedflowReady(**{name: getattr(ready, name) for name in ready.__slots__} | {"init_digest": digest})


def test_a_base_model_whose_hash_differs_is_refused_with_a_reason_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(swarm: FloodSwarm) -> None:
        for member in swarm.members[:2]:
            member.start()
        await swarm.until("some steps", lambda: swarm.members[0].facts.step >= 30)
        other = swarm.members[2]
        monkeypatch.setattr(other, "_worker", lambda: OtherBase(step_s=0.2, start_s=0.5))
        other.start()
        await swarm.until("all end", lambda: all(member.running is None for member in swarm.members))

    swarm = play(lambda: FloodSwarm(tmp_path, 3, spec()), scenario)
    other = swarm.members[2]
    assert isinstance(other.failure, RunMismatch) and "base model" in str(other.failure)
    assert other.counters["flood_refused_base"] == 1
    assert {member.facts.state_hash for member in swarm.members[:2]} == {swarm.central()}
    assert all(member.facts.messages == 2 * 200 for member in swarm.members[:2])


@pytest.mark.parametrize("bare", [False, True])
def test_where_the_run_names_its_base_a_majority_with_another_neither_stops_nor_misleads_a_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    """One that has the base goes on among liars alone; one that has none takes it from the one that is honest."""
    named = replace(spec(), model=ModelSpec(path="base", digest=blake3(base_of(spec().seed)).hexdigest()))

    async def scenario(swarm: FloodSwarm) -> None:
        for liar in swarm.members[1:3]:
            monkeypatch.setattr(liar, "_worker", lambda: OtherBase(step_s=0.2, start_s=0.5))
        swarm.bare = {3} if bare else set()
        first = swarm.members[0 if bare else 1 : 3]
        for member in first:
            member.start()
        await swarm.until("some steps", lambda: min(member.facts.step for member in first) >= 10)
        swarm.members[3].start()
        await swarm.until("all end", lambda: all(member.running is None for member in swarm.members))

    swarm = play(lambda: FloodSwarm(tmp_path, 4, named), scenario)
    honest = [swarm.members[3], *swarm.members[: int(bare)]]
    assert [member.failure for member in honest] == [None] * len(honest)
    assert {member.facts.state_hash for member in honest} == {swarm.central(without=(1, 2))}
    assert honest[0].counters["base_fetched"] == bare
