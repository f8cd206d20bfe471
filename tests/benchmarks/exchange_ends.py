"""The processes of the exchange benchmark: the product's, bare grpc's and hivemind's.

Each answers a number of rounds with the seconds each of them took, from the end of the one before.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from peerloom.node.clock import SystemClock
from peerloom.node.gossip_driver import GossipDriver
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import Identity
from peerloom.node.tls import make_certificate
from peerloom.node.worker.memory import BlockLayout, SharedBlock, anonymous_file
from peerloom.node.worker.port import WorkerProcess
from peerloom.protocol.effects import FinishRound
from peerloom.protocol.events import PeersChanged, PeerSeen, RoundStarted
from peerloom.protocol.gossip import GossipMachine
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import Encoding, NodeStatus, PeerId, PeerRecord
from tests.benchmarks.ends import on_uvloop, received

ITEM_BYTES: dict[Encoding, int] = {"fp32": 4, "bf16": 2}
MATCH_TIMEOUT_S = 120.0  # a stall of a busy machine must not break a measured exchange
LAYOUT = "00" * 32
FILL = 0.5  # a parameter: both encodings hold it


class StubWorker(WorkerProcess):
    """A WorkerPort with parameters in the shared memory of a real one, and no process."""

    def __init__(self, numel: int, encoding: Encoding) -> None:
        super().__init__()
        layout = BlockLayout(numel, numel * ITEM_BYTES[encoding], own_outbox=encoding != "fp32")
        self._block = SharedBlock(anonymous_file(), layout, create=True)
        out = self._block.view("outbox")
        values = np.frombuffer(out, dtype="<f4" if encoding == "fp32" else "<u2")
        values[:] = FILL if encoding == "fp32" else np.float32(FILL).view(np.uint32) >> 16


class ProductEnd:
    """One node without training: its own transport, gossip machine and driver; a PeerHandler."""

    def __init__(self, numel: int, encoding: Encoding) -> None:
        spec, self._identity, self._clock = RunSpec(), Identity.generate(), SystemClock()
        self._certificate = make_certificate(self._clock.wall())
        self._transport = GrpcTransport(
            identity=self._identity,
            certificate=self._certificate,
            run_id=spec.run_id,
            spec_hash=spec.spec_hash(),
            clock=self._clock,
            rng=random.Random(0),
        )
        self._numel, self._encoding, self._spec = numel, encoding, spec
        self._partner: PeerRecord | None = None
        self._round = 0
        self._counted: dict[str, float] = {}

    async def serve(self, service: Any, stream: Any) -> None:
        await self._driver.serve(stream)

    async def status(self) -> NodeStatus:
        raise NotImplementedError("nobody asks in this benchmark")

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        nothing: tuple[StateMessage, ...] = ()
        for message in nothing:
            yield message

    async def start(self) -> PeerRecord:
        """Listens; returns this end's record."""
        addresses = await self._transport.start(self)
        now = self._clock.wall()
        return PeerRecord(
            peer_id=self._identity.peer_id,
            name="end",
            role="trainer",
            addresses=addresses,
            cert_der=self._certificate.der,
            version="0",
            instance="00",
            started_at=now,
            issued_at=now,
        )

    def meet(self, partner: PeerRecord) -> None:
        """Builds memory, machine and driver, and sees the one partner."""
        worker = StubWorker(self._numel, self._encoding)
        gasloc = replace(self._spec.gasloc, encoding=self._encoding, match_timeout_s=MATCH_TIMEOUT_S)
        payload_bytes = len(worker.outbox())
        rng = random.Random(self._identity.peer_id)
        machine = GossipMachine(self._identity.peer_id, gasloc, self._spec.seed, rng, LAYOUT, payload_bytes)
        self._driver = GossipDriver(
            machine,
            self._transport,
            worker,
            self._clock,
            layout=LAYOUT,
            encoding=self._encoding,
            records=lambda _: partner,
            count=self._count,
            score=lambda peer, fault: None,
        )
        self._driver.feed(PeersChanged((PeerSeen(partner.peer_id, 0),)))

    def _count(self, metric: str, amount: float) -> None:
        self._counted[metric] = self._counted.get(metric, 0.0) + amount

    async def round(self) -> None:
        """One committed exchange; raises RuntimeError when it was not."""
        self._driver.feed(RoundStarted(self._round))
        ended: FinishRound = await self._driver.exchange_round(self._round)
        if ended.partner is None:
            raise RuntimeError(f"round {self._round} had no exchange: {ended.reason}; counted: {self._counted}")
        self._round += 1

    async def stop(self) -> None:
        """Frees the transport."""
        await self._driver.close()
        await self._transport.stop()


def product(pipe: Connection[Any, Any], numel: int, encoding: Encoding) -> None:
    """Sends its record, takes the partner's, sends the peak memory of its first exchange, then answers turns."""
    on_uvloop(_product(pipe, numel, encoding))


