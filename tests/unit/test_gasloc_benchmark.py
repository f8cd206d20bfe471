"""The gasloc benchmark's arithmetic: what is tuned and run next, which runs stand against which, time in ticks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peerloom.optim.tuning import check_tuning
from peerloom.protocol.errors import SpecError
from tests.benchmarks import gasloc, gasloc_sweep, gasloc_time
from tests.benchmarks.gasloc_methods import Setting, copies_per_step
from tests.benchmarks.gasloc_model import Shape
from tests.benchmarks.gasloc_overlap import OVERLAP, SEEDS, overlap_rows
from tests.benchmarks.gasloc_plot import Best
from tests.benchmarks.gasloc_sweep import (
    FAMILIES,
    OUTER,
    SIZES,
    Family,
    _wanted,
    best,
    chosen,
    diloco,
    outer,
    rates,
    tried,
)
from tests.benchmarks.gasloc_time import COPY_TICKS, Machine, World, run_in_time, run_spec, stored_run, ticks_to
from tests.benchmarks.gasloc_train import Result, Store, run

pytestmark = pytest.mark.usefixtures("one_thread")  # as the benchmark has it

# --- the sweep


def result(loss: float, copies: float = 1.0) -> Result:
    return {
        "loss": loss, "worst_gap": 0.1, "consensus": 0.0, "copies": copies, "curve": [[16, loss]], "cpu_s": 1.0
    }  # fmt: skip


def sweep_all(families: list[Family], store: Store, loss: Callable[[Setting], float], seeds: int = 1) -> int:
    """Runs whatever is wanted until nothing is; returns how many runs that were."""
    runs = 0
    while wanted := _wanted(families, seeds, store):
        for setting, seed in wanted:
            assert store.get(setting, seed) is None
            store.put(setting, seed, result(loss(setting) + seed / 100))
        runs += len(wanted)
    return runs


def test_a_family_is_tuned_until_both_neighbours_of_its_best_are_worse() -> None:
    base = Setting(label="a family", partners="1peer")
    family, store = outer(base, ((1.0, 0.0), (1.0, 0.3))), Store(None)
    assert best(family, store) is None and chosen(family, 3, store) is None
    assert tried(family, store) == list(family.candidates) and len(family.candidates) == 2
    store.put(family.candidates[0], 0, result(3.0))
    assert tried(family, store) == list(family.candidates)  # the others come first

    def loss(setting: Setting) -> float:
        return abs(setting.lr - 4e-2) + setting.gamma

    store = Store(None)
    runs = sweep_all([family], store, loss)
    found = best(family, store)
    assert found is not None and (found[0].lr, found[0].gamma) == (4e-2, 0.0)
    lrs = sorted(setting.lr for setting in tried(family, store) if setting.gamma == 0.0)
    assert lrs == [5e-3, 1e-2, 2e-2, 4e-2, 8e-2] and runs == 6


def test_a_run_that_diverged_is_never_the_best_and_tuning_has_an_end() -> None:
    base, store = Setting(label="a family", partners="1peer"), Store(None)
    family = rates(base)
    for setting in family.candidates:
        store.put(setting, 0, result(float("nan") if setting.lr > 6e-3 else 2.0 - setting.lr))
    found = best(family, store)
    assert found is not None and found[0].lr == 5e-3
    endless = sweep_all([family], Store(None), lambda setting: -setting.lr)
    assert endless == gasloc_sweep.MOST_RUNS
    fixed = Family("fixed", family.candidates[:1], refine=False)
    assert sweep_all([fixed], Store(None), lambda setting: 1.0) == 1


def test_other_seeds_come_once_a_family_is_tuned_and_for_its_best_alone() -> None:
    store = Store(None)
    families = [rates(Setting(label=f"family {k}", partners="1peer", h=8 * k)) for k in (1, 2)]
    first = families[0].candidates
    for setting in (*first, replace(first[0], lr=first[0].lr / 2)):
        store.put(setting, 0, result(1.0 + setting.lr))
    wanted = _wanted(families, 3, store)
    assert (replace(first[0], lr=first[0].lr / 4), 0) in wanted  # a better one is looked for still
    assert all(seed == 0 for _, seed in wanted)
    store = Store(None)
    sweep_all(families, store, lambda setting: abs(setting.lr - 5e-3))
    wanted = _wanted(families, 3, store)
    assert sorted((setting.h, setting.lr, seed) for setting, seed in wanted) == [
        (h, 5e-3, seed) for h in (8, 16) for seed in (1, 2)
    ]


def test_every_family_compared_is_stable() -> None:
    """On the edge of stability plain gossip does not average: the ring's alpha 1 with unit weights is there."""
    kinds = {"ring": "ring", "1peer": "1peer", "2peer": "2peer", "cube-groups": "groups"}
    checked = set()
    for family in (*FAMILIES, *SIZES):
        for setting in family.candidates:
            if setting.method == "outer" and setting.partners in kinds:
                kind: Any = kinds[setting.partners]
                check_tuning(kind, setting.workers, setting.alpha, setting.gamma, setting.momentum, group=setting.group)
                checked.add(kind)
    assert checked == set(kinds.values())
    assert len({family.name for family in (*FAMILIES, *SIZES)}) == len(FAMILIES) + len(SIZES)


