"""What a neighbour may not number as it likes: refused at the link with the reason, and scored."""

from __future__ import annotations

import pytest

from peerloom.node.clock import SystemClock
from peerloom.node.memory_stage_worker import MemoryStageWorker
from peerloom.node.stage_driver import BAD_FRAME, StageDriver, StageReports
from peerloom.protocol.errors import MalformedMessage
from peerloom.protocol.ledger import Microbatch
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_pipeline import PipelineSpec
from peerloom.protocol.stage_messages import Credit, Gradient, Score, StageMessage
from peerloom.protocol.stage_window import REACH
from peerloom.protocol.stages import StageMachine
from peerloom.protocol.types import PeerId
from tests.unit.node.test_stage_link import FORM, PEER, FakeStream, header, tensor

SPEC = RunSpec(method="pipeline", pipeline=PipelineSpec(stages=2))


def driver_of(stage: int, scored: list[tuple[PeerId, str]]) -> StageDriver:
    """A host of one stage, whose worker is never asked."""
    reports = StageReports(
        count=lambda metric, amount: None,
        score=lambda peer, fault: scored.append((peer, fault)),
        trained=lambda update, loss: None,
        evaluated=lambda loss: None,
        saved=lambda outcome: None,
    )
    machine = StageMachine(SPEC.pipeline, stage, updates=1000)
    return StageDriver(machine, MemoryStageWorker(), SystemClock(), SPEC, FORM, reports)


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
