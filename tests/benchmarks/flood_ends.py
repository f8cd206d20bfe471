"""The ends of the flood benchmark: nodes without a worker, over real sockets, and a relay that counts what crosses."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from peerloom.node.clock import SystemClock
from peerloom.node.flood_driver import FloodDriver
from peerloom.node.flood_log import FloodLog
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import Identity, verify
from peerloom.node.tls import make_certificate
from peerloom.protocol.flood import FloodMachine
from peerloom.protocol.flood_events import PeersSeen
from peerloom.protocol.flood_messages import Batch, Segment, first_chain, fold, signed_bytes
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.types import NodeStatus, PeerId, PeerRecord

COPY_BYTES = 1 << 16


class RunClock(SystemClock):
    """The machine's clock plus what a benchmark skips, since it takes no steps: a run of hours lasts minutes."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def skip(self, seconds: float) -> None:
        """Goes on so much."""
        self._ahead_s += seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead_s


class Origin:
    """A node that only makes messages: full-size scalars, the worst case for the wire."""

    def __init__(self, spec: RunSpec, seed: int) -> None:
        self._table, self._rng = spec.seedflow, random.Random(seed)
        self._run_id = spec.run_id
        self._identity = Identity.generate()
        self.peer_id = self._identity.peer_id
        self._chain = first_chain(self._run_id, self.peer_id)
        self._next = 0

    def segment(self) -> Segment:
        """The next flush, signed."""
        limit, count = self._table.scalar_limit(), self._table.flush_steps
        scalars = tuple(self._rng.randint(-limit, limit) for _ in range(count))
        batch, prev = Batch(self.peer_id, self._next, self._next, scalars), self._chain
        self._chain, self._next = fold(prev, batch), batch.end
        data = signed_bytes(self._run_id, self.peer_id, batch.end, batch.end_step, self._chain)
        return Segment(batch, self._identity.sign(data), prev)


class FloodEnd:
    """One node that floods and trains nothing; a PeerHandler and an async context manager."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec, self._identity, self._clock = spec, Identity.generate(), SystemClock()
        self.peer_id = self._identity.peer_id
        self._certificate = make_certificate(self._clock.wall())
        self._transport = GrpcTransport(
            identity=self._identity,
            certificate=self._certificate,
            run_id=spec.run_id,
            spec_hash=spec.spec_hash(),
            clock=self._clock,
            rng=random.Random(0),
        )
        self._folder = tempfile.TemporaryDirectory()
        self.clock = RunClock()  # the flood's alone
        self.records: dict[PeerId, PeerRecord] = {}
        self.counts: Counter[str] = Counter()
        self.machine = FloodMachine(
            self.peer_id, spec.seedflow, spec.run_id, spec.seed, sign=self._identity.sign, verify=verify
        )
        self._log = FloodLog(Path(self._folder.name), spec.run_id, self.peer_id)
        self.driver = FloodDriver(
            self.machine,
            self.peer_id,
            self._transport,
            self.clock,
            self._log,
            records=self.records.get,
            count=self._count,
            score=self._score,
        )

    def _count(self, metric: str, amount: float) -> None:
        self.counts[metric] += int(amount)

    def _score(self, peer: PeerId, fault: str) -> None:
        raise AssertionError(f"nobody is at fault in this benchmark: {fault}")

    async def __aenter__(self) -> FloodEnd:
        addresses = await self._transport.start(self)
        now = self._clock.wall()
        self.record = PeerRecord(
            peer_id=self.peer_id,
            name="end",
            role="trainer",
            addresses=addresses,
            cert_der=self._certificate.der,
            version="0",
            instance="00",
            started_at=now,
            issued_at=now,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.driver.close()
        await self._transport.stop()
        self._log.close()
        self._folder.cleanup()

    async def serve(self, service: Any, stream: Any) -> None:
        await self.driver.serve(stream)

    async def status(self) -> NodeStatus:
        raise NotImplementedError("nobody asks in this benchmark")

    async def fetch(self, peer: PeerId, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        nothing: tuple[StateMessage, ...] = ()
        for message in nothing:
            yield message

    def see(self, *records: PeerRecord, others: tuple[PeerId, ...] = ()) -> None:
        """These are the nodes it may link with; `others` are there and cannot be dialled."""
        self.records |= {record.peer_id: record for record in records}
        self.driver.feed(PeersSeen((*self.records, *others)))


async def linked(*ends: FloodEnd) -> None:
    """Waits until each end has heard a neighbour's version vector."""
    while not all(end.machine.settled() for end in ends):  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.01)


class CountingRelay:
    """Forwards one TCP port to another and counts the bytes both ways: TLS, HTTP/2 and all that is inside."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self.bytes = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> CountingRelay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Breaks all connections, as a bad network does."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(self._host, self._port)
        both = {writer, inner_writer}
        self._writers |= both
        await asyncio.gather(self._copy(reader, inner_writer), self._copy(inner_reader, writer))
        self._writers -= both

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(COPY_BYTES):
                self.bytes += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # cut
        finally:
            writer.close()
