"""The flood over streams, in memory and over gRPC with TLS: links, repairs, late joiners, and peers that misbehave."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from peerloom.node.donor import manifest_of
from peerloom.node.flood_agreement import MAX_BACK, Agreement
from peerloom.node.flood_driver import FloodDriver
from peerloom.node.flood_join import ask_hash, fetch_state, pack
from peerloom.node.flood_log import FloodLog
from peerloom.node.identity import Identity, verify
from peerloom.protocol.codec_flood import FloodFrame, FloodWriter
from peerloom.protocol.errors import DigestMismatch, LimitExceeded, LinkError, MalformedMessage, ProtocolError
from peerloom.protocol.events import TimerFired
from peerloom.protocol.flood import FloodMachine
from peerloom.protocol.flood_events import Apply, FloodEffect, FloodEvent, PeersSeen, Received
from peerloom.protocol.flood_messages import Batch, HashQuery, Head, Segment, Segments, Snapshot
from peerloom.protocol.messages import FetchRequest, StateManifest, StateMessage, StatePiece
from peerloom.protocol.services import FLOOD
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord
from tests.unit.node.wire import RUN, Swarm
from tests.unit.protocol.flood_fabric import SPEC, signed

LAYOUT = "ab" * 32
OVERSIZED = FloodWriter().write(Segments((signed(Batch(Identity.generate().peer_id, 0, 0, (1,) * 1025), b""),))).data
WAIT_S = 20.0


class Node:
    """A driver on a transport; a PeerHandler whose state is the bytes of its messages."""

    def __init__(self, swarm: Swarm, folder: Path) -> None:
        self.identity = Identity.generate()
        self.peer_id = self.identity.peer_id
        self.swarm, self.folder = swarm, folder
        self.counts: Counter[str] = Counter()
        self.faults: list[tuple[PeerId, str]] = []
        self.records: dict[PeerId, PeerRecord] = {}
        self.blob: Callable[[bytes], bytes] = lambda blob: blob

    async def start(self) -> None:
        self.transport, self.record = await self.swarm.server(self, identity=self.identity)
        self.machine = FloodMachine(self.peer_id, SPEC, RUN, 1, sign=self.identity.sign, verify=verify)
        self.folder.mkdir()
        self.log = FloodLog(self.folder, RUN, self.peer_id)
        self.driver = FloodDriver(
            self.machine,
            self.peer_id,
            self.transport,
            self.swarm.clock,
            self.log,
            records=self.records.get,
            count=self._count,
            score=lambda peer, fault: self.faults.append((peer, fault)),
        )

    def _count(self, metric: str, amount: float) -> None:
        self.counts[metric] += int(amount)

    def see(self, *others: Node) -> None:
        self.records |= {other.peer_id: other.record for other in others}
        self.driver.feed(PeersSeen(tuple(self.records)))

    async def serve(self, service: Any, stream: Any) -> None:
        await self.driver.serve(stream)

    async def status(self) -> NodeStatus:
        return NodeStatus(record=self.record)

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        assert request.kind == "flood"
        data = self.blob(pack(self.machine.snapshot(), self.state()))
        yield manifest_of(data, round=0, step=0, layout=request.layout, held_out_loss=None)
        yield StatePiece(0, data)

    def state(self) -> bytes:
        return b"sums of %d" % self.machine.total()

    def applied(self) -> int:
        batches = [batch for change in self.driver.changes if isinstance(change, Apply) for batch in change.batches]
        return sum(len(batch.scalars) for batch in batches)

    async def answer(self) -> None:
        """Answers hash queries, as the trainer does between flushes."""
        while True:
            await self.driver.changed.wait()
            self.driver.changed.clear()
            for peer, query in list(self.driver.questions.items()):
                beyond = self.machine.beyond(query.heads)
                digest = b"" if beyond is None else hashlib.sha256(repr(len(beyond)).encode()).digest()
                self.driver.answer(peer, query.number, digest)

    async def stop(self) -> None:
        await self.driver.close()
        self.log.close()


@pytest.fixture(params=["memory", "grpc"])
async def swarm(request: pytest.FixtureRequest) -> AsyncIterator[Swarm]:
    made = Swarm(request.param)
    yield made
    await made.stop()
    await asyncio.sleep(0)


@pytest.fixture
async def nodes(swarm: Swarm, tmp_path: Path) -> AsyncIterator[list[Node]]:
    made = [Node(swarm, tmp_path / str(index)) for index in range(3)]
    for node in made:
        await node.start()
    yield made
    for node in made:
        await node.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  # what is waited for are counts, of which nothing tells
            await asyncio.sleep(0.005)


async def test_steps_of_all_reach_all_and_are_durable_before_they_leave(nodes: list[Node]) -> None:
    for node in nodes:
        node.see(*(other for other in nodes if other is not node))
    await until(lambda: all(node.machine.settled() for node in nodes))
    for flush in range(10):
        for node in nodes:
            await node.driver.own_steps(5 * flush, 5 * flush, (flush, -flush, 1, 2, 3))
    await until(lambda: all(node.machine.total() == 150 for node in nodes))
    await until(lambda: all(node.applied() == 100 for node in nodes))
    assert len({node.machine.versions() for node in nodes}) == 1
    for node in nodes:
        await node.stop()
        again = FloodMachine(node.peer_id, SPEC, RUN, 1, sign=node.identity.sign, verify=verify)
        log = FloodLog(node.folder, RUN, node.peer_id)
        again.restore(log.items)
        log.close()
        assert again.versions() == node.machine.versions()
        assert not node.faults


async def test_batches_that_come_close_together_are_judged_together_and_in_their_place(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = nodes
    one.see(two)
    await until(lambda: one.machine.settled() and two.machine.settled())
    two.driver.feed(PeersSeen((one.peer_id,)))
    came: list[int] = []
    handle = two.machine.handle

    def noting(event: FloodEvent, now: float) -> list[FloodEffect]:
        if isinstance(event, Received):
            came.append(len(event.body.segments) if isinstance(event.body, Segments) else 0)
        return handle(event, now)

    monkeypatch.setattr(two.machine, "handle", noting)
    monkeypatch.setattr("peerloom.node.flood_driver.GATHER_S", 3600.0)  # until something else comes, or enough
    link = one.driver._links[two.peer_id]
    for flush in range(4):
        await one.driver.own_steps(5 * flush, 5 * flush, (1, 2, 3, 4, 5))
        await link.idle.wait()
    one.driver.feed(TimerFired("repair"))
    await until(lambda: two.machine.total() == 20)
    assert came == [4, 0]
    await one.driver.own_steps(20, 20, (6,))
    await link.idle.wait()
    await link.stream.close()  # a node that ends says no more: what it said last still counts
    await until(lambda: two.machine.total() == 21)
    assert came == [4, 0, 1]
    assert not one.faults and not two.faults


@pytest.mark.parametrize("how", ["no longer a neighbour", "nothing can be sent", "another link takes its place"])
async def test_what_was_gathered_from_a_link_counts_however_the_link_ends(
    how: str, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = nodes
    two.see(one)
    await until(lambda: one.machine.settled() and two.machine.settled())
    one.driver.feed(PeersSeen((two.peer_id,)))
    await one.driver.own_steps(0, 0, (1,))
    await until(lambda: two.applied() == 1)
    monkeypatch.setattr("peerloom.node.flood_driver.GATHER_S", 3600.0)
    link = two.driver._links[one.peer_id]
    await one.driver.own_steps(1, 1, (2, 3))
    await until(lambda: bool(link.gathered))
    match how:
        case "no longer a neighbour":
            two.driver.feed(PeersSeen(()))
        case "nothing can be sent":

            async def fails(message: object) -> None:
                raise LinkError("over")

            monkeypatch.setattr(link.stream, "send", fails)
            await two.driver.own_steps(0, 0, (9,))
        case _:
            two.driver._forget(link)
    await until(lambda: two.machine._held(one.peer_id) == 3 and two.applied() == 3)
    assert link.gathering is None and not one.faults and not two.faults


async def test_frames_at_hand_when_a_link_is_closed_wait_for_nothing(nodes: list[Node]) -> None:
    one, two, _ = nodes
    two.see(one)
    await until(lambda: one.machine.settled() and two.machine.settled())
    link = two.driver._links[one.peer_id]
    two.driver._drop(one.peer_id, "forged")
    segment = Segment(Batch(one.peer_id, 0, 0, (1,)), bytes(64), b"")
    two.driver._gather(link, Segments((segment,)))
    assert not link.gathered and link.gathering is None


async def test_nobody_is_told_of_own_steps_before_they_are_durable(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = nodes
    one.see(two)
    await until(lambda: one.machine.settled() and two.machine.settled())
    durable = threading.Event()
    monkeypatch.setattr(one.log, "sync", lambda: durable.wait(WAIT_S))
    stepping = asyncio.create_task(one.driver.own_steps(0, 0, (1, 2)))
    await until(lambda: one.machine.total() == 2)
    asked = two.machine.handle(TimerFired("repair"), two.swarm.clock.monotonic())  # compares: what does one have?
    for effect in asked:
        two.driver._perform(effect)
    one.driver.feed(TimerFired("repair"))
    await until(lambda: one.driver._held is not None and len(one.driver._held) == 2)
    assert two.machine.behind() == two.machine.total() == 0
    durable.set()
    await stepping
    await until(lambda: two.machine.total() == 2)


async def test_two_that_dial_each_other_at_once_end_with_one_link(nodes: list[Node]) -> None:
    one, two, _ = nodes
    one.see(two)
    two.see(one)
    await until(lambda: one.machine.settled() and two.machine.settled())
    await one.driver.own_steps(0, 0, (1,))
    await two.driver.own_steps(0, 0, (2,))
    await until(lambda: one.machine.total() == two.machine.total() == 2)
    assert len(one.driver._links) == len(two.driver._links) == 1
    assert not one.faults and not two.faults


async def test_a_link_that_breaks_is_made_again_and_what_was_missed_is_asked_for(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerloom.node.flood_driver.RETRY_S", 0.05)
    one, two, _ = nodes
    one.see(two)
    await until(lambda: one.machine.settled())
    one.driver._forget(one.driver._links[two.peer_id])
    await one.driver.own_steps(0, 0, (1, 2, 3))
    two.driver.feed(PeersSeen((one.peer_id,)))
    await until(lambda: two.machine.total() == 3)


async def test_a_bug_in_a_link_s_task_is_told_and_not_met_again_and_again(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = nodes
    one.see(two)
    await until(lambda: one.machine.settled())
    handle = two.machine.handle

    def broken(event: FloodEvent, now: float) -> list[FloodEffect]:
        if isinstance(event, Received):
            raise ZeroDivisionError
        return handle(event, now)

    monkeypatch.setattr(two.machine, "handle", broken)
    await one.driver.own_steps(0, 0, (1,))
    await until(lambda: two.driver.failed is not None)
    assert isinstance(two.driver.failed, ZeroDivisionError) and two.driver.changed.is_set()
    assert one.driver.failed is None


@pytest.mark.parametrize(
    ("frame", "fault"),
    [
        (b"\xff\xff", "flood_malformed"),
        (b"", "flood_malformed"),
        (OVERSIZED, "flood_malformed"),
        ("forged", "flood_forged"),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_cut_off_with_the_reason_and_scored(
    nodes: list[Node], frame: bytes | str, fault: str
) -> None:
    node, origin = nodes[0], nodes[1]
    node.driver.feed(PeersSeen((origin.peer_id,)))
    stranger = Identity.generate()
    client = node.swarm.client(stranger)
    stream = await client.open(node.record, FLOOD)
    if isinstance(frame, str):
        segment = signed(Batch(origin.peer_id, 0, 0, (1,)), b"")
        sent = FloodWriter().write(Segments((replace(segment, prev=bytes(16)),)))
    else:
        sent = FloodFrame(frame)
    await stream.send(sent)
    with pytest.raises(ProtocolError):
        while await stream.receive() is not None:
            pass
    await stream.close()
    assert node.faults == [(stranger.peer_id, fault)]
    assert node.counts[fault.replace("flood_", "flood_refused_")] == 1
    assert node.machine.total() == 0 and not node.driver._links
    again = await client.open(node.record, FLOOD)
    with pytest.raises(LinkError, match="its last link was closed"):
        while await again.receive() is not None:
            pass
    await again.close()


async def test_a_late_joiner_gets_a_state_and_others_confirm_its_hash(nodes: list[Node]) -> None:
    one, two, late = nodes
    one.see(two)
    two.driver.feed(PeersSeen((one.peer_id,)))
    await one.driver.own_steps(0, 0, (1, 2, 3))
    await until(lambda: two.machine.total() == 3)
    fetched = await fetch_state(late.transport, one.record, LAYOUT, 1000)
    assert fetched.state == b"sums of 3" and late.machine.check(fetched.snapshot)
    await one.driver.own_steps(3, 3, (4, 5))
    await until(lambda: two.machine.total() == 5)
    answering = asyncio.create_task(two.answer())
    heads = [Head(mark.origin, mark.next, mark.chain) for mark in fetched.snapshot.marks]
    assert await ask_hash(late.transport, two.record, heads) == hashlib.sha256(b"1").digest()  # one batch beyond
    unknown = [Head(late.peer_id, 1, bytes(16))]
    assert await ask_hash(late.transport, two.record, unknown) == b""
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


async def test_a_neighbour_is_asked_for_a_hash_over_the_link_that_stands(nodes: list[Node]) -> None:
    """A stream for the question alone would be refused, or take the link's place."""
    one, two, _ = nodes
    one.see(two)
    two.driver.feed(PeersSeen((one.peer_id,)))
    await one.driver.own_steps(0, 0, (1, 2, 3))
    await until(lambda: two.machine.total() == 3)
    heads = one.machine.versions().heads
    answering = [asyncio.create_task(node.answer()) for node in (one, two)]
    for asker, asked in ((one, two), (two, one)):  # whoever opened it
        assert asker.driver.linked(asked.peer_id)
        assert await asker.driver.ask(asked.peer_id, heads) == hashlib.sha256(b"0").digest()
    two.driver.mute = True
    assert await one.driver.ask(two.peer_id, heads) == b""
    for task in answering:
        task.cancel()
    await asyncio.gather(*answering, return_exceptions=True)
    two.driver.mute = False
    assert one.counts["flood_links"] == two.counts["flood_links"] == 1 and not one.faults and not two.faults
    waiting = asyncio.create_task(one.driver.ask(two.peer_id, heads))
    await until(lambda: bool(two.driver.questions))
    await two.driver.close()
    with pytest.raises(LinkError, match="ended before the state hash came"):
        await waiting
    with pytest.raises(LinkError, match="no link"):
        await one.driver.ask(PeerId("nobody"), heads)


