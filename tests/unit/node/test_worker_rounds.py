"""Timed rounds, the optimizers, and partners too far off, in the training task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.mixer import FEW
from peerloom.node.worker.model import build_model
from peerloom.node.worker.pace import RESERVE, another_step, reservations
from peerloom.node.worker.tasks.gasloc import GaslocTask
from peerloom.optim.robust import MedianClip
from peerloom.protocol.runspec import RunSpec
from peerloom.protocol.spec_gasloc import GaslocSpec
from tests.unit.node.test_worker import assert_equal, state
from tests.unit.node.tiny import never, task, tiny_spec, write_text


@pytest.fixture(autouse=True)
def single_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_both_optimizers_resume_bit_for_bit(
    source: Path, tmp_path: Path, optimizer: Literal["adamw", "muon"]
) -> None:
    spec = tiny_spec(source)
    spec = replace(spec, train=replace(spec.train, optimizer=optimizer))
    straight, first = (task(spec, tmp_path / name) for name in ("straight", "broken"))
    for worker, rounds in ((straight, 4), (first, 2)):
        for number in range(rounds):
            worker.train(number, never)
            worker.finish(mix=False)
    first.save()
    second = task(spec, tmp_path / "broken")
    assert_equal(second._inner.state(), first._inner.state())
    for number in (2, 3):
        second.train(number, never)
        second.finish(mix=False)
    assert_equal(state(second), state(straight))
    assert second._position == straight._position


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(source: Path) -> None:
    spec = tiny_spec(source)
    spec = replace(
        spec,
        train=replace(spec.train, optimizer="muon", muon_learning_rate=0.04),
        model=replace(spec.model, tie_embeddings=False),
    )
    model = build_model(spec)
    inner = InnerLoop(model, spec.train)
    inner.step(torch.randint(0, 256, (2, 17)), spec.train.learning_rate / 2)
    kept = inner.state()
    muon = {key.split("/", 1)[1] for key in kept if key.startswith("momentum_buffer/")}
    adamw = {key.split("/", 1)[1] for key in kept if key.startswith("exp_avg/")}
    named = dict(model.named_parameters())
    assert muon | adamw == set(named) and not muon & adamw
    assert muon == {name for name in named if ".layers." in name and named[name].dim() == 2}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= adamw
    assert inner._muon is not None and inner._adamw is not None
    assert inner._muon.param_groups[0]["lr"] == pytest.approx(0.02)  # half of its own peak, as AdamW of its
    assert inner._adamw.param_groups[0]["lr"] == pytest.approx(spec.train.learning_rate / 2)


def test_muon_lowers_the_held_out_loss(source: Path, tmp_path: Path) -> None:
    spec = tiny_spec(source, local_steps=10)
    worker = task(replace(spec, train=replace(spec.train, optimizer="muon")), tmp_path)
    before = worker.ready().held_out_loss
    for number in range(4):
        worker.train(number, never)
        worker.finish(mix=False)
    after = worker._position.held_out_loss
    assert before is not None and after is not None and after < before - 1.5


def meet(worker: GaslocTask, number: int, offset: float) -> tuple[float, bool]:
    """A round whose partner lies `offset` off in every parameter."""
    worker.train(number, never)
    theirs = worker._flat.flat + offset
    worker._inbox.view(torch.float32).copy_(theirs)
    finished = worker.finish(mix=True)
    return finished.share, finished.far_off


def test_a_partner_too_far_off_is_cut_and_then_blamed(source: Path, tmp_path: Path) -> None:
    spec = with_gasloc(tiny_spec(source), clip_radius=2.0, gamma=0.0)
    worker = task(spec, tmp_path)
    for number in range(MedianClip.LEAST):
        assert meet(worker, number, 1e-3) == (1.0, False)
    assert meet(worker, 5, 3e-3) == (pytest.approx(2 / 3, rel=1e-3), False)
    y_before = worker._method.theta.clone()
    share, far_off = meet(worker, 6, 1.0)
    assert share == pytest.approx(2e-3, rel=1e-2) and far_off
    moved = (worker._method.theta - y_before).abs().max()
    assert moved < 0.1  # its own steps; half of 1.0 without the cut
    worker.save()
    again = task(spec, tmp_path)
    assert again._exchanges.distances() == worker._exchanges.distances() != []
    assert len(again._exchanges.distances()) == 7


def test_the_first_partners_count_whole(source: Path, tmp_path: Path) -> None:
    worker = task(with_gasloc(tiny_spec(source), clip_radius=2.0), tmp_path)
    assert meet(worker, 0, 1.0) == (1.0, False)


def test_where_many_are_far_off_nobody_is_blamed(source: Path, tmp_path: Path) -> None:
    worker = task(with_gasloc(tiny_spec(source), clip_radius=2.0), tmp_path)
    for number in range(12):
        meet(worker, number, 1e-4)
    blamed = [meet(worker, number, 1.0)[1] for number in range(12, 12 + FEW + 2)]
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
