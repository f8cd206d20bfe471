"""Timed and overlapped rounds, and partners too far off, in the training task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peerloom.node.worker.mixer import FEW
from peerloom.node.worker.pace import BENEATH, RESERVE, SPARE, Beneath, Done, another_step, reservations
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.optim.robust import MedianClip, distance
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from peerloom.protocol.types import Encoding
from tests.unit.node.test_worker import assert_equal, state
from tests.unit.node.tiny import never, task, tiny_spec

pytestmark = pytest.mark.usefixtures("one_thread")


def with_gasloc(spec: RunSpec, **changes: float) -> RunSpec:
    return replace(spec, gasloc=replace(spec.gasloc, **changes))  # type: ignore[arg-type]


class Ticks:
    """A clock that a training step moves on by `step_s`."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        return self.now

    def slow(self, worker: GaslocTask) -> GaslocTask:
        step: Callable[[int], torch.Tensor] = worker._step

        def timed(index: int) -> torch.Tensor:
            self.now += self.step_s
            return step(index)

        worker._step = timed  # type: ignore[method-assign]
        return worker


@pytest.mark.parametrize(("step_s", "steps"), [(1.0, 5), (0.9, 5), (2.0, 2), (7.0, 1), (0.1, 50)])
def test_a_timed_round_takes_the_steps_that_fit_and_at_least_one(
    source: Path, tmp_path: Path, step_s: float, steps: int
) -> None:
    clock = Ticks(step_s)
    worker = clock.slow(task(with_gasloc(tiny_spec(source), round_s=5.05), tmp_path, clock=clock))
    trained = worker.train(0, never)
    assert (trained.batches, trained.step, trained.first_batch) == (steps, steps, 0)
    assert trained.seconds == pytest.approx(steps * step_s)
    worker.finish(mix=False)
    assert worker.train(1, never).first_batch == steps


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [(0.5, [2, 3, 2, 3]), (1.0, [1, 1, 1, 2]), (2.0, [1, 0, 0, 1]), (3.0, [1, 0, 0, 0]), (7.0, [1, 0, 0, 0])],
)
def test_the_fragments_of_a_timed_round_come_at_the_ends_of_steps_by_their_times(
    source: Path, tmp_path: Path, step_s: float, steps: list[int]
) -> None:
    clock, taken = Ticks(step_s), 0
    spec = with_gasloc(tiny_spec(source), round_s=5.05, fragments=4, pairing="scheduled")  # type: ignore[arg-type]
    worker = clock.slow(task(spec, tmp_path, clock=clock))
    for round in (0, 1):
        for fragment, count in enumerate(steps):
            trained = worker.train(round, never, fragment)
            assert (trained.batches, trained.first_batch, trained.seconds) == (count, taken, count * step_s)
            taken += count
            if fragment < 3:
                worker.settle(fragment)
        worker.finish(mix=False)
    before = Done(1, 1.0)  # who lingered for a partner at one fragment comes to the next at once
    assert not another_step(0, 0.0, spec.gasloc, 0, before=before.plus(1, 1.0))
    assert another_step(0, 0.0, spec.gasloc, 0, linger_s=9.0, before=before)


def test_the_batches_of_a_timed_round_are_reserved_before_they_are_used(source: Path, tmp_path: Path) -> None:
    """A kill at any step of a long round: the next life begins past all that was drawn."""
    spec = with_gasloc(tiny_spec(source), round_s=100.0)
    clock = Ticks(1.0)
    worker = clock.slow(task(spec, tmp_path, clock=clock))
    drawn = 0

    def killed_at(step: int) -> Callable[[], bool]:
        def interrupted() -> bool:
            nonlocal drawn
            drawn += 1
            if drawn == step:
                raise KeyboardInterrupt
            return False

        return interrupted

    for step in (RESERVE, RESERVE + 1, 3 * RESERVE):
        drawn = 0
        before = worker._cursor.next
        with pytest.raises(KeyboardInterrupt):
            worker.train(0, killed_at(step))
        worker = clock.slow(task(spec, tmp_path, clock=clock))
        assert worker._cursor.next >= before + step