@pytest.mark.parametrize("beyond", [MAX_BACK, MAX_BACK + 1])
async def test_a_hash_so_far_back_that_it_costs_a_run_is_not_worked_out(beyond: int) -> None:
    worked = []

    async def state_hash(without: list[Batch]) -> bytes:
        worked.append(without)
        return b"hash"

    context: Any = SimpleNamespace(
        facts=None, clock=SimpleNamespace(monotonic=lambda: 0.0), spec=SimpleNamespace(seedflow=None)
    )
    agreement = Agreement(context, SimpleNamespace(state_hash=state_hash))  # type: ignore[arg-type]
    held: Any = SimpleNamespace(beyond=lambda heads: [Batch(PeerId("a"), 0, 0, (1,) * beyond)])
    agreement._machine = held
    answers: list[bytes] = []
    driver: Any = SimpleNamespace(questions={"b": HashQuery(1, ())}, answer=lambda *told: answers.append(told[-1]))
    await agreement._answer(driver)
    assert answers == ([b"hash"] if beyond == MAX_BACK else [b""]) and len(worked) == (beyond == MAX_BACK)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda blob: blob[:-1] + b"!", DigestMismatch),
        (lambda blob: b"\xff\xff\xff\x7f" + blob[4:], MalformedMessage),
        (lambda blob: blob[:5], MalformedMessage),
        (lambda blob: pack_of(b"x" * 2000), LimitExceeded),
    ],
)
async def test_a_state_that_is_not_what_it_says_is_refused(
    nodes: list[Node], change: Callable[[bytes], bytes], error: type[ProtocolError]
) -> None:
    donor, late, _ = nodes
    await donor.driver.own_steps(0, 0, (1,))
    donor.blob = change
    with pytest.raises(error):
        await fetch_state(late.transport, donor.record, LAYOUT, 1000)


