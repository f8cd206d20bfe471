"""What a neighbour may not send, over a stream that never touches a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from peerloom.node.clock import SystemClock
from peerloom.node.payload import Pace, outgoing
from peerloom.node.stage_link import StageLink, TensorForm
from peerloom.protocol import stage_events as events
from peerloom.protocol.errors import BadPayload, DigestMismatch, LinkError, MalformedMessage, ProtocolError
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.messages import Chunk, PayloadEnd
from peerloom.protocol.stage_events import StageEvent
from peerloom.protocol.stage_messages import (
    Activation,
    Beat,
    Copy,
    Credit,
    Gradient,
    Score,
    StageMessage,
    StageOpen,
)
from peerloom.protocol.types import PeerId

PEER = PeerId("peer")
FORM = TensorForm((2, 16, 64), "fp32", 2 * 16 * 64 * 4)
MB = Microbatch(0, 3)
GOOD = np.arange(2 * 16 * 64, dtype=np.float32).tobytes()


class FakeStream:
    """One end of a stream whose other end is the test."""

    peer = PEER
    chunk_bytes = 4096

    def __init__(self, *incoming: StageMessage) -> None:
        self.sent: list[StageMessage] = []
        self._incoming = list(incoming)

    async def send(self, message: StageMessage) -> None:
        self.sent.append(message)

    async def receive(self) -> StageMessage | None:
        if self._incoming:
            return self._incoming.pop(0)
        await asyncio.sleep(0)
        return None

    async def close(self) -> None:
        return


def tensor(header: Activation | Gradient, data: bytes = GOOD) -> list[StageMessage]:
    return [header, *outgoing(memoryview(data), Pace())]


def header(**fields: object) -> Activation:
    return Activation(**{"microbatch": MB, "version": 0, "shape": FORM.shape, "encoding": "fp32", **fields})  # type: ignore[arg-type]


async def arrivals(*incoming: StageMessage, upstream: bool = True) -> list[tuple[StageEvent, bytes | None]]:
    found: list[tuple[StageEvent, bytes | None]] = []

    def arrived(link: StageLink, event: StageEvent, data: bytearray | None) -> None:
        found.append((event, bytes(data) if data is not None else None))

    link = StageLink(
        FakeStream(*incoming), FORM, SystemClock(), arrived, lambda: False,
        upstream=upstream, heartbeat_s=60.0, dead_after_s=120.0,
    )  # fmt: skip
    await link.run()
    return found


async def test_a_tensor_comes_whole() -> None:
    assert await arrivals(*tensor(header(version=5))) == [(events.ActivationReceived(PEER, MB, 5), GOOD)]
    gradient = Gradient(MB, 5, FORM.shape, "fp32", 2.0)
    assert await arrivals(*tensor(gradient), upstream=False) == [(events.GradientReceived(PEER, MB, 5, 2.0), GOOD)]


def nan() -> bytes:
    broken = np.frombuffer(GOOD, np.float32).copy()
    broken[17] = np.nan
    return broken.tobytes()


@pytest.mark.parametrize(
    ("incoming", "error", "says"),
    [
        (lambda: [header(shape=(2, 16, 65))], MalformedMessage, "has shape"),
        (lambda: [header(shape=())], MalformedMessage, "has shape"),
        (lambda: [header(encoding="bf16")], MalformedMessage, "comes in bf16"),
        (lambda: tensor(header(), nan()), BadPayload, "non-finite"),
        (lambda: [header(), header()], MalformedMessage, "begins within"),
        (lambda: [Chunk(0, b"abcd")], MalformedMessage, "belongs to no tensor"),
        (lambda: [PayloadEnd(b"d" * 16)], MalformedMessage, "belongs to no tensor"),
        (lambda: [header(), PayloadEnd(b"d" * 16)], MalformedMessage, "ended after 0"),
        (lambda: [*tensor(header())[:-1], PayloadEnd(b"d" * 16)], DigestMismatch, "digest"),
        (lambda: tensor(header(), GOOD + GOOD), MalformedMessage, "chunk"),
        (lambda: [Gradient(MB, 0, FORM.shape, "fp32", 1.0)], MalformedMessage, "no place here"),
        (lambda: [Credit(3)], MalformedMessage, "no place here"),
        (lambda: [Score(MB, 0, 1.0)], MalformedMessage, "no place here"),
        (lambda: [StageOpen("run", 1)], MalformedMessage, "no place here"),
        (lambda: [Copy(1, 2, ())], MalformedMessage, "no place here"),
    ],
)
async def test_a_frame_that_does_not_fit_is_refused(
    incoming: Callable[[], list[StageMessage]], error: type[ProtocolError], says: str
) -> None:
    with pytest.raises(error, match=says):
        await arrivals(*incoming())


async def test_an_activation_from_downstream_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="no place here"):
        await arrivals(header(), upstream=False)


async def test_an_answer_has_gone_out_when_the_stream_has_taken_all_of_it() -> None:
    class Full(FakeStream):
        def __init__(self) -> None:
            super().__init__()
            self.room = asyncio.Semaphore(0)

        async def send(self, message: StageMessage) -> None:
            await self.room.acquire()
            await super().send(message)

        async def receive(self) -> StageMessage | None:
            await asyncio.Event().wait()
            return None

    stream, found = Full(), list[StageEvent]()
    link = StageLink(
        stream, FORM, SystemClock(), lambda link, event, data: found.append(event), lambda: False,
        upstream=True, heartbeat_s=60.0, dead_after_s=120.0,
    )  # fmt: skip
    link.send(Credit(1))
    link.send_tensor(Gradient(MB, 5, FORM.shape, "fp32", 2.0), GOOD)
    link.send(Score(MB, 5, 2.0))
    running = asyncio.create_task(link.run())
    sent = []
    for _ in range(6):  # a Credit, a header, two chunks and an end, a Score
        stream.room.release()
        await asyncio.sleep(0.01)
        sent.append((type(stream.sent[-1]).__name__, len(found)))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert found == [events.AnswerSent(PEER)] * 2
    assert sent[-3:] == [("Chunk", 0), ("PayloadEnd", 1), ("Score", 2)]


async def test_signs_of_life_go_out_and_their_lack_ends_the_link() -> None:
    class Silent(FakeStream):
        async def receive(self) -> StageMessage | None:
            await asyncio.Event().wait()
            return None

    stream = Silent()
    link = StageLink(
        stream, FORM, SystemClock(), lambda link, event, data: None, lambda: True,
        upstream=True, heartbeat_s=0.01, dead_after_s=0.05,
    )  # fmt: skip
    with pytest.raises(LinkError, match="nothing was heard"):
        await link.run()
    assert stream.sent[0] == Beat(True)
    assert link.over