def test_a_timed_round_resumes_exactly(source: Path, tmp_path: Path) -> None:
    spec, clock = with_gasloc(tiny_spec(source), round_s=3.0), Ticks(1.0)
    straight = clock.slow(task(spec, tmp_path / "straight", clock=clock))
    broken = clock.slow(task(spec, tmp_path / "broken", clock=clock))
    for worker in (straight, broken):
        worker.train(0, never)
        worker.finish(mix=False)
    broken.save()
    straight.train(1, never)
    straight.finish(mix=False)
    again = clock.slow(task(spec, tmp_path / "broken", clock=clock))
    again._cursor.give_back(straight._position.step - 3)  # the next life skips what was reserved; not for this test
    again.train(1, never)
    again.finish(mix=False)
    assert_equal(state(again), state(straight))


def test_how_many_steps_and_reservations() -> None:
    fixed, timed = GaslocSpec(local_steps=3), GaslocSpec(round_s=10.0)
    assert [another_step(done, 1e9, fixed) for done in range(5)] == [True, True, True, False, False]
    assert another_step(0, 1e9, timed) and not another_step(1, 5.1, timed) and another_step(1, 5.0, timed)
    sizes = reservations(timed, 40)
    assert [next(sizes) for _ in range(3)] == [41, RESERVE, RESERVE]
    assert next(reservations(fixed, 40)) == 3


def meet(worker: GaslocTask, number: int, ways: float) -> tuple[float, bool]:
    """A round whose partner lies as far off as so many of the node's own ways in it."""
    worker.train(number, never)
    y = worker._flat.flat.detach()
    theirs = y + ways * distance(y, worker._method.theta) / math.sqrt(len(y))
    worker._inbox.view(torch.float32).copy_(theirs)
    finished = worker.finish(mix=True)
    return finished.share, finished.far_off


def test_a_partner_too_far_off_is_cut_and_then_blamed(source: Path, tmp_path: Path) -> None:
    spec = with_gasloc(tiny_spec(source), clip_radius=2.0, gamma=0.0)
    worker = task(spec, tmp_path)
    for number in range(MedianClip.LEAST):
        assert meet(worker, number, 0.1) == (1.0, False)
    limit = 2 * math.sqrt(2)
    assert meet(worker, 5, 1.5 * limit) == (pytest.approx(2 / 3, rel=1e-3), False)
    y_before = worker._method.theta.clone()
    share, far_off = meet(worker, 6, 1000 * limit)
    assert share == pytest.approx(1e-3, rel=1e-2) and far_off
    moved = (worker._method.theta - y_before).abs().max()
    assert moved < 0.1  # its own steps; 1,414 of them without the cut
    worker.save()
    again = task(spec, tmp_path)
    assert again._exchanges.distances() == worker._exchanges.distances() != []
    assert len(again._exchanges.distances()) == 7


def test_the_first_partners_count_whole(source: Path, tmp_path: Path) -> None:
    worker = task(with_gasloc(tiny_spec(source), clip_radius=2.0), tmp_path)
    assert meet(worker, 0, 1000.0) == (1.0, False)


def test_partners_were_near_before_the_steps_grew_and_are_not_cut_for_it(source: Path, tmp_path: Path) -> None:
    worker = task(with_gasloc(tiny_spec(source), clip_radius=2.0), tmp_path)
    met = [meet(worker, number, 1e-3) for number in range(10)] + [meet(worker, number, 2.5) for number in range(10, 14)]
    assert met == [(1.0, False)] * 14


def test_where_many_are_far_off_nobody_is_blamed(source: Path, tmp_path: Path) -> None:
    worker = task(with_gasloc(tiny_spec(source), clip_radius=2.0), tmp_path)
    for number in range(12):
        meet(worker, number, 0.1)
    blamed = [meet(worker, number, 1000.0)[1] for number in range(12, 12 + FEW + 2)]
    assert blamed == [True] * FEW + [False] * 2


def test_without_a_radius_everybody_counts(source: Path, tmp_path: Path) -> None:
    worker = task(with_gasloc(tiny_spec(source), clip_radius=0.0), tmp_path)
    assert meet(worker, 0, 10.0) == (1.0, False)
    assert worker._exchanges.distances() == []


def test_sketches_tell_the_distance_of_nodes(source: Path, tmp_path: Path) -> None:
    pair = [task(tiny_spec(source), tmp_path, peer) for peer in ("peer-a", "peer-b")]
    assert pair[0].ready().sketch == pair[1].ready().sketch
    sketches, thetas = [], []
    for worker in pair:
        worker.train(0, never)
        sketches.append(torch.tensor(worker.finish(mix=False).sketch))
        thetas.append(worker._method.theta.clone())
    told = float((sketches[0] - sketches[1]).norm())
    assert told == pytest.approx(float((thetas[0] - thetas[1]).norm()), rel=0.5)


