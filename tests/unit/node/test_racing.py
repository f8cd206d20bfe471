"""Happy eyeballs in virtual time: who starts when, who wins, what is left of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from peerloom.node.racing import NoneWon, race
from peerloom.node.virtual_time import run_virtual
from peerloom.protocol.errors import LinkError

DELAY_S = 0.25


class Course:
    """Attempts by name, each taking so long and then failing or not; what happened, with its time."""

    def __init__(self) -> None:
        self.story: list[tuple[str, str, float]] = []
        self.discarded: list[str] = []

    def note(self, name: str, what: str) -> None:
        self.story.append((name, what, asyncio.get_running_loop().time() - self.began))

    def attempt(self, name: str, seconds: float, error: Exception | None = None) -> Callable[[], Awaitable[str]]:
        async def go() -> str:
            self.note(name, "begun")
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.note(name, "cancelled")
                raise
            if error is not None:
                raise error
            return name

        return go

    async def run(self, *attempts: Callable[[], Awaitable[str]]) -> str:
        self.began = asyncio.get_running_loop().time()

        async def discard(name: str) -> None:
            self.discarded.append(name)

        return await race(attempts, DELAY_S, discard)


def test_a_silent_first_one_costs_the_delay_alone() -> None:
    course = Course()
    a, b, c = course.attempt("a", 100.0), course.attempt("b", 0.1), course.attempt("c", 0.1)
    assert run_virtual(lambda: course.run(a, b, c)) == "b"
    assert course.story == [("a", "begun", 0.0), ("b", "begun", DELAY_S), ("a", "cancelled", DELAY_S + 0.1)]


def test_a_failure_begins_the_next_at_once_and_a_slow_first_one_may_still_win() -> None:
    course = Course()
    bad = course.attempt("b", 0.01, LinkError("no"))
    assert run_virtual(lambda: course.run(course.attempt("a", 0.3), bad, course.attempt("c", 5.0))) == "a"
    assert [(name, at) for name, what, at in course.story if what == "begun"] == [
        ("a", 0.0),
        ("b", DELAY_S),
        ("c", pytest.approx(DELAY_S + 0.01)),
    ]


def test_when_all_fail_each_says_why_in_order() -> None:
    course = Course()
    attempts = [course.attempt("a", 0.4, LinkError("a")), course.attempt("b", 0.01, LinkError("b"))]
    with pytest.raises(NoneWon) as lost:
        run_virtual(lambda: course.run(*attempts))
    assert [str(error) for error in lost.value.errors] == ["a", "b"]


def test_two_that_arrive_together_leave_one_to_discard() -> None:
    course = Course()
    assert run_virtual(lambda: course.run(course.attempt("a", 0.5), course.attempt("b", 0.25))) == "a"
    assert course.discarded == ["b"]


def test_a_bug_is_not_taken_for_a_failed_attempt() -> None:
    course = Course()
    with pytest.raises(ZeroDivisionError):
        run_virtual(lambda: course.run(course.attempt("a", 0.01, ZeroDivisionError()), course.attempt("b", 1.0)))