# --- the rows


OTHERS = (  # that are in no sweep: one that sends too much, and one whose label does not begin with GASLoC
    outer(diloco(8), OUTER),
    outer(Setting(label="overlapped GASLoC 1-peer H=16, 4 steps", partners="1peer", delay=4), OUTER),
)


def pair(name: str, losses: list[float], **changes: Any) -> tuple[str, Best]:
    """A family of that name with its results on so many seeds."""
    family = next(family for family in (*FAMILIES, *SIZES, *OTHERS) if family.name == name)
    setting = replace(family.candidates[0], **changes)
    return name, (setting, [result(loss, copies_per_step(setting) * setting.steps) for loss in losses])


def a_sweep() -> dict[str, Best]:
    return dict(
        [
            pair("DiLoCo H=16", [2.0, 2.2]),
            pair("DiLoCo H=16, 4 fragments", [2.0, 2.0]),
            pair("DiLoCo H=8", [1.0, 1.0]),
            pair("DiLoCo H=32", [2.5, 2.5]),
            pair("GASLoC 1-peer H=16", [2.3, 2.3]),
            pair("GASLoC groups of 4, 4 fragments, H=24", [2.2, 2.21]),
            pair("GASLoC groups of 4, H=16", [2.1, 2.1]),
            pair("GASLoC 1-peer H=8", [1.5, 1.5]),
            pair("NoLoCo H=16", [2.4, 2.6]),
            pair("gossip 1-peer H=16", [2.6, 2.6]),
            pair("overlapped GASLoC 1-peer H=16, 4 steps", [0.1, 0.1]),
            *(
                pair(f"{method} {graph} H=1", [1.8 + k / 10])
                for graph in ("ring", "1-peer")
                for k, method in enumerate(("GASLoC", "D-PSGD", "gossip"))
            ),
            pair("GASLoC groups of 4, 4 fragments, H=24, 4 workers", [0.5]),
            pair("GASLoC 1-peer H=16, 4 workers", [0.6]),
        ]
    )


def test_equal_bytes_means_the_best_of_either_side_within_them() -> None:
    found = a_sweep()
    rows = {row.name: row for row in gasloc.loss_rows(gasloc.of_one_size(found))}
    equal, half = rows["loss_h16_equal_bytes"], rows["loss_h16_half_bytes"]
    assert (equal.value, equal.baseline, equal.baseline_value) == (2.1, "DiLoCo H=16, 4 fragments", 2.0)
    assert rows["bytes_h16_equal_bytes"].baseline_value == pytest.approx(1.875 / 16 * 672 * Shape().numel * 4 / 1e6)
    assert (half.value, half.baseline, half.baseline_value) == (pytest.approx(2.205), "DiLoCo H=16", 2.1)
    assert "DiLoCo in as few bytes: DiLoCo H=32, 2.5000" in half.setting
    assert (rows["loss_h1_ring"].baseline, rows["loss_h1_1peer"].baseline_value) == ("D-PSGD ring H=1", 1.8 + 1 / 10)


