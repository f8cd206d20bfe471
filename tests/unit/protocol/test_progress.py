"""When a step is overdue."""

from __future__ import annotations

import pytest

from peerloom.protocol.progress import BETWEEN_ROUNDS_S, FIRST_STEP_S, LEAST_STALL_S, STALL_FACTOR, StepPace


def stepping(step_s: float, count: int = 5) -> tuple[StepPace, float]:
    """A pace that has seen `count` steps, and the time of the last."""
    pace = StepPace()
    for number in range(1, count + 1):
        pace.stepped(number, 100 + number * step_s)
    return pace, 100 + count * step_s


def test_the_usual_step_is_learnt_from_what_is_told() -> None:
    assert stepping(4.0)[0].usual_s == pytest.approx(4.0)
    pace = StepPace()
    pace.stepped(1, 10.0)
    pace.stepped(101, 11.0)
    assert pace.usual_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("step_s", "training", "patience_s"),
    [
        (0.1, True, LEAST_STALL_S),
        (30.0, True, 30.0 * STALL_FACTOR),
        (0.1, False, BETWEEN_ROUNDS_S),
        (30.0, False, 30.0 * STALL_FACTOR),
    ],
)
def test_a_step_is_overdue_after_many_usual_ones(step_s: float, training: bool, patience_s: float) -> None:
    pace, last = stepping(step_s)
    assert pace.overdue(last + patience_s - 0.1, training) == ""
    told = pace.overdue(last + patience_s + 1, training)
    assert f"no step for {patience_s + 1:.0f} s" in told and f"takes {step_s:.2g} s" in told


def test_the_least_patience_is_the_nodes_to_choose() -> None:
    pace = StepPace(least_s=2.0)
    assert pace.patience_s(training=True) == FIRST_STEP_S
    pace.measured(0.01)
    assert pace.patience_s(training=True) == 2.0
    patient = StepPace(least_s=1000.0)
    patient.measured(0.01)
    assert patient.patience_s(training=False) == 1000.0


def test_short_rounds_may_not_be_silent_for_long_at_their_ends() -> None:
    pace, last = stepping(0.1)
    for number in range(6):
        pace.round_ended(last + number)
    assert pace.patience_s(training=False) == LEAST_STALL_S
    pace.round_ended(last + 600)
    assert pace.patience_s(training=False) == BETWEEN_ROUNDS_S


def test_the_first_step_has_more_time() -> None:
    pace = StepPace()
    pace.alive(50.0)
    assert pace.overdue(50.0 + FIRST_STEP_S) == ""
    assert "none before" in pace.overdue(51.0 + FIRST_STEP_S)


def test_other_signs_of_life_count_and_the_pause_is_no_step() -> None:
    pace, last = stepping(1.0)
    pace.alive(last + 50)
    assert pace.overdue(last + 50 + LEAST_STALL_S) == ""
    pace.stepped(6, last + 55)  # the exchange in between is not part of a step
    assert pace.usual_s == pytest.approx(1.0)


def test_a_new_process_counts_anew() -> None:
    pace, last = stepping(1.0)
    pace.stepped(1, last + 500)
    assert pace.usual_s == pytest.approx(1.0) and pace.overdue(last + 500 + LEAST_STALL_S) == ""
