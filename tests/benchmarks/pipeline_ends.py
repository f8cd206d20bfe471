"""Two stages of a pipeline, each a real worker on a core of its own, linked over gRPC through a delaying proxy."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerloom.node.clock import SystemClock
from peerloom.node.grpc_transport import GrpcTransport
from peerloom.node.identity import Identity
from peerloom.node.seams import MessageStream
from peerloom.node.stage_driver import StageDriver, StageReports
from peerloom.node.stage_link import TensorForm
from peerloom.node.tls import make_certificate
from peerloom.node.worker.port import WorkerProcess
from peerloom.node.worker_seams import WorkerReady, WorkerSetup
from peerloom.protocol.messages import FetchRequest, StateMessage
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.services import STAGE, Service
from peerloom.protocol.spec_pipeline import Schedule
from peerloom.protocol.stage_messages import StageOpen, StageOpened
from peerloom.protocol.stages import StageMachine
from peerloom.protocol.types import NodeStatus, PeerRecord
from tests.benchmarks.delaying_proxy import DelayingProxy

WARM = 1  # updates of a turn before those that are measured
COOL: dict[Schedule, int] = {"async": 2, "sync": 0}  # and after: what keeps the pipeline full until they are made


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the time of a turn, for each stage: in commands of its worker by the clock, and in their CPU seconds."""

    clock: tuple[float, ...]
    cpu: tuple[float, ...]


class StageEnd:
    """One stage: its worker, pinned to `core`, its transport, and a driver for the measurement under way."""

    def __init__(self, spec: RunSpec, stage: int, folder: Path, core: int) -> None:
        self.spec, self.stage, self._folder, self._core = spec, stage, folder, core
        self.worker, self._clock, self._identity = WorkerProcess(), SystemClock(), Identity.generate()
        self._certificate = make_certificate(self._clock.wall())
        self.transport = GrpcTransport(
            identity=self._identity,
            certificate=self._certificate,
            run_id=spec.run_id,
            spec_hash=spec.spec_hash(),
            listen=("127.0.0.1", 0),
            clock=self._clock,
            rng=random.Random(stage),
        )
        self.version = 0
        self.spent = {"stage_busy_seconds": 0.0, "stage_cpu_seconds": 0.0}
        self.driver: StageDriver | None = None
        self.made, self.moved = asyncio.Event(), asyncio.Event()

    async def start(self) -> PeerRecord:
        """Starts worker and transport; returns the record to be dialled by."""
        ready = self.worker.start(
            WorkerSetup(
                spec=self.spec,
                peer_id=self._identity.peer_id,
                run_dir=self._folder / f"{self.spec.run_id}-{self.stage}",
                cache_dir=self._folder / "cache",
                threads=1,
                stage=self.stage,
            ),
            lambda what, share: None,
        )
        self.ready: WorkerReady = await ready
        assert self.worker.pid is not None
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.worker.pid, {self._core})
        addresses = await self.transport.start(self)
        return PeerRecord(
            peer_id=self._identity.peer_id,
            name=f"stage-{self.stage}",
            role="trainer",
            addresses=addresses,
            cert_der=self._certificate.der,
            version="0",
            instance="b",
            started_at=self._clock.wall(),
            issued_at=self._clock.wall(),
        )

    def begin(self, updates: int) -> StageDriver:
        """A fresh driver that makes `updates` more updates."""
        limit = self.version + updates
        machine = StageMachine(self.spec.pipeline, self.stage, first_version=self.version, lane=1, limit=limit)
        self.spent, self.made = dict.fromkeys(self.spent, 0.0), asyncio.Event()
        reports = StageReports(
            count=self._count, score=lambda peer, fault: None, trained=self._trained,
            evaluated=lambda loss: None, saved=lambda outcome: None,
        )  # fmt: skip
        form = TensorForm.of(self.spec, self.ready.payload_bytes)
        self._limit = limit
        self.driver = StageDriver(machine, self.worker, self._clock, self.spec, form, reports)
        return self.driver

    def computed(self) -> tuple[float, float]:
        """Seconds so far of this driver's commands, the one under way included, and CPU seconds of those done."""
        under_way = self.driver.computing_s if self.driver is not None else 0.0
        return self.spent["stage_busy_seconds"] + under_way, self.spent["stage_cpu_seconds"]

    def _count(self, metric: str, amount: float) -> None:
        self.spent[metric] += amount

    def _trained(self, update: int, loss: float) -> None:
        self.version = update + 1
        self.moved.set()
        if self.version == self._limit:
            self.made.set()

    async def serve(self, service: Service[Any], stream: MessageStream[Any]) -> None:
        """The link from the stage before."""
        opening = await stream.receive()
        assert isinstance(opening, StageOpen) and self.driver is not None
        await self.driver.serve_upstream(stream)

    async def status(self) -> NodeStatus:
        raise NotImplementedError

    async def fetch(self, peer: object, request: FetchRequest) -> AsyncGenerator[StateMessage, None]:
        raise NotImplementedError
        yield

    async def stop(self) -> None:
        """Frees everything."""
        await self.transport.stop()
        await self.worker.stop()


@dataclass
class StagePair:
    """Both stages of a run, whose workers keep what its schedule needs, and the link between them."""

    spec: RunSpec
    folder: Path

    async def __aenter__(self) -> StagePair:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self.ends = [StageEnd(self.spec, stage, self.folder, cores[stage % len(cores)]) for stage in (0, 1)]
        _, record = await asyncio.gather(*(end.start() for end in self.ends))
        self.proxy = DelayingProxy(record.addresses[0])
        await self.proxy.start()
        self.record = replace(record, addresses=(self.proxy.address,))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(end.stop() for end in self.ends))
        await self.proxy.stop()

    async def turn(self, delay_s: float, updates: int) -> Shares:
        """How much of the time each stage's worker computed, from a warm pipeline on."""
        self.proxy.delay_s = delay_s
        drivers = [end.begin(WARM + updates + COOL[self.spec.pipeline.schedule]) for end in self.ends]
        running = [asyncio.create_task(driver.run()) for driver in drivers]
        stream = await self.ends[0].transport.open(self.record, STAGE)
        await stream.send(StageOpen("run", 1))
        assert isinstance(await stream.receive(), StageOpened)
        linked = asyncio.create_task(drivers[0].serve_downstream(stream))
        try:
            return await self._measure(updates)
        finally:
            await stream.close()
            for task in (*running, linked):
                task.cancel()
            await asyncio.gather(*running, linked, return_exceptions=True)

    async def _measure(self, updates: int) -> Shares:
        """Over `updates` of the last stage, from a warm pipeline to one that still has work before it."""
        last = self.ends[-1]
        await self._until(last, last.version + WARM)
        began, before = time.perf_counter(), [end.computed() for end in self.ends]
        await self._until(last, last.version + updates)
        elapsed, after = time.perf_counter() - began, [end.computed() for end in self.ends]
        clock, cpu = (
            tuple((now[by] - then[by]) / elapsed for now, then in zip(after, before, strict=True)) for by in (0, 1)
        )
        await asyncio.gather(*(end.made.wait() for end in self.ends))
        return Shares(clock, cpu)

    @staticmethod
    async def _until(end: StageEnd, version: int) -> None:
        while end.version < version:
            end.moved.clear()
            await end.moved.wait()


