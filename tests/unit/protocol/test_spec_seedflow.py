"""SeedFlow's table and the task's: what no run could hold is named with what is allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerloom.protocol.errors import SpecError
from peerloom.protocol.limits import MAX_FLOOD_ORIGINS
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_seedflow import MAX_SUM, NORMAL_LIMIT, SeedflowSpec
from peerloom.protocol.spec_task import TaskSpec


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (SeedflowSpec(scalar_bound=1e-6), "scalar_bound = 1e-06: scalar_bound * 2^fraction_bits must be from 1"),
        (SeedflowSpec(scalar_bound=2.0**20, fraction_bits=12), "must be from 1 to 2147483647"),
        (SeedflowSpec(max_steps=10**8, period=10**6, scalar_bound=2.0**18), "= 100000000: must be at most 1894 with"),
        (SeedflowSpec(version=1), "version = 1: must be an integer from 4 to 4"),
        (SeedflowSpec(period=1), "period = 1: must be at least 2 with max_steps = 5000"),
        (SeedflowSpec(rate_burst=4), "rate_burst = 4: must be at least flush_steps, which is 5"),
        (SeedflowSpec(trainable="("), "trainable = '(': must be a regular expression"),
        (SeedflowSpec(neighbours=1), "neighbours = 1: must be an integer from 2 to 64"),
        (TaskSpec(template="It was"), "template = 'It was': must hold {text} once"),
        (TaskSpec(labels="0"), "labels = '0': must be two or more"),
        (TaskSpec(label_words=" good| good"), "label_words = ' good| good': must be two or more, all different"),
        (TaskSpec(labels="0|1|2"), "label_words = 2 words: must be as many as labels, which are 3"),
        (RunSpec(task=TaskSpec(kind="classification")), 'must be "text" with method = "gasloc"'),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_the_remedy(
    table: SeedflowSpec | TaskSpec | RunSpec, sentence: str
) -> None:
    with pytest.raises(SpecError) as raised:
        table.check()
    assert any(sentence in problem for problem in raised.value.problems), raised.value.problems


def test_the_largest_run_that_checks_cannot_overflow_a_sum() -> None:
    limit = SeedflowSpec(scalar_bound=2.0**19, fraction_bits=11).scalar_limit()
    most = MAX_SUM // (limit * NORMAL_LIMIT * MAX_FLOOD_ORIGINS)
    spec = SeedflowSpec(scalar_bound=2.0**19, fraction_bits=11, max_steps=most, period=10**6)
    spec.check()
    assert spec.scalar_limit() * NORMAL_LIMIT * spec.max_steps * MAX_FLOOD_ORIGINS <= MAX_SUM
    with pytest.raises(SpecError, match="sums could pass 64 bits"):
        replace(spec, max_steps=most + 1).check()


def test_a_linear_decay_ends_at_zero() -> None:
    shares = [SeedflowSpec(decay="linear", max_steps=4).rate_share(step) for step in range(6)]
    assert shares == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert SeedflowSpec(max_steps=4).rate_share(3) == 1.0


def test_classification_pairs_labels_with_words() -> None:
    RunSpec(method="seedflow", task=TaskSpec(kind="classification")).check()
    assert TaskSpec().classes() == (("0", " terrible"), ("1", " great"))
    assert SeedflowSpec().scalar_limit() == 2**20
    assert SeedflowSpec(max_steps=1001).periods() == 2