async def _product(pipe: Connection[Any, Any], numel: int, encoding: Encoding) -> None:
    end = ProductEnd(numel, encoding)
    try:
        pipe.send(await end.start())
        end.meet(await received(pipe))
        pipe.send(None)
        await received(pipe)
        before = reset_peak()
        await end.round()
        pipe.send(peak_rss() - before)
        await answer_turns(pipe, end.round)
    finally:
        await end.stop()


async def answer_turns(pipe: Connection[Any, Any], one_round: Callable[[], Awaitable[None]]) -> None:
    """For each number received: so many rounds, and the seconds of all but the first, in which the ends meet."""
    while True:
        times = []
        for _ in range(await received(pipe)):
            await one_round()
            times.append(time.perf_counter())
        pipe.send([after - before for before, after in zip(times, times[1:], strict=False)])


def reset_peak() -> int:
    """Starts the peak of this process's resident memory anew; returns what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_rss() -> int:
    """The peak since `reset_peak`, in bytes."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# --- bare grpc

BARE_METHOD = "/bare.Bare/Both"
MESSAGE = 1 << 20


def bare_server(pipe: Connection[Any, Any], payload_bytes: int) -> None:
    """Sends its port and certificate, then answers turns, in step with the client."""
    on_uvloop(_bare_server(pipe, payload_bytes))


async def _bare_server(pipe: Connection[Any, Any], payload_bytes: int) -> None:
    import grpc

    message, count = bytes(range(256)) * (MESSAGE // 256), -(-payload_bytes // MESSAGE)

    async def both(_: object, context: Any) -> None:
        await _send_and_take(context, message, count)

    certificate = make_certificate(time.time())
    server = grpc.aio.server()
    _, service, name = BARE_METHOD.split("/")
    handler: Any = grpc.stream_stream_rpc_method_handler(_as_method(both))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.certificate_pem)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        pipe.send((port, certificate.der))
        while True:
            await received(pipe)
            pipe.send([])  # the client has the figures
    finally:
        await server.stop(None)


def _as_method(both: Callable[[object, Any], Awaitable[None]]) -> Callable[[object, Any], Awaitable[None]]:
    async def method(request_iterator: object, context: Any) -> None:
        await both(request_iterator, context)

    return method


def bare_client(pipe: Connection[Any, Any], payload_bytes: int) -> None:
    """Takes the server's port and certificate, then answers turns: each round is one bidirectional call."""
    on_uvloop(_bare_client(pipe, payload_bytes))


async def _bare_client(pipe: Connection[Any, Any], payload_bytes: int) -> None:
    import grpc

    from peerloom.node.tls import TARGET_NAME, pinned_pem

    message, count = bytes(range(256)) * (MESSAGE // 256), -(-payload_bytes // MESSAGE)
    port, der = await received(pipe)
    credentials = grpc.ssl_channel_credentials(root_certificates=pinned_pem(der))
    options = (("grpc.ssl_target_name_override", TARGET_NAME),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:

        async def one_call() -> None:
            call: Any = channel.stream_stream(BARE_METHOD)()
            await _send_and_take(call, message, count)
            await call.done_writing()
            await call.code()

        await one_call()
        await answer_turns(pipe, one_call)


async def _send_and_take(stream: Any, message: bytes, count: int) -> None:
    async def send() -> None:
        for _ in range(count):
            await stream.write(message)

    async def take() -> None:
        for _ in range(count):
            await stream.read()

    await asyncio.gather(send(), take())


# --- hivemind


def hivemind_pair(pipe: Connection[Any, Any], numel: int) -> None:
    """Two DecentralizedAverager, each with processes of its own; a round is timed from its trigger, matched before."""
    os.environ["HIVEMIND_LOGLEVEL"] = "ERROR"
    multiprocessing.set_start_method("fork", force=True)  # an averager cannot be pickled
    import torch
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager

    host = ["/ip4/127.0.0.1/tcp/0"]
    first = DHT(start=True, host_maddrs=host)
    second = DHT(start=True, host_maddrs=host, initial_peers=[str(each) for each in first.get_visible_maddrs()])
    averagers = [
        DecentralizedAverager(
            [torch.full((numel,), FILL)],
            dht,
            start=True,
            prefix="exchange",
            target_group_size=2,
            min_matchmaking_time=1.0,
            request_timeout=0.5,
            allow_state_sharing=False,
        )
        for dht in (first, second)
    ]
    try:
        _average(averagers)
        pipe.send(None)
        while True:
            pipe.send([_average(averagers) for _ in range(pipe.recv())][1:])
    finally:
        for averager in averagers:
            averager.shutdown()
        second.shutdown()
        first.shutdown()


def _average(averagers: list[Any]) -> float:
    from hivemind.averaging.control import AveragingStage
    from hivemind.utils import get_dht_time

    controls = [
        averager.step(wait=False, require_trigger=True, scheduled_time=get_dht_time() + 1.0, timeout=60.0)
        for averager in averagers
    ]
    while any(control.stage is not AveragingStage.AWAITING_TRIGGER for control in controls):
        time.sleep(0.005)  # its control has nothing to wait on
    began = time.perf_counter()
    for control in controls:
        control.allow_allreduce()
    for control in controls:
        control.result()
    return time.perf_counter() - began