def test_noloco_and_gossip_have_rows_with_the_deviation_over_seeds() -> None:
    rows = {row.name: row for row in gasloc.loss_rows(gasloc.of_one_size(a_sweep()))}
    noloco, gossip = rows["loss_h16_vs_noloco"], rows["loss_h16_vs_gossip"]
    assert (noloco.value, noloco.baseline_value) == (1.5, 2.5)  # NoLoCo sends two copies a round
    assert (gossip.value, gossip.baseline_value) == (pytest.approx(2.205), 2.6)
    assert "2 and 2 seeds, deviation over them 0.0000 and 0.1414" in noloco.setting
    assert "1 and 1 seeds, deviation over them - and -" in rows["loss_h1_ring"].setting
    assert all(f"{Shape().numel:,} parameters" in row.setting for name, row in rows.items() if name.startswith("loss"))
    assert "setting by seed 0, on the held-out text reported" in noloco.setting
    assert 1e5 <= Shape().numel <= 1e6
    without = {name: each for name, each in a_sweep().items() if "NoLoCo" not in name and "gossip" not in name}
    assert not [row.name for row in gasloc.loss_rows(gasloc.of_one_size(without)) if "_vs_" in row.name]


def test_swarms_of_another_size_are_compared_among_themselves() -> None:
    found = a_sweep()
    assert all(setting.workers == 16 for setting, _ in gasloc.of_one_size(found).values())
    four, sixteen = gasloc.size_rows(found)
    assert (four.name, four.value, four.baseline_value) == ("loss_groups_4_workers", 0.5, 0.6)
    assert (sixteen.name, sixteen.baseline) == ("loss_groups_16_workers", "GASLoC 1-peer H=16")
    quick = dict([pair("GASLoC groups of 4, 4 fragments, H=24", [1.0], workers=8), pair("GASLoC 1-peer H=16", [1.0])])
    assert gasloc.size_rows(quick) == []


def test_where_nothing_sends_so_little_the_row_is_no_figure() -> None:
    found = gasloc.of_one_size(a_sweep())
    few = {name: each for name, each in found.items() if not name.startswith("GASLoC") or "H=1" == name[-3:]}
    with pytest.raises(ValueError, match="few enough bytes for loss_h16_half_bytes"):
        gasloc.loss_rows(few)


def test_quick_has_what_its_rows_need() -> None:
    found = {
        family.name: (family.candidates[0], [result(2.0, copies_per_step(family.candidates[0]) * 96)])
        for family in gasloc.quick_families()
    }
    assert all(setting.workers == 8 for setting, _ in found.values())
    names = [row.name for row in gasloc.loss_rows(gasloc.of_one_size(found))]
    assert names[:2] == ["loss_h1_ring", "loss_h1_1peer"] and "loss_h16_half_bytes" in names


def test_what_overlap_costs_is_read_from_its_runs_and_is_what_is_told_of_it() -> None:
    store = Store(gasloc.RESULTS / "overlap.jsonl")
    assert _wanted(OVERLAP, SEEDS, store) == []  # all are there
    four, eight = overlap_rows(store)
    assert (four.name, eight.name) == ("loss_overlap_4_steps", "loss_overlap_8_steps")
    told = " ".join((gasloc.RESULTS.parents[3] / "deploy" / "methods.md").read_text(encoding="utf-8").split())
    for row, span in ((four, "+0.6 to +1.8 %"), (eight, "+2.6 to +3.9 %")):
        assert f"{span} in 4 runs" in row.setting and span in told
    assert 1 < four.ratio < 1.02 < eight.ratio < 1.04


# --- time


def test_diloco_waits_for_the_slowest() -> None:
    setting = Setting(label="", workers=16, h=16)
    assert World().diloco_ticks(setting, 2) == 2 * (16 + 1.875 * COPY_TICKS)
    assert World(link=10).diloco_ticks(setting, 2) == 2 * (16 + 18.75 * COPY_TICKS)
    assert World(machine=4).diloco_ticks(setting, 2) == 2 * (64 + 1.875 * COPY_TICKS)


def timed(**changes: Any) -> Setting:
    return replace(gasloc.TIMED, **{"workers": 4, "steps": 96, **changes})


