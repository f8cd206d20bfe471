"""SeedFlow's flood: messages a second through one node, and what crosses an edge at the paper's setting.

The paper's setting: 16 clients on a ring, 5,000 steps each, a flush every 5 steps; it reports 400 KB an edge. Scalars
are uniform over all that the spec allows, so that each takes the most bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from peerloom.node import flood_driver
from peerloom.node.flood_driver import GATHER_S
from peerloom.node.identity import Identity, verify
from peerloom.protocol.codec_flood import FloodWriter
from peerloom.protocol.events import TimerFired
from peerloom.protocol.flood import TIMER, FloodMachine
from peerloom.protocol.flood_events import LinkUp, PeersSeen, Received, Send, StepsDone
from peerloom.protocol.flood_messages import Segments
from peerloom.protocol.limits import MAX_SEGMENT
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_seedflow import SeedflowSpec
from tests.benchmarks import flood_throughput
from tests.benchmarks.flood_ends import CountingRelay, FloodEnd, Origin, linked
from tests.benchmarks.flood_throughput import run
from tests.benchmarks.rows import Row, main, median

CLIENTS, STEPS, FLUSH = 16, 5000, 5
PAPER_BYTES = 400_000.0
WIRE_BYTES = 4_000_000.0
STEP_S = 3.5  # of a 135 M model on a core: what a comparison every 30 s is set against
REPAIR_S = 30.0
CUTS = 5  # connections broken over the run
RETRY_S = 0.1  # before one is made again: a node's own 5 s are only waited, and would be most of a short run
THROUGHPUT = 50_000.0
PING_EVERY_S = 10.0  # a relayed link's keepalives; a direct one's are every 20 s
PING_BYTES = 2 * (9 + 8 + 5 + 1 + 16)  # a PING and its answer (RFC 9113, 6.7), each in a TLS record (RFC 8446, 5.2)


def spec_of(steps: int = STEPS, **changes: Any) -> RunSpec:
    """The paper's setting; no rate limit, since time is compressed."""
    table = {"max_steps": steps, "flush_steps": FLUSH, "rate_limit": 1e9, "rate_burst": 10**9, "neighbours": 2}
    return RunSpec(method="seedflow", seedflow=SeedflowSpec(**{**table, **changes}))


# payload


def payload_bytes(steps: int) -> float:
    """The worst edge of a whole ring of machines: bytes of batches without signatures, whatever crosses twice included.

    Signatures are left out of the simulation, since nobody lies in it.
    """
    spec, rng = spec_of(steps), random.Random(1)
    peers = [Identity.generate().peer_id for _ in range(CLIENTS)]
    machines = [
        FloodMachine(
            peer, spec.seedflow, spec.run_id, 1, sign=lambda data: bytes(64), verify=lambda peer, data, signature: True
        )
        for peer in peers
    ]
    ring = {(a, (a + side) % CLIENTS) for a in range(CLIENTS) for side in (1, -1)}
    writers = {pair: FloodWriter() for pair in ring}
    wires: deque[tuple[int, int, Any]] = deque()
    index = {peer: place for place, peer in enumerate(peers)}

    def feed(place: int, event: Any) -> None:
        for effect in machines[place].handle(event, 0.0):
            if isinstance(effect, Send):
                to = index[effect.peer]
                writers[(place, to)].write(effect.body)
                wires.append((place, to, effect.body))

    def run() -> None:
        while wires:
            source, target, body = wires.popleft()
            feed(target, Received(peers[source], body))

    for place in range(CLIENTS):
        feed(place, PeersSeen(tuple(peers)))
    for source, target in sorted(ring):
        feed(source, LinkUp(peers[target]))
    run()
    limit = spec.seedflow.scalar_limit()
    for step in range(0, steps, FLUSH):
        for place in rng.sample(range(CLIENTS), CLIENTS):
            feed(place, StepsDone(step, step, tuple(rng.randint(-limit, limit) for _ in range(FLUSH))))
            if rng.random() < 0.7:  # some are under way while others are made
                run()
        run()
    assert {machine.total() for machine in machines} == {CLIENTS * steps}, "the ring did not agree"
    return float(max(writers[(a, b)].payload + writers[(b, a)].payload for a, b in ring))


# wire


async def wire_bytes(steps: int) -> tuple[float, float]:
    """All bytes of one edge of the ring over TCP, and the payload among them.

    Two real nodes hold the edge; what the rest of the ring would bring comes to each from its other neighbour, batch by
    batch, each sent before the next comes. One origin of eight on either side is the other's antipode: it comes to both
    ends from elsewhere at once, and crosses twice.
    """
    with patch.object(flood_driver, "RETRY_S", RETRY_S):
        return await _wire_bytes(spec_of(steps), steps)


