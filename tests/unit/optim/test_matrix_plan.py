"""The planners of MatrixFSDP, alone: coverage, determinism, balance, and the digest's figures for gamma."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from peerloom.optim.matrix_fsdp import ShardingError, plan_owners
from peerloom.optim.matrix_fsdp.layout import lay_out
from peerloom.optim.matrix_fsdp.planner import Policy, Shape, numel

POLICIES = get_args(Policy)
H = 64


def blocks(count: int, *, vocabulary: int = 0) -> dict[str, dict[str, Shape]]:
    """Decoder blocks of the paper: four matrices h x h, two of 4h x h, two norms; with a vocabulary, a unit before."""
    units: dict[str, dict[str, Shape]] = {}
    if vocabulary:
        units["rest"] = {"embed": (vocabulary, H), "norm": (H,), "head": (vocabulary, H)}
    for at in range(count):
        square = {f"{at}.{name}": (H, H) for name in "qkvo"}
        others: dict[str, Shape] = {f"{at}.up": (4 * H, H), f"{at}.down": (H, 4 * H)}
        units[f"block {at}"] = square | others | {f"{at}.n1": (H,), f"{at}.n2": (H,)}
    return units


@pytest.mark.parametrize(("policy", "world_size"), [*itertools.product(POLICIES, [1, 2, 3, 5, 8, 40])])
def test_every_parameter_has_one_place_in_every_plan(policy: Policy, world_size: int) -> None:
    units = blocks(3, vocabulary=7)
    plan = plan_owners(units, world_size, policy, spread={"embed"} if world_size > 1 else ())
    assert plan == plan_owners(units, world_size, policy, spread={"embed"} if world_size > 1 else ())
    for unit in plan.units:
        layout = lay_out(unit, unit.shapes)
        covered = sorted((e.full_start, e.full_start + e.numel) for e in layout.extents)
        assert [start for start, _ in covered] == [0] + [end for _, end in covered[:-1]]
        assert covered[-1][1] == layout.numel == unit.numel
        rows = {name: 0 for name in unit.shapes}
        for rank in range(world_size):
            for piece in unit.pieces(rank):
                assert piece.first_row == rows[piece.name]
                rows[piece.name] += piece.shape[0]
        assert rows == {name: shape[0] for name, shape in unit.shapes.items()}
    assert sum(plan.load(rank) for rank in range(world_size)) == sum(unit.numel for unit in plan.units)
    tail = next(unit for unit in plan.units if unit.name == "block 0")
    assert plan.owner_of("0.n1") == plan.owner_of("0.n2") and tail.gamma >= 1


@pytest.mark.parametrize(("world_size", "gamma", "imbalance"), [(2, 1.00, 1.00), (4, 1.33, 1.00), (8, 2.67, 1.08)])
def test_gamma_and_imbalance_of_sixteen_blocks(world_size: int, gamma: float, imbalance: float) -> None:
    plan = plan_owners(blocks(16), world_size)
    assert max(unit.gamma for unit in plan.units) == pytest.approx(gamma, abs=0.02)
    assert plan.imbalance == pytest.approx(imbalance, abs=0.02)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_the_scope_plan_balances_no_worse_and_the_greedy_bound_holds(world_size: int) -> None:
    role, scope = (plan_owners(blocks(16), world_size, policy) for policy in ("role_greedy", "scope_greedy"))
    assert scope.imbalance <= role.imbalance
    largest = 4 * H * H
    for plan in (role, scope):
        loads = [plan.load(rank) for rank in range(world_size)]
        assert max(loads) <= sum(loads) / world_size + largest


def test_cost_aware_takes_the_scope_plan_only_under_its_cap() -> None:
    assert plan_owners(blocks(3), 8, "cost_aware").policy == "scope_greedy"
    assert plan_owners(blocks(16), 8, "cost_aware").policy == "role_greedy", "a unit would need 1.26 times the buffer"
    lumps = {
        "a": {"a1": (9, 10), "a2": (9, 10)},
        "b": {"b1": (5, 10), "b2": (5, 10), "b3": (4, 10), "b4": (4, 10)},
        "c": {"c1": (3, 10), "c2": (2, 10), "c3": (2, 10), "c4": (2, 10), "c5": (2, 10)},
    }
    for world_size in (2, 3, 4, 5):
        plans = {policy: plan_owners(lumps, world_size, policy) for policy in POLICIES}
        segments = {policy: max(unit.largest for unit in plan.units) for policy, plan in plans.items()}
        assert segments["cost_aware"] <= 1.25 * segments["role_greedy"]
        assert plans["cost_aware"].cost_imbalance <= plans["role_greedy"].cost_imbalance


def test_balance_by_newton_schulz_is_another_balance() -> None:
    shapes = {"unit": {"wide": (8, 512), "square": (64, 64), "other": (64, 64)}}
    by_numel, by_flops = (plan_owners(shapes, 2, cost=cost) for cost in ("numel", "newton_schulz"))
    assert by_numel.checksum() != by_flops.checksum()
    flops = 5 * (4 * 64 * 64 * 64 + 2 * 64**3)
    assert {role.cost for role in by_flops.units[0].roles if role.names[0] != "wide"} == {flops}


def test_who_steps_a_matrix_decides_what_it_weighs() -> None:
    shapes: dict[str, dict[str, Shape]] = {
        "rest": {"embed": (256, H), "head": (256, H)},
        "block": {"q": (H, H), "k": (H, H), "cold": (H, 4 * H), "frozen": (H, 4 * H), "norm": (H,)},
    }
    plan = plan_owners(
        shapes, 2, cost="newton_schulz", outer={"embed", "head"}, frozen={"cold", "frozen", "norm"}
    )  # fmt: skip
    costs = {role.names: role.cost for unit in plan.units for role in unit.roles}
    by_muon, by_adamw = 5 * (4 * H**3 + 2 * H**3), 12 * 256 * H
    assert costs[("q",)] == costs[("k",)] == by_muon and costs[("embed",)] == costs[("head",)] == by_adamw
    assert costs[("cold",)] == costs[("frozen",)] == costs[("norm",)] == 0
    assert plan.owner_of("cold") != plan.owner_of("frozen"), "what costs no step still takes memory"
    assert plan.imbalance == pytest.approx(1.0, abs=0.01)
    by_numel = plan_owners(shapes, 2, outer={"embed", "head"}, frozen={"cold", "frozen"})
    assert all(role.cost == role.numel for unit in by_numel.units for role in unit.roles)


def test_the_checksum_sees_every_difference() -> None:
    plans = [
        plan_owners(blocks(2), 2),
        plan_owners(blocks(3), 2),
        plan_owners(blocks(2), 3),
        plan_owners(blocks(2), 2, cost="newton_schulz"),
        plan_owners(blocks(2, vocabulary=8), 2),
        plan_owners(blocks(2, vocabulary=8), 2, spread={"embed"}),
    ]
    assert len({plan.checksum() for plan in plans}) == len(plans)


def test_the_table_names_units_ranks_and_balance() -> None:
    lines = plan_owners(blocks(2, vocabulary=9), 3, spread={"embed"}).table().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["unit", "rest", "block 0", "block 1", "total", "imbalance"]
    assert "rank 2" in lines[0] and f"{numel((3, H)):,}" in lines[1]


@pytest.mark.parametrize(
    ("units", "world_size", "options", "sentence"),
    [
        (blocks(1), 0, {}, "one rank or more"),
        (blocks(1), 2, {"policy": "best"}, "'best' is none of role_greedy"),
        (blocks(1), 2, {"cost": "money"}, "'money' is neither numel"),
        (blocks(1), 2, {"spread": {"nothing"}}, "nothing cannot be spread"),
        ({"a": {"w": (2, 2)}, "b": {"w": (2, 2)}}, 2, {}, "w is in the plan twice"),
    ],
)
def test_what_cannot_be_planned_is_said(
    units: dict[str, dict[str, Shape]], world_size: int, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ShardingError, match=sentence):
        plan_owners(units, world_size, **options)  # type: ignore[arg-type]
