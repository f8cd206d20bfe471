"""One Stage.Run stream between neighbouring stages: tensors in and out, signs of life, and nothing on a peer's word.

What a tensor must look like, the spec says: its shape, its encoding and so its bytes. A frame that differs is refused
before anything is allocated for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from peerloom.node.payload import IncomingPayload, Pace, outgoing
from peerloom.node.seams import Clock, MessageStream
from peerloom.protocol import stage_events as events
from peerloom.protocol.errors import LinkError, MalformedMessage
from peerloom.protocol.messages import Chunk, PayloadEnd
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_pipeline import ActivationEncoding
from peerloom.protocol.stage_events import StageEvent
from peerloom.protocol.stage_messages import Activation, Beat, Credit, Gradient, Score, StageMessage
from peerloom.protocol.types import PeerId

Stream = MessageStream[StageMessage]
Arrived = Callable[["StageLink", StageEvent, bytearray | None], None]
EARLY_S = 1e-3


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What every activation and gradient of a run looks like."""

    shape: tuple[int, ...]
    encoding: ActivationEncoding
    total_bytes: int

    @classmethod
    def of(cls, spec: RunSpec, total_bytes: int) -> TensorForm:
        """The form of a run's tensors, `total_bytes` being the worker's slot."""
        rows, length = spec.train.batch_size // spec.pipeline.microbatches, spec.data.sequence_length
        item = 2 if spec.pipeline.encoding == "bf16" else 4
        return cls((rows, length, total_bytes // (rows * length * item)), spec.pipeline.encoding, total_bytes)

    def check(self, header: Activation | Gradient) -> None:
        """Raises MalformedMessage for a tensor of another form."""
        if header.shape != self.shape:
            raise MalformedMessage(f"{header.microbatch} has shape {header.shape}, this run's have {self.shape}")
        if header.encoding != self.encoding:
            raise MalformedMessage(f"{header.microbatch} comes in {header.encoding}, this run's in {self.encoding}")


@dataclass(frozen=True, slots=True)
class _Tensor:
    header: Activation | Gradient
    data: bytes


class StageLink:
    """Runs one stream until it ends; `upstream` says that the other end is of the stage before ours.

    `arrived` is called with every event, a tensor's bytes beside it, and when an answer has gone out; `waiting` is what
    our signs of life say.
    """

    def __init__(
        self,
        stream: Stream,
        form: TensorForm,
        clock: Clock,
        arrived: Arrived,
        waiting: Callable[[], bool],
        *,
        upstream: bool,
        heartbeat_s: float,
        dead_after_s: float,
    ) -> None:
        self.stream, self.upstream = stream, upstream
        self.over = False
        self._form, self._clock, self._arrived, self._waiting = form, clock, arrived, waiting
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._to_send: asyncio.Queue[StageMessage | _Tensor] = asyncio.Queue()
        self._heard_at = clock.monotonic()
        self._header: Activation | Gradient | None = None
        self._data = bytearray()
        self._incoming: IncomingPayload | None = None
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        return self.stream.peer

    def send(self, message: StageMessage) -> None:
        """Queues a small message."""
        self._to_send.put_nowait(message)

    def send_tensor(self, header: Activation | Gradient, data: bytes) -> None:
        """Queues a tensor; how many there may be, the machine's window and the credit that it gives say."""
        self._to_send.put_nowait(_Tensor(header, data))

    def cut(self, error: Exception) -> None:
        """Ends the link with an error that run() raises."""
        if not self._broken.done():
            self._broken.set_exception(error)

    async def run(self) -> None:
        """Reads, writes and beats until the stream is over; raises what ended it, LinkError or ProtocolError."""
        jobs = [asyncio.create_task(job()) for job in (self._read, self._write, self._beat)]
        try:
            await asyncio.wait((*jobs, self._broken), return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            for job in jobs:
                if job.done() and not job.cancelled():
                    job.result()
        finally:
            self.over = True
            self._broken.cancel()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, self._broken, return_exceptions=True)

    async def _read(self) -> None:
        while (message := await self.stream.receive()) is not None:
            self._heard_at = self._clock.monotonic()
            self._take(message)

    def _take(self, message: StageMessage) -> None:
        match message:
            case Activation() if self.upstream:
                self._begin(message)
            case Gradient() if not self.upstream:
                self._begin(message)
            case Chunk():
                self._expected().add(message)
            case PayloadEnd():
                self._expected().end(message)
                self._whole()
            case Score(microbatch, version, loss) if not self.upstream:
                self._arrived(self, events.ScoreReceived(self.peer, microbatch, version, loss), None)
            case Credit(count) if not self.upstream:
                self._arrived(self, events.CreditReceived(self.peer, count), None)
            case Beat(waiting):
                if not self.upstream:
                    self._arrived(self, events.DownstreamBeat(self.peer, waiting), None)
            case _:
                raise MalformedMessage(f"a {type(message).__name__} has no place here")

    def _begin(self, header: Activation | Gradient) -> None:
        if self._header is not None:
            raise MalformedMessage(f"{header.microbatch} begins within {self._header.microbatch}")
        self._form.check(header)
        self._header, self._data = header, bytearray(self._form.total_bytes)
        self._incoming = IncomingPayload(memoryview(self._data), self._form.encoding)

    def _expected(self) -> IncomingPayload:
        if self._incoming is None:
            raise MalformedMessage("a chunk belongs to no tensor")
        return self._incoming

    def _whole(self) -> None:
        header, data = self._header, self._data
        self._header = self._incoming = None
        if isinstance(header, Activation):
            event: StageEvent = events.ActivationReceived(self.peer, header.microbatch, header.version)
        else:
            assert header is not None  # ours: _expected raised otherwise
            event = events.GradientReceived(self.peer, header.microbatch, header.version, header.loss)
        self._arrived(self, event, data)

    async def _write(self) -> None:
        pace = Pace(self.stream.chunk_bytes)
        while True:
            item = await self._to_send.get()
            if isinstance(item, _Tensor):
                await self._write_tensor(item, pace)
            else:
                await self.stream.send(item)
            if self.upstream and isinstance(item, _Tensor | Score):
                self._arrived(self, events.AnswerSent(self.peer), None)

    async def _write_tensor(self, tensor: _Tensor, pace: Pace) -> None:
        await self.stream.send(tensor.header)
        for message in outgoing(memoryview(tensor.data), pace):
            began = self._clock.monotonic()
            await self.stream.send(message)
            pace.sent(self._clock.monotonic() - began)

    async def _beat(self) -> None:
        """Says that we live, and looks whether the other end does."""
        while (silent := self._clock.monotonic() - self._heard_at) < self._dead_after_s:
            if self._to_send.empty():
                self.send(Beat(self._waiting()))
            await asyncio.sleep(max(EARLY_S, min(self._heartbeat_s, self._dead_after_s - silent)))
        raise LinkError(f"nothing was heard for {self._dead_after_s:g} s")
