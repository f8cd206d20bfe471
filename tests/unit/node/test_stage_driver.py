"""What a neighbour may not number as it likes: refused at the link with the reason, and scored."""

from __future__ import annotations

import pytest

from peerloom.node.clock import SystemClock
from peerloom.node.memory_stage_worker import MemoryStageWorker
from peerloom.node.stage_driver import BAD_FRAME, StageDriver, StageReports
from peerloom.node.stage_link import StageLink
from peerloom.protocol import stage_effects as effects
from peerloom.protocol import stage_events as events
from peerloom.protocol.errors import LinkError, MalformedMessage
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_pipeline import PipelineSpec
from peerloom.protocol.stage_messages import Credit, Gradient, Score, StageMessage
from peerloom.protocol.stage_window import REACH
from peerloom.protocol.stages import StageMachine
from peerloom.protocol.types import PeerId
from tests.unit.node.test_stage_link import FORM, PEER, FakeStream, header, tensor

OTHER = PeerId("other")
SPEC = RunSpec(method="pipeline", pipeline=PipelineSpec(stages=2))
MIDDLE = RunSpec(method="pipeline", pipeline=PipelineSpec(stages=3))
OURS, EVIL = bytearray(b"ours"), bytearray(b"evil")


def driver_of(stage: int, scored: list[tuple[PeerId, str]], spec: RunSpec = SPEC) -> StageDriver:
    """A host of one stage, whose worker is never asked."""
    reports = StageReports(
        count=lambda metric, amount: None,
        score=lambda peer, fault: scored.append((peer, fault)),
        trained=lambda update, loss: None,
        evaluated=lambda loss: None,
        saved=lambda outcome: None,
    )
    machine = StageMachine(spec.pipeline, stage, updates=1000)
    return StageDriver(machine, MemoryStageWorker(), SystemClock(), spec, FORM, reports)


def linked(driver: StageDriver, peer: PeerId, *, upstream: bool) -> StageLink:
    """A link that is open and on which nothing moves."""
    stream = FakeStream()
    stream.peer = peer
    link = StageLink(
        stream, FORM, SystemClock(), driver._arrived, lambda: False,
        upstream=upstream, heartbeat_s=60.0, dead_after_s=120.0,
    )  # fmt: skip
    (driver._up if upstream else driver._down)[peer] = link
    driver.feed(events.UpstreamOpened(peer) if upstream else events.DownstreamOpened(peer, 8))
    return link


def work(driver: StageDriver, kind: type[effects.StageEffect]) -> dict[Microbatch, bytes]:
    """What the worker was asked for since the last look, of one kind, with the bytes it is to use."""
    found = {}
    while not driver._work.empty():
        effect, data = driver._work.get_nowait()
        if isinstance(effect, kind) and data is not None:
            found[getattr(effect, "microbatch")] = bytes(data)  # noqa: B009
    return found


def activation(index: int, version: int) -> list[StageMessage]:
    return tensor(header(microbatch=Microbatch(0, index), version=version))


def gradient(index: int, version: int) -> list[StageMessage]:
    return tensor(Gradient(Microbatch(0, index), version, FORM.shape, "fp32", 1.0))


@pytest.mark.parametrize(
    ("stage", "incoming", "reason"),
    [
        (1, [*activation(3, 4), *activation(4, 5 + REACH)], r"version 65541, more than 65536 from version 4"),
        (1, [*activation(0, 4), *activation(1000, 4)], "microbatch 0/1000 came, and a lane of this run has 1000"),
        (0, [Credit(4), *gradient(7, 0)], "microbatch 0/7 is not under way here"),
        (0, [Credit(4), *gradient(0, 0)], "microbatch 0/0 was not sent to it"),
        (0, [Credit(4), Score(Microbatch(0, 7, True), 0, 1.0)], "held-out microbatch 0/7 is not under way here"),
    ],
)
async def test_a_frame_out_of_the_window_ends_its_link_and_is_scored(
    stage: int, incoming: list[StageMessage], reason: str
) -> None:
    scored: list[tuple[PeerId, str]] = []
    driver = driver_of(stage, scored)
    serve = driver.serve_upstream if stage else driver.serve_downstream
    with pytest.raises(MalformedMessage, match=reason):
        await serve(FakeStream(*incoming))
    assert scored == [(PEER, BAD_FRAME)]
    assert driver.machine.load <= 1 and not driver.downstream


async def test_what_lies_in_the_window_is_taken() -> None:
    scored: list[tuple[PeerId, str]] = []
    driver = driver_of(1, scored)
    await driver.serve_upstream(FakeStream(*activation(3, 4), *activation(4, 5), *activation(2, 4)))
    assert not scored and driver.machine.load == 1  # the one begun; those queued go with their link


@pytest.mark.parametrize(("before", "fault"), [(0, []), (5, [(OTHER, "stage_flood")])])
async def test_an_activation_that_is_refused_or_not_needed_changes_no_other(
    before: int, fault: list[tuple[PeerId, str]]
) -> None:
    """Else a node of the stage before could choose what another's microbatch is trained on."""
    scored: list[tuple[PeerId, str]] = []
    driver = driver_of(1, scored, MIDDLE)
    ours, theirs = (linked(driver, peer, upstream=True) for peer in (PEER, OTHER))
    for link, index, data in [
        (ours, 9, OURS),  # the worker is busy with it, so that the others wait
        (ours, 0, OURS),
        *((theirs, 20 + index, EVIL) for index in range(before)),  # all that it has credit for
        (theirs, 0, EVIL),
    ]:
        driver._arrived(link, events.ActivationReceived(link.peer, Microbatch(7, index), 0), data)
    assert scored == fault
    assert work(driver, effects.RunForward) == {Microbatch(7, 9): OURS}
    driver.feed(events.ForwardDone(Microbatch(7, 9)))
    assert work(driver, effects.RunForward) == {Microbatch(7, 0): OURS}
    if fault:
        with pytest.raises(LinkError, match="without credit"):
            await theirs.run()


async def test_a_gradient_that_was_not_asked_of_its_sender_is_not_used() -> None:
    driver = driver_of(1, [], MIDDLE)
    up = linked(driver, PEER, upstream=True)
    asked, other = (linked(driver, PeerId(name), upstream=False) for name in ("a", "b"))
    first, second = Microbatch(7, 0), Microbatch(7, 1)
    driver._made = {first: b"", second: b""}
    for microbatch in (first, second):
        driver._arrived(up, events.ActivationReceived(PEER, microbatch, 0), OURS)
    driver.feed(events.ForwardDone(first))  # the worker is busy with the second now
    for link, version, data in [(asked, 0, OURS), (other, 99, EVIL), (asked, 0, EVIL)]:
        driver._arrived(link, events.GradientReceived(link.peer, first, version, 1.0), data)
    work(driver, effects.RunForward)
    driver.feed(events.ForwardDone(second))
    assert work(driver, effects.RunBackward) == {first: OURS}
    assert driver.answered == {asked.peer: 1}
