"""The watchdog on a node whose worker tells nothing: its steps stand in its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from peerloom.node.facts import Facts
from peerloom.node.virtual_time import VirtualClock, run_virtual
from peerloom.node.watchdog import watch_progress
from peerloom.protocol.progress import FIRST_STEP_S, LEAST_STALL_S
from peerloom.protocol.types import PeerId


def lived(story: Callable[[Facts], object], *, in_rounds: bool, seconds: float) -> Facts:
    """Facts after `story` (called each second) went on for a while under the watchdog."""

    async def main() -> Facts:
        facts = Facts(
            peer_id=PeerId("12D3KooWx"), name="x", role="trainer", version="0", instance="0", cert_der=b"c",
            clock=VirtualClock(), bytes_moved=lambda: (0, 0), state="training", reason="",
        )  # fmt: skip
        watching = asyncio.create_task(watch_progress(facts, in_rounds=in_rounds))
        for _ in range(int(seconds)):
            story(facts)
            await asyncio.sleep(1.0)
        watching.cancel()
        return facts

    return run_virtual(main)


def steps(facts: Facts) -> None:
    facts.step += 1


def steps_until_20(facts: Facts) -> None:
    facts.step = min(20, facts.step + 1)


def test_steps_in_the_figures_are_signs_of_life() -> None:
    facts = lived(steps, in_rounds=False, seconds=1000)
    assert (facts.state, facts.pace.usual_s) == ("training", pytest.approx(1.0, rel=0.3))


def test_they_stop_and_start_again() -> None:
    facts = lived(steps_until_20, in_rounds=False, seconds=40 + LEAST_STALL_S)
    assert facts.state == "stalled" and facts.counters["worker_stalls"] == 1
    assert lived(steps, in_rounds=False, seconds=30).state == "training"


@pytest.mark.parametrize(("in_rounds", "state"), [(True, "stalled"), (False, "training")])
def test_without_any_step_only_a_worker_that_would_tell_is_judged(in_rounds: bool, state: str) -> None:
    assert lived(lambda facts: None, in_rounds=in_rounds, seconds=FIRST_STEP_S + 20).state == state


def test_a_state_that_explains_itself_is_no_stall() -> None:
    def waits(facts: Facts) -> None:
        facts.step = min(20, facts.step + 1)
        if facts.step == 20:
            facts.state, facts.reason = "training", "its steps are taken; it passes on what others send"

    assert lived(waits, in_rounds=False, seconds=2000).state == "training"

    def seeks(facts: Facts) -> None:
        facts.step = min(20, facts.step + 1)
        facts.state, facts.reason = "seeking", "stage 2 has no host; the run waits"

    assert lived(seeks, in_rounds=False, seconds=2000).state == "seeking"
