"""The delays benchmark without its hours: stacked runs are the product's own, and the rule from curves to rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from peerloom.node.specs import demo_spec
from peerloom.optim.basis_rotation import BasisRotatedAdam
from peerloom.optim.delayed import DelayedWeights
from peerloom.optim.rotated_stack import RotatedStack
from peerloom.optim.soap import SOAP
from tests.benchmarks import basis_rotation, basis_rotation_cost, basis_rotation_sweep
from tests.benchmarks.basis_rotation_cost import DEMO, SMALL, Parts, cost_row
from tests.benchmarks.basis_rotation_model import (
    Size,
    StackedRuns,
    byte_frequencies,
    forward,
    initial,
    is_rotated,
)
from tests.benchmarks.basis_rotation_soap import SoapForm
from tests.benchmarks.basis_rotation_sweep import Curves, missing, outcome, target_loss
from tests.benchmarks.basis_rotation_train import (
    CLIP,
    FORMS,
    METHODS,
    Kind,
    Plan,
    Run,
    _optimizer,
    schedule,
    steps_to,
    train,
)
from tests.benchmarks.gasloc_model import Text

TINY = Plan(
    size=Size(width=8, layers=2, heads=2, hidden=24, length=8, batch=2), depth=5, steps=12, warmup=3, eval_every=4,
    windows=4,
)  # fmt: skip
GRID = {1: (1e-3, 2e-3), 32: (1e-3, 2e-3)}


def some_text() -> Text:
    pieces = torch.randint(0, 256, (3000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return Text(pieces[:2500], pieces[2500:])


def test_the_model_is_the_digest_s_and_the_first_stages_are_the_latest() -> None:
    assert Size().numel() == 58_656
    assert Size().delays(32) == [31, 31, 21, 10, 0, 0]
    assert Size().delays(1) == [0] * 6


def alone(plan: Plan, run: Run, text: Text) -> list[float]:
    """2nd_bi as one writes it for a single model."""
    size = plan.size
    stages: list[dict[str, nn.Parameter]] = []
    for flat, layout in zip(initial(size, run.seed), size.stages(), strict=True):
        parts = flat.split([torch.Size(shape).numel() for _, shape in layout])
        stages.append({name: nn.Parameter(p.view(shape)) for (name, shape), p in zip(layout, parts, strict=True)})
    every = {name: parameter for stage in stages for name, parameter in stage.items()}
    rotated = [parameter for name, parameter in every.items() if is_rotated(name)]
    others = [parameter for name, parameter in every.items() if not is_rotated(name)]
    tool = BasisRotatedAdam([{"params": rotated}, {"params": others, "rotate": False}])
    delayed = DelayedWeights([stage.values() for stage in stages], size.delays(run.depth))
    bias = byte_frequencies(text).log()

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return forward({name: p[None] for name, p in every.items()}, size, tokens[None], bias).sum()

    windows = text.evaluation(size.length, plan.windows)
    curve = [float(loss(windows).detach())]
    for step in range(plan.steps):
        tool.zero_grad()
        tokens = text.batch(1, size.batch, size.length, run.seed, step)[0]
        delayed.backward(lambda tokens=tokens: loss(tokens))  # type: ignore[misc]
        for stage in stages:
            for kept in (True, False):
                part = [parameter for name, parameter in stage.items() if is_rotated(name) == kept]
                nn.utils.clip_grad_norm_(part, CLIP)
        for group in tool.param_groups:
            group["lr"] = run.lr * schedule(plan, step)
        tool.step()
        delayed.commit()
        if (step + 1) % plan.eval_every == 0:
            curve.append(float(loss(windows).detach()))
    return curve


def test_stacked_runs_are_the_product_s() -> None:
    text = some_text()
    runs = [Run(3e-3, 1, 0), Run(1e-2, 1, 1), Run(3e-3, 5, 0)]
    found = train(TINY, "2nd_bi", runs, text, lambda line: None)
    for run, record in zip(runs, found, strict=True):
        assert record["curve"] == pytest.approx(alone(TINY, run, text), abs=2e-4)
        assert (record["lr"], record["depth"], record["seed"]) == (run.lr, run.depth, run.seed)
    assert found[0]["curve"] != found[2]["curve"]


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_learns_and_each_goes_its_own_way(kind: Kind) -> None:
    text = some_text()
    plan = replace(TINY, steps=24)
    curves = [train(plan, name, [Run(3e-3, 5, 0)], text, lambda line: None)[0]["curve"] for name in (kind, "adamw")]
    assert all(abs(loss) < 20 for loss in curves[0])
    assert (curves[0] == curves[1]) == (kind == "adamw")


def test_steps_to_a_target_are_of_the_mean_of_the_last_evaluations() -> None:
    curve = [9.0, 3.0, 2.0, 1.0, 3.0, 2.0]
    assert steps_to(2.0, curve, 25, 3) == 75
    assert steps_to(2.0, curve, 25, 1) == 50
    assert steps_to(0.5, curve, 25, 1) is None


def fill(curves: Curves, kind: Kind, lr: float, depth: int, seed: int, ends: float) -> None:
    """A curve that falls from 4 in a line and ends at `ends`."""
    curve = [4 - (4 - ends) * k / 20 for k in range(21)]
    form = {"form": FORMS[kind]} if kind in FORMS else {}
    curves.add([{"kind": kind, **form, "lr": lr, "depth": depth, "seed": seed, "curve": curve}])


def filled(folder: Path | None = None) -> Curves:
    curves = Curves(Plan(steps=500), folder)
    for seed in (0, 1):
        for lr, early, late in ((1e-3, 2.0, 2.6), (2e-3, 1.8, 2.5), (4e-3, 1.9, 2.7)):
            fill(curves, "adamw", lr, 1, seed, early)
            fill(curves, "adamw", lr, 32, seed, late + seed / 100)
    return curves


def test_the_target_is_what_adamw_reaches_on_every_seed_and_curves_are_kept(tmp_path: Path) -> None:
    curves = filled(tmp_path)
    assert target_loss(curves, [0, 1]) == 2.66  # 2.51 at the end, 2.659 the mean of the last five
    again = Curves(Plan(steps=500), tmp_path)
    assert again.get("adamw", 2e-3, 32, 1) == curves.get("adamw", 2e-3, 32, 1)
    assert Curves(Plan(steps=501), tmp_path).get("adamw", 2e-3, 32, 1) is None
    assert curves.get("pipedream_lr", 2e-3, 1, 0) == curves.get("adamw", 2e-3, 1, 0)
    best = outcome(curves, "adamw", 32, [0, 1], 2.66)
    assert best is not None and (best.lr, best.at_edge, best.by_seed) == (2e-3, False, (500.0, 500.0))


def test_a_best_rate_on_an_edge_asks_for_the_next_one() -> None:
    curves = filled()
    assert missing(curves, "2nd_bi", GRID, 0, [0, 1]) == [Run(lr, depth, 0) for depth in (1, 32) for lr in GRID[1]]
    for lr, ends in ((1e-3, 2.0), (2e-3, 1.9)):
        fill(curves, "2nd_bi", lr, 1, 0, ends)
        fill(curves, "2nd_bi", lr, 32, 0, 4 - ends)
    assert missing(curves, "2nd_bi", GRID, 0, [0, 1]) == [Run(4e-3, 1, 0), Run(5e-4, 32, 0)]
    assert missing(curves, "2nd_bi", GRID, 0, [0, 1], grow=False) == []
    assert missing(curves, "adamw", GRID, 0, [0, 1]) == []


def test_the_rows() -> None:
    curves = filled()
    for seed in (0, 1):
        for lr, early, late in ((1e-3, 2.0, 2.0), (2e-3, 1.8, 1.9), (4e-3, 1.9, 2.1)):
            fill(curves, "2nd_bi", lr, 1, seed, early)
            fill(curves, "2nd_bi", lr, 32, seed, late)
            fill(curves, "nesterov", lr, 1, seed, early)
            fill(curves, "nesterov", lr, 32, seed, 3.9)
    found = basis_rotation.outcomes(curves, METHODS, [0, 1], 2.66)
    rows = {row.name: row for row in basis_rotation.slowdown_rows(curves.plan, found, 2.66, 2)}
    slowdowns = {"slowdown_adamw", "slowdown_nesterov", "slowdown_2nd_bi"}
    assert set(rows) == slowdowns | {"iterations_2nd_bi", "iterations_2nd_bi_all"}
    assert (rows["slowdown_adamw"].value, rows["slowdown_adamw"].baseline_value) == (500, 375)
    assert rows["slowdown_2nd_bi"].ratio < rows["slowdown_adamw"].ratio
    assert "NOT reached" in rows["slowdown_nesterov"].unit
    assert rows["iterations_2nd_bi"].baseline == rows["iterations_2nd_bi_all"].baseline == "adamw"
    assert "by seed 1.33, 1.33; P = 1 375 steps, 1.9 warm-ups: TOO FEW, not over 8" in rows["slowdown_adamw"].setting
    assert "by seed -, -" in rows["slowdown_nesterov"].setting
    quicker = replace(curves.plan, warmup=40)
    (row, *_) = basis_rotation.slowdown_rows(quicker, found, 2.66, 2)
    assert row.setting.endswith("P = 1 375 steps, 9.4 warm-ups")


def test_2nd_bi_is_held_against_the_best_of_all_other_methods() -> None:
    curves = filled()
    for kind, late in (("2nd_bi", 2.0), ("soap", 1.8), ("stage_aware", 1.7), ("nesterov", 2.4)):
        for seed in (0, 1):
            for lr, worse in ((1e-3, 0.3), (2e-3, 0.0), (4e-3, 0.2)):
                fill(curves, kind, lr, 1, seed, 1.8 + worse)  # type: ignore[arg-type]
                fill(curves, kind, lr, 32, seed, late + worse + seed / 10)  # type: ignore[arg-type]
    found = basis_rotation.outcomes(curves, METHODS, [0, 1], 2.66)
    rows = {row.name: row for row in basis_rotation.slowdown_rows(curves.plan, found, 2.66, 2)}
    best, of_all = rows["iterations_2nd_bi"], rows["iterations_2nd_bi_all"]
    assert (best.baseline, of_all.baseline) == ("nesterov", "soap")
    assert best.ratio < 1 < of_all.ratio and "best of adamw, nesterov, soap" in of_all.setting


def test_close_methods_are_repeated_at_the_rates_that_two_seeds_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Kind, list[Run]]] = []

    def trained(plan: Plan, kind: Kind, runs: list[Run], *_: object) -> list[dict[str, object]]:
        asked.append((kind, runs))
        ends = {1: 1.8, 32: 2.52}
        curves = [[4 - (4 - ends[run.depth]) * k / 20 for k in range(21)] for run in runs]
        return [
            {"kind": kind, "lr": run.lr, "depth": run.depth, "seed": run.seed, "curve": curve}
            for run, curve in zip(runs, curves, strict=True)
        ]

    monkeypatch.setattr(basis_rotation_sweep, "train", trained)
    curves = filled()
    assert basis_rotation.repeated_rows(curves, "long") == []
    basis_rotation_sweep.repeat(curves, ("adamw", "2nd_bi"), range(2), range(5), 1, lambda line: None)
    assert asked == [("adamw", [Run(2e-3, depth, seed) for depth in (1, 32) for seed in (2, 3, 4)])]
    rows = {row.name: row for row in basis_rotation.repeated_rows(curves, "long")}
    assert set(rows) == {"slowdown_adamw_long_5_seeds"}
    row = rows["slowdown_adamw_long_5_seeds"]
    assert (row.value, row.baseline_value) == (500, 375)
    assert "to 2.67 nats" in row.setting and "5 seeds" in row.setting  # seeds 2 to 4 end higher than the first two


def test_kept_runs_stay_those_of_their_plan_and_of_their_method_s_form(tmp_path: Path) -> None:
    """The file in the repository is of this plan, by its name and by what it says; old forms of a method are not it."""
    short = basis_rotation.TRENDS["short"]
    kept = Curves(short, basis_rotation.RESULTS)
    assert kept.path is not None and kept.path.exists()
    assert len(kept.get("2nd_bi", 4e-3, 1, 0) or ()) == short.steps // short.eval_every + 1
    curves = Curves(short, tmp_path)
    for form in ({}, {"form": "of old"}):
        curves.add([{"kind": "soap", **form, "lr": 1e-3, "depth": 1, "seed": 0, "curve": [1.0]}])
    assert curves.get("soap", 1e-3, 1, 0) is None
    (made,) = train(TINY, "pipedream_lr", [Run(1e-3, 5, 0)], some_text(), lambda line: None)
    curves.add([made])
    assert Curves(short, tmp_path).get("pipedream_lr", 1e-3, 5, 0) == made["curve"]


def test_soap_s_form_is_soap() -> None:
    """The first gradient counts in neither bias corrections nor refreshes."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(5, 5, generator=generator, dtype=torch.float64)  # square: no null space, which is arbitrary
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    form = SoapForm([ours], 1e-2, (0.9, 0.99), weight_decay=0.1, freq=3)
    soap = SOAP([theirs], 1e-2, (0.9, 0.99), 0.99, weight_decay=0.1, freq=3)
    for _ in range(10):
        gradient = torch.randn(5, 5, generator=generator, dtype=torch.float64)
        for parameter, tool in ((ours, form), (theirs, soap)):
            parameter.grad = gradient.clone()
            tool.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_pipedream_lr_s_correction_is_gone_after_12_percent_of_the_run() -> None:
    plan = replace(TINY, steps=100, warmup=1)
    _, rates = _optimizer(plan, "pipedream_lr", [Run(1.0, 5, 0)], StackedRuns(plan.size, [0], torch.ones(256) / 256))
    delays = plan.size.delays(5)
    assert rates(0) == pytest.approx([schedule(plan, 0) / max(delay, 1) for delay in delays])
    assert rates(6)[0] == pytest.approx(schedule(plan, 6) / delays[0] ** 0.5)
    assert set(rates(12)) == {schedule(plan, 12)}