def test_what_is_timed_is_a_run_that_a_spec_can_express() -> None:
    spec = run_spec(timed(), 1).gasloc
    assert (spec.pairing, spec.fragments, spec.overlap, spec.round_s) == ("rendezvous", 1, True, 24.0)
    with pytest.raises(SpecError, match="must be false but with one partner and one fragment"):
        run_spec(timed(fragments=4), 1)
    with pytest.raises(SpecError, match="a pair diverges; must be below 1 with overlap"):
        run_spec(timed(momentum="post"), 1)


def test_the_tick_of_a_target_is_the_first_at_or_below_it() -> None:
    curve = {"curve": [[16, 3.0], [32, 2.0], [48, 2.5], [64, 1.0]], "loss": 1.0, "utilization": 0.9}
    assert [ticks_to(curve, target) for target in (4.0, 2.0, 1.9, 0.5)] == [16, 32, 64, None]
    diloco = Setting(label="DiLoCo H=16")
    hit, missed = (gasloc.time_row("t", curve, World(), timed(), diloco, target) for target in (2.0, 0.5))
    assert (hit.value, hit.baseline_value) == (32, 42 * (16 + 7.5)) and "NOT" not in hit.setting
    assert missed.value == 96 and missed.setting.startswith("NOT reached, at the end 1.0000")
    assert "utilization of the fast machines 0.900" in hit.setting


class Still(Machine):
    """Takes its time and learns nothing; it trembles, since who stands still is left alone."""

    def _pull(self) -> None:
        noise = torch.Generator().manual_seed(1000 * self._index + self._disk.cursor)
        self._params += 1e-4 * torch.randn(self._params.shape, generator=noise)
        self._disk.cursor += 1
        self._step += 1
        self._losses = torch.zeros(1)

    def _loss(self) -> float:
        return 1.0


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gasloc_time, "held_out_loss", lambda stacked, params, windows: 1.0)


def test_who_waits_for_a_slow_link_is_counted_as_idle(unseen: None) -> None:
    even, slow, blocking = (
        run_in_time(timed(steps=240, delay=delay), 0, World(link=link), Still)
        for link, delay in ((1.0, 6), (10.0, 6), (1.0, 0))
    )
    assert even["utilization"] > 0.95
    # one meeting in three is slow: more than what may run beneath exchanges has to spare
    assert even["utilization"] - 0.15 < slow["utilization"] < even["utilization"] - 0.04
    # without overlap every exchange is waited for: a copy's time after each round at least
    assert blocking["utilization"] < 24 / (24 + COPY_TICKS) + 0.01
    assert slow["rounds"][0] < min(slow["rounds"][1:]) and max(slow["rounds"]) < 10, slow


def test_a_slow_machine_takes_fewer_steps_a_round_and_holds_nobody(unseen: None) -> None:
    found = run_in_time(timed(steps=240), 0, World(machine=4), Still)
    assert found["utilization"] > 0.9
    assert found["rounds"][0] >= 8  # of 10, each with a quarter of the steps


def test_its_machines_train_as_the_sweep_s_workers_do() -> None:
    setting = timed(workers=2, steps=96, lr=1e-2)
    plain = run(replace(setting, method="local", partners="alone", delay=0), 3)["curve"][0]
    curve = run_in_time(setting, 3, World())["curve"]
    assert curve[0][0] == plain[0] == 24
    assert curve[0][1] == pytest.approx(plain[1], abs=2e-4)  # before anything was exchanged
    assert curve[1][1] < curve[0][1] < 5.4


def test_a_timed_run_is_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[World] = []

    def fake(setting: Setting, seed: int, world: World) -> Result:
        asked.append(world)
        return {"curve": [[24, float(len(asked))]]}

    monkeypatch.setattr(gasloc_time, "run_in_time", fake)
    file = tmp_path / "time.jsonl"
    worlds = (World(link=10), World(machine=4), World(link=10))
    assert [stored_run(timed(), 0, world, file)["curve"][0][1] for world in worlds] == [1.0, 2.0, 1.0]
    assert stored_run(timed(label="by another name"), 0, World(machine=4), file)["curve"] == [[24, 2.0]]
    assert stored_run(timed(lr=3e-3), 0, World(machine=4), file)["curve"] == [[24, 3.0]]
    assert stored_run(timed(), 0, World(link=10), None)["curve"] == [[24, 4.0]]