def pack_of(state: bytes) -> bytes:
    return pack(Snapshot(()), state)


async def test_a_manifest_that_lies_about_its_pieces_is_refused(nodes: list[Node]) -> None:
    donor, late, _ = nodes
    data = b"x" * 10
    good = StateManifest("s", 0, 0, LAYOUT, 10, 1 << 20, (blake3(data).digest(),), None)
    for manifest, error in (
        (replace(good, layout="cd" * 32), MalformedMessage),
        (replace(good, total_bytes=1 << 28, piece_digests=(bytes(32),) * 256), LimitExceeded),
        (replace(good, piece_digests=(bytes(32),)), DigestMismatch),
    ):

        async def fetch(
            peer: PeerId, request: FetchRequest, manifest: StateManifest = manifest
        ) -> AsyncGenerator[StateMessage, None]:
            yield manifest
            yield StatePiece(0, data)

        donor.fetch = fetch  # type: ignore[method-assign]
        with pytest.raises(error):
            await fetch_state(late.transport, donor.record, LAYOUT, 1000)


async def test_a_neighbour_that_does_not_read_costs_bounded_memory(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = nodes
    one.see(two)
    await until(lambda: one.machine.settled())
    (link,) = one.driver._links.values()

    async def never(frame: FloodFrame) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(link.stream, "send", never)
    rng = random.Random(0)
    for flush in range(100):
        scalars = tuple(rng.randrange(9) for _ in range(1000))
        one.driver._put(two.peer_id, Segments((signed(Batch(one.peer_id, flush * 1000, flush * 1000, scalars), b""),)))
        await asyncio.sleep(0)
    assert one.driver._links[two.peer_id] is link
    assert len(link.segments) <= 1 << 16
    assert one.counts["flood_left_out"] >= 100_000 - (1 << 16) - 4096