def test_a_whole_step_is_its_passes_and_its_share_of_refreshes() -> None:
    parts: Any = Parts(forward_backward=1.0, adamw=0.5, ordinary=0.6, refresh=1.6)
    row = cost_row(SMALL, 10, parts)
    assert row.name == "step_cost_256_freq10"
    assert row.value == pytest.approx(4 * 1.0 + 0.7) and row.baseline_value == pytest.approx(4.5)


def test_whole_steps_are_timed_in_turn_and_one_of_ten_refreshes(monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed: list[int] = []
    refresh = RotatedStack.refresh

    def counting(stack: RotatedStack, gradient: torch.Tensor) -> None:
        refreshed.append(stack.count)
        refresh(stack, gradient)

    monkeypatch.setattr(RotatedStack, "refresh", counting)
    monkeypatch.setattr(basis_rotation_cost, "seconds", lambda work: (work(), float(len(refreshed)))[1])
    tiny = replace(DEMO, width=8, hidden=12, layers=1, length=4, tokens=16, tokens_a_pass=8)
    row = basis_rotation_cost.whole_row(tiny)
    assert set(refreshed) == {1, 10}, "the first is not among those timed"
    assert (row.name, row.value > 0, "10 steps each in turn" in row.setting) == ("step_cost_8_whole_freq10", True, True)
    assert basis_rotation_cost.DEMO.tokens == demo_spec("pipeline", 4).train.batch_size * 128
