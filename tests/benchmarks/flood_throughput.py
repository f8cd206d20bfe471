"""SeedFlow's flood through one real node: verified, logged, passed on, and each copy dropped.

The node has a process of its own. Its neighbours share another: those that send, all of them the same messages, so that
all copies but one count as nothing, and one that receives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from peerloom.protocol.flood_messages import Segment, Segments
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import PeerId
from tests.benchmarks.ends import Ends, on_uvloop, received
from tests.benchmarks.flood_ends import FloodEnd, Origin, linked

BACKLOG = 32_000  # messages that a sender lets pile up
LONGEST_S = 60.0


async def throughput(
    spec: RunSpec, messages: int, *, clients: int, merged: bool, others: int = 1
) -> tuple[float, float]:
    """Messages a second through the node, and a second of its CPU.

    They come from one neighbour, and from `others` more. Merged: a neighbour sends as it would with a backlog, rows
    under their last signature. Else each flush comes with its own signature to check.
    """
    with Ends(_neighbours, [(spec, messages, clients, merged, 1 + others)]) as ends:
        sink, sources, ready = await asyncio.to_thread(lambda: ends.answers()[0])
        total = sum(ready.values())
        async with FloodEnd(spec) as node:
            node.machine._peers = frozenset(ready)
            node.records[sink.peer_id] = sink
            node.driver._relink((sink.peer_id,))
            await asyncio.to_thread(ends.turn, node.record)
            while not (node.machine.settled() and len(node.machine._links) == len(sources) + 1):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            incoming = [node.machine._links[source] for source in sources]
            for link in incoming:
                link.known |= ready  # as its version vector would say: nothing is pushed back to it
            began, cpu_began = time.perf_counter(), time.process_time()
            ends.tell([None])
            while any(link.agreed != ready for link in incoming):
                await asyncio.sleep(0.001)
                if time.perf_counter() > began + LONGEST_S:
                    raise RuntimeError(f"{node.machine.total()} of {total} messages came through: {node.counts}")
            rates = total / (time.perf_counter() - began), total / (time.process_time() - cpu_began)
            passed_on = (await asyncio.to_thread(ends.answers))[0]
            counts = node.counts
    copies = counts["flood_duplicates"]  # less those in a row of which a part was new
    if counts["flood_taken"] != total or passed_on != total or (others and not 0 < copies <= others * total):
        raise RuntimeError(f"each message counts once, its copies as such, and is passed on: {counts}, {passed_on}")
    return rates


def run(main: Coroutine[Any, Any, tuple[float, float]]) -> tuple[float, float]:
    """Runs it as the daemon would."""
    found: list[tuple[float, float]] = []

    async def keep() -> None:
        found.append(await main)

    on_uvloop(keep())
    return found[0]


def _neighbours(
    pipe: Connection[Any, Any], spec: RunSpec, messages: int, clients: int, merged: bool, sources: int
) -> None:
    """Sends the receiving neighbour's record, the senders' ids and how many messages there are of each origin.

    Then takes the node's record, links, answers; and, told to go, sends all, and answers with how many were passed on.
    """
    on_uvloop(_send(pipe, spec, messages, clients, merged, sources))


async def _send(
    pipe: Connection[Any, Any], spec: RunSpec, messages: int, clients: int, merged: bool, count: int
) -> None:
    origins = [Origin(spec, seed) for seed in range(clients)]
    flushes = messages // clients // spec.seedflow.flush_steps
    frames = [Segments(tuple(_bare(origin.segment(), at > 0) for origin in origins)) for at in range(flushes)]
    ends = {origin.peer_id: flushes * spec.seedflow.flush_steps for origin in origins}
    async with AsyncExitStack() as stack:
        *sources, sink = [await stack.enter_async_context(FloodEnd(spec)) for _ in range(count + 1)]
        for end in (*sources, sink):
            end.machine._peers = frozenset(ends)
        pipe.send((sink.record, [source.peer_id for source in sources], ends))
        node = await received(pipe)
        for source in sources:
            source.records[node.peer_id] = node
            source.driver._relink((node.peer_id,))
        await linked(*sources, sink)
        pipe.send(None)
        await received(pipe)
        for frame in frames:
            for source in sources:
                await _hand_over(source, node.peer_id, frame, merged=merged)
        while sink.machine.total() < sum(ends.values()):  # noqa: ASYNC110  # nothing tells of each message
            await asyncio.sleep(0.001)
        pipe.send(sink.machine.total())
        await received(pipe)  # until the benchmark is over


async def _hand_over(source: FloodEnd, to: PeerId, frame: Segments, *, merged: bool) -> None:
    """Queues segments on a link, and waits where too much piles up."""
    link = source.driver._links[to]
    if merged:
        source.driver._put(to, frame)
    else:
        link.bodies.append(frame)
        link.idle.clear()
        link.ready.set()
    if len(link.segments) > BACKLOG or len(link.bodies) > BACKLOG // _messages(frame):
        await link.idle.wait()


def _messages(frame: Segments) -> int:
    return sum(len(segment.batch.scalars) for segment in frame.segments)


def _bare(segment: Segment, follows: bool) -> Segment:
    return replace(segment, prev=b"") if follows else segment