async def _wire_bytes(spec: RunSpec, steps: int) -> tuple[float, float]:
    left, right = ([Origin(spec, seed) for seed in range(base, base + CLIENTS // 2)] for base in (0, 100))
    async with FloodEnd(spec) as one, FloodEnd(spec) as two, CountingRelay(two.record.addresses[0]) as relay:
        far = Identity.generate().peer_id
        others = (*(origin.peer_id for origin in left + right), far)
        async with CountingRelay(one.record.addresses[0]) as back:
            one.records[two.peer_id] = replace(two.record, addresses=(relay.address,))
            two.records[one.peer_id] = replace(one.record, addresses=(back.address,))
            for end in (one, two):
                end.driver._relink(())  # the ring of these two alone, whatever the overlay of all would be
                end.machine._peers = frozenset(others)
            one.driver._relink((two.peer_id,))
            await linked(one, two)
            for end in (one, two):
                end.driver.feed(LinkUp(far))
            repairs = steps * STEP_S / REPAIR_S
            done, due = 0, 0.0
            for flush in range(steps // FLUSH):
                for ends, origins in (((one, two), left), ((two, one), right)):
                    for place, origin in enumerate(origins):
                        segment = origin.segment()
                        ends[0].driver.feed(Received(far, Segments((segment,))))
                        if place == 0:
                            ends[1].driver.feed(Received(far, Segments((segment,))))
                        await ends[0].driver.flush(30)
                while due < (flush + 1) / (steps // FLUSH) * repairs:
                    due += 1
                    for end in (one, two):
                        end.clock.skip(REPAIR_S)
                        end.driver.feed(TimerFired(TIMER))
                if flush // max(1, steps // FLUSH // CUTS) > done:
                    done += 1
                    relay.cut()
                    while one.machine.settled():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    await linked(one, two)
            total = CLIENTS * steps
            while one.machine.total() < total or two.machine.total() < total:
                await asyncio.sleep(0.05)
                for end in (one, two):
                    end.clock.skip(REPAIR_S)
                    end.driver.feed(TimerFired(TIMER))
            payload = one.counts["flood_payload_bytes"] + two.counts["flood_payload_bytes"]
            return float(relay.bytes + back.bytes), float(payload)


def ping_bytes(steps: int) -> float:
    """What the pings of both sides add over so many steps in real time, which `wire_bytes` compresses.

    More than there are: a side asks only where nothing has come for so long.
    """
    return 2 * steps * STEP_S / PING_EVERY_S * PING_BYTES


# throughput


def throughput(messages: int, *, merged: bool, others: int = 1) -> tuple[float, float]:
    """Messages a second through a real node, and a second of its CPU; from `1 + others` neighbours, on to another."""
    spec = spec_of(max(STEPS, messages))
    return run(flood_throughput.throughput(spec, messages, clients=CLIENTS, merged=merged, others=others))


def verify_us() -> float:
    """Microseconds of one Ed25519 check."""
    identity = Identity.generate()
    data = bytes(80)
    signature = identity.sign(data)
    began = time.perf_counter()
    for _ in range(2000):
        assert verify(identity.peer_id, data, signature)
    return (time.perf_counter() - began) / 2000 * 1e6


def steps_of(quick: bool) -> int:
    """Of each client: all of the paper's, over real sockets too, or a tenth, scaled."""
    return STEPS // 10 if quick else STEPS


def rows(*, quick: bool, payload: float | None = None) -> list[Row]:
    """The rows of the flood; `payload` is what `payload_bytes` gave."""
    steps = steps_of(quick)
    setting = f"{CLIENTS} clients, ring, {STEPS} steps, a flush every {FLUSH}"
    if quick:
        setting += f"; measured over {steps} steps and scaled"
    scale = STEPS / steps
    payload = (payload_bytes(steps) if payload is None else payload) * scale
    wire, _ = asyncio.run(wire_bytes(steps))
    repeat = 1 if quick else 3
    messages = 40_000 if quick else 80_000
    rates, single = [], []
    for _ in range(repeat):
        rates.append(throughput(messages, merged=True))
        single.append(throughput(messages, merged=False))
    per_flush = median([wall for wall, _ in single])
    node = (
        "a node over gRPC, each message from two neighbours and on to a third, who share another process: "
        "verified, logged, copies dropped"
    )
    return [
        Row(
            name="payload_bytes_per_edge", value=payload, unit="B", baseline="the paper's figure",
            baseline_value=PAPER_BYTES,
            setting=f"{setting}; batches without signatures, duplicates counted, the worst edge",
        ),
        Row(
            name="wire_bytes_per_edge", value=wire * scale + ping_bytes(STEPS), unit="B", baseline="the aim",
            baseline_value=WIRE_BYTES,
            setting=f"{setting}; TCP bytes both ways: gRPC, TLS, signatures, version vectors for {STEP_S} s a step, "
            f"{CUTS} broken connections; {ping_bytes(STEPS) / 1e3:.0f} kB of them are computed: a ping and its answer, "
            f"{PING_BYTES} bytes, from each side every {PING_EVERY_S:.0f} s of {STEPS * STEP_S:.0f} s",
        ),
        Row(
            name="flood_messages_per_s", value=median([wall for wall, _ in rates]), unit="messages/s",
            baseline="the aim", baseline_value=THROUGHPUT,
            setting=f"{node}; a backlog: signatures are of segments that its sender merged, up to {MAX_SEGMENT} "
            f"messages each; {per_flush:.0f} a second where each flush of {FLUSH} has its own",
        ),
        Row(
            name="flood_messages_per_cpu_s", value=median([cpu for _, cpu in rates]), unit="messages/s",
            baseline="the aim", baseline_value=THROUGHPUT,
            setting="the same, a second of the node's CPU time: what else the machine does is left out",
        ),
        Row(
            name="flood_messages_per_s_unmerged", value=per_flush, unit="messages/s",
            baseline="the aim", baseline_value=THROUGHPUT,
            setting=f"{node}; each flush of {FLUSH} under its own signature, as live ones come; those that come within "
            f"{GATHER_S * 1000:.0f} ms are judged by their last one: a check of each would allow "
            f"{FLUSH / (verify_us() / 1e6):.0f}",
        ),
        Row(
            name="flood_messages_per_cpu_s_unmerged", value=median([cpu for _, cpu in single]), unit="messages/s",
            baseline="the aim", baseline_value=THROUGHPUT, setting="the same, a second of the node's CPU time",
        ),
    ]  # fmt: skip


def measure(arguments: argparse.Namespace) -> Sequence[Row]:
    return rows(quick=arguments.quick)


if __name__ == "__main__":
    main(__doc__ or "", lambda arguments: list(measure(arguments)))
