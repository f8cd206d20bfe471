"""The MatrixFSDP benchmark without its ranks and clocks: its rows, and the simulation's arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from tests.benchmarks import matrix_fsdp, matrix_fsdp_simulation
from tests.benchmarks.matrix_fsdp import QUICK, rows
from tests.benchmarks.matrix_fsdp_methods import METHODS, TITLES
from tests.benchmarks.matrix_fsdp_ranks import Figures

COSTS = {
    f"ns_{QUICK.width}": 1e-3, f"ns_{QUICK.mlp}": 3e-3,
    "gather_small_s": 1e-3, "gather_small_bytes": 3072.0, "gather_large_s": 5e-3, "gather_large_bytes": 12e6,
}  # fmt: skip


def figures(name: str, rank: int) -> Figures:
    optimizer_s = 0.1 if name == "ours" else 0.2 if name == "wires" else 0.5
    return Figures(
        passes_s=[0.1 if name == "kept" else 0.2], optimizer_s=[optimizer_s * (1 + rank)], loss=5.5,
        held_bytes=2**20 * (1 + rank), peak_bytes=(3 if name == "ours" else 5) * 2**20 * (1 + rank),
        step_bytes=0 if name == "ours" else 2**21,
    )  # fmt: skip


def test_the_rows_are_named_as_the_design_says_and_take_the_slowest_rank() -> None:
    by_rank = [{name: figures(name, rank) for name in METHODS} for rank in range(4)]
    found = {row.name: row for row in rows(4, QUICK, [by_rank, by_rank], by_rank)}
    speeds = [f"{what}_w4{form}" for what in ("opt_step", "step") for form in ("", "_wires")]
    others = [f"{speed}_{name}" for speed in speeds for name in [*TITLES][1:]]
    sizes = [f"{what}_w4{form}" for what in ("memory", "peak") for form in ("", "_wires")]
    kept = ["step_w4_kept_ddp", "step_w4_kept_zero1"]
    assert found.keys() == {*speeds, *others, *sizes, *kept, "opt_step_bytes_w4"} and len(TITLES) == 5
    assert "share memory" in found["step_w4_zero1"].setting and "share" not in found["step_w4_wires_zero1"].setting
    assert found["step_w4_wires_zero1"].ratio == pytest.approx(2.2 / 1.0), "of the form that sends"
    assert (found["peak_w4_wires"].value, found["peak_w4_wires"].baseline_value) == (20.0, 20.0)
    assert found["opt_step_w4"].ratio == pytest.approx(5.0)
    assert found["opt_step_w4"].value == pytest.approx(1 / 0.4)
    assert found["step_w4"].ratio == pytest.approx(2.2 / 0.6)
    assert found["step_w4_kept_zero1"].value == pytest.approx(1 / 2.1), "of the form that keeps units"
    assert (found["peak_w4"].value, found["peak_w4"].baseline_value) == (12.0, 20.0)
    assert found["memory_w4"].ratio == 1.0 and found["memory_w4"].value == 4.0
    assert (found["opt_step_bytes_w4"].value, found["opt_step_bytes_w4"].baseline_value) == (0.0, 2.0)


def test_methods_that_do_not_train_alike_are_no_comparison() -> None:
    by_rank = [{name: figures(name, 0) for name in METHODS}]
    by_rank[0]["zero1"] = dataclasses.replace(by_rank[0]["zero1"], loss=5.0)
    with pytest.raises(ValueError, match="zero1 has loss 5.0000 where ours is 5.5000"):
        matrix_fsdp.rows(1, QUICK, [by_rank], by_rank)


def test_the_simulation_adds_up_what_it_says() -> None:
    found = matrix_fsdp_simulation.simulate(16, QUICK, COSTS)
    orthogonalized = 32 * (4 * 1e-3 + 3 * 3e-3)
    latencies = 32 * 7 * 1e-3 * 15 / 3
    per_byte = 4e-3 / (12e6 - 3072)
    moved = 32 * 4 * (4 * QUICK.width**2 + 3 * QUICK.width * QUICK.mlp) * 15 / 16 * per_byte
    assert found.stock_s == pytest.approx(orthogonalized + latencies + moved)
    assert found.compute_ratio == pytest.approx(orthogonalized / found.ours_s) and found.compute_ratio <= 16
    assert orthogonalized / 16 <= found.ours_s <= 1.5 * orthogonalized / 16
    lines = matrix_fsdp_simulation.table(QUICK, COSTS).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["8", "16", "32", "64"]
    assert "54.6" in lines[5] and "assumptions" in lines[6]