@pytest.mark.parametrize("encoding", ["fp32", "bf16"])
def test_overlapped_rounds_are_the_blocking_ones_where_nothing_is_late(
    source: Path, tmp_path: Path, encoding: Encoding
) -> None:
    thetas = []
    for overlap in (False, True):
        spec = tiny_spec(source, encoding=encoding)
        spec = replace(spec, gasloc=replace(spec.gasloc, overlap=overlap, gamma=0.3, eta=0.9))
        pair = [task(spec, tmp_path / str(overlap), name) for name in ("peer-a", "peer-b")]
        for round in range(3):
            for worker in pair:
                worker.train(round, never)
            for worker, other in (pair, pair[::-1]):
                worker._inbox.copy_(other._outbox)
            for worker in pair:
                worker.finish(mix=True)
        thetas.append(torch.stack([worker._host_theta for worker in pair]))
    assert torch.equal(*thetas)


def test_overlap_keeps_the_steps_taken_meanwhile_and_waits_for_the_exchange(source: Path, tmp_path: Path) -> None:
    spec = tiny_spec(source)
    worker = task(replace(spec, gasloc=replace(spec.gasloc, overlap=True)), tmp_path)
    worker.train(0, never)
    sent, calls = worker._flat.flat.clone(), []
    torch.testing.assert_close(worker._outbox.view(torch.float32), sent, rtol=0, atol=0)

    def wait() -> None:
        calls.append(worker._flat.flat.clone())
        if len(calls) == 2:  # the first command was another one
            worker._inbox.view(torch.float32).copy_(sent + 0.5)
            worker.finish(mix=True)
            moved = worker._host_theta - sent
            torch.testing.assert_close(worker._flat.flat - calls[1], moved, rtol=1e-4, atol=1e-6)

    assert worker.exchanging
    with pytest.raises(RuntimeError, match="call finish"):
        worker.save()
    assert worker.train(1, never, wait=wait).batches == spec.gasloc.local_steps
    assert len(calls) == 2 and not torch.equal(calls[0], sent) and not torch.equal(worker._flat.flat, calls[1])
    with pytest.raises(ValueError, match="while round 2 is next"):
        worker.train(3, never)


@pytest.mark.parametrize("spec", [GaslocSpec(local_steps=16), GaslocSpec(round_s=16.0, local_steps=1)])
def test_a_quarter_of_the_steps_may_run_beneath_exchanges_on_average(spec: GaslocSpec) -> None:
    beneath = Beneath(spec)

    def exchange(takes: int) -> int:
        """The steps that ran beneath one that lasts so many of them, a second each."""
        done = next(done for done in range(100) if done == takes or not beneath.goes_on(done, float(done)))
        beneath.over(done, float(done))
        return done

    assert (BENEATH, SPARE) == (0.25, 1.5)
    assert exchange(99) == 28  # what a new run has to spare, and the quarter
    assert [exchange(99) for _ in range(3)] == [4, 4, 4]  # whose links are all slow waits for them
    assert [exchange(2) for _ in range(8)] == [2] * 8
    assert [exchange(99), exchange(99)] == [4 + 8 * 2, 4]
    assert [exchange(0) for _ in range(20)] == [0] * 20
    assert exchange(99) == 28


def test_by_the_clock_steps_go_on_beneath_a_slow_exchange_past_the_round(source: Path, tmp_path: Path) -> None:
    clock = Ticks(1.0)
    timed = with_gasloc(tiny_spec(source), round_s=4.0, overlap=True)
    worker = clock.slow(task(timed, tmp_path, clock=clock))
    taken = 0

    def over_after(steps: int) -> Callable[[], bool]:
        def interrupted() -> bool:
            nonlocal taken
            taken += 1
            if taken == steps:
                assert worker.finish(mix=False).beneath_s == pytest.approx(steps - 1)
            return False

        return interrupted

    assert worker.train(0, never).batches == 4
    assert worker.train(1, over_after(6)).batches == 6
    taken = 0
    assert worker.train(2, over_after(2)).batches == 4
