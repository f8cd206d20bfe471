"""MatrixFSDP on real gloo groups of one to five ranks, against one process that adds in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from peerloom.optim.matrix_fsdp import Sharing
from peerloom.optim.matrix_fsdp.host import PAGE
from peerloom.optim.matrix_fsdp.planner import numel
from tests.unit.optim.matrix_board import held_up, on_board, without
from tests.unit.optim.matrix_cases import (
    Array,
    Case,
    Outcome,
    ddp_run,
    full_batch_run,
    make_model,
    pieces_of,
    reference_run,
    sharded_run,
    whole,
)
from tests.unit.optim.matrix_counts import beside_stock, counted_step, order_of_a_step, peak_beside_estimate
from tests.unit.optim.matrix_faults import LOSSES, groups_of_losses, interrupted, meets_a_loss, refused
from tests.unit.optim.ranks import Ranks

SOAP = {"lr": 3e-3, "freq": 3}
CASES = {
    "clipped": (3, Case(steps=3, clip=0.5)),
    "accumulated": (2, Case(steps=3, accumulate=4)),
    "accumulated, no divisor of two": (3, Case(steps=3, accumulate=4, clip=0.7)),
    "tied": (3, Case(steps=3, tied=True)),
    "soap": (3, Case(steps=3, matrix="soap", settings=SOAP)),
    "basis-rotated": (3, Case(steps=3, matrix="basis_rotated", settings=SOAP)),
    "open from forward to backward": (3, Case(steps=3, sharding={"reshard_after_forward": False})),
    "recomputed": (2, Case(steps=3, checkpointing=False)),
    "recomputed, reentrant": (2, Case(steps=3, checkpointing=True)),
    "frozen matrices": (3, Case(steps=3, frozen="q_proj")),
    "frozen embedding": (2, Case(steps=3, frozen="embed")),
    "bf16 over fp32": (3, Case(steps=3, bf16=True)),
    "bf16": (5, Case(steps=3, dtype=torch.bfloat16)),
    "bf16, gradients travel as fp32": (3, Case(steps=3, dtype=torch.bfloat16, reduce=torch.float32, clip=0.5)),
    "wide: gradients travel alone and are added up in chunks": (3, Case(steps=3, width=256)),
    "broadcast": (4, Case(steps=3, sharding={"fan_out": "broadcast"})),
    "replicas": (4, Case(steps=3, replicas=2, clip=0.5, accumulate=4)),
    "replicas, bf16": (4, Case(steps=3, replicas=2, dtype=torch.bfloat16, clip=0.5)),
    "embedding and head owned": (3, Case(steps=3, sharding={"spread_outer": False})),
    "planned by scope and flops": (4, Case(steps=3, sharding={"policy": "scope_greedy", "cost": "newton_schulz"})),
}

WIDE = {
    "clipped": Case(clip=0.5),
    "accumulated": Case(accumulate=4),
    "tied": Case(tied=True),
    "soap": Case(matrix="soap", settings=SOAP),
    "basis-rotated": Case(matrix="basis_rotated", settings=SOAP),
}


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(5, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def run(five: Ranks, work: Any, ranks: int, *arguments: Any) -> list[Any]:
    """The answers of the first `ranks` ranks; the first exception among them is raised."""
    answers = five.run(work, ranks, *arguments)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers[:ranks]


def apart(these: dict[str, Array], those: dict[str, Array]) -> float:
    """The largest difference of any parameter."""
    assert these.keys() == those.keys()
    return max(float(np.abs(these[name] - those[name]).max()) for name in these)


def mean_losses(outcomes: list[Outcome]) -> Array:
    return np.mean([outcome.losses for outcome in outcomes], axis=0, dtype=np.float64)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_twenty_steps_of_muon_are_those_of_one_process(five: Ranks, ranks: int) -> None:
    reference = reference_run(ranks, Case())
    for case in (Case(), Case().sending):
        outcomes = run(five, sharded_run, ranks, case)
        assert apart(whole(outcomes), whole([reference])) == 0.0
        np.testing.assert_allclose(mean_losses(outcomes), reference.losses, rtol=1e-6)
        assert {outcome.shares for outcome in outcomes} == {ranks > 1 and not case.sharding}
    assert apart(whole([reference]), whole([Outcome([], pieces_of(make_model(Case())), [])])) > 0.1, "it trained"


@pytest.mark.parametrize("name", CASES)
def test_so_are_those_of_every_setting(five: Ranks, name: str) -> None:
    """With memory in common, and with all sent."""
    ranks, case = CASES[name]
    reference = reference_run(ranks, case)
    compare(run(five, sharded_run, ranks, case.sending), ranks, case, reference)
    if "fan_out" not in case.sharding:
        outcomes = run(five, sharded_run, ranks, case)
        assert all(outcome.shares for outcome in outcomes)
        compare(outcomes, ranks, case, reference)


@pytest.mark.long
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_so_are_twenty_steps_of_settings_on_all_numbers_of_ranks(five: Ranks, ranks: int, name: str) -> None:
    for case in (WIDE[name], WIDE[name].sending):
        compare(run(five, sharded_run, ranks, case), ranks, case, reference_run(ranks, case))


def compare(outcomes: list[Outcome], ranks: int, case: Case, reference: Outcome) -> None:
    """Every replica with one process, to the last bit."""
    each = ranks // case.replicas
    for first in range(0, ranks, each):
        assert apart(whole(outcomes[first : first + each]), whole([reference])) == 0.0
    np.testing.assert_allclose([outcome.norms for outcome in outcomes], [reference.norms] * ranks, rtol=1e-6)


@pytest.mark.parametrize("case", [Case(dtype=torch.float64), Case(dtype=torch.float64, replicas=2)])
def test_they_are_those_of_one_batch_of_all_sequences(five: Ranks, case: Case) -> None:
    outcomes = run(five, sharded_run, 4, case)
    halves = [outcomes] if case.replicas == 1 else [outcomes[:2], outcomes[2:]]
    reference = whole([full_batch_run(4, case)])
    assert all(apart(whole(half), reference) <= 1e-6 for half in halves)


def test_with_more_ranks_than_roles_some_own_nothing(five: Ranks) -> None:
    case = Case(steps=3, layers=1, sharding={"blocks": [], "spread_outer": False})
    small = Case(steps=3, layers=0, sharding={"spread_outer": False})  # embedding, head, norm: three roles
    assert apart(whole(run(five, sharded_run, 5, case)), whole([reference_run(5, case)])) == 0.0
    outcomes = run(five, sharded_run, 5, small)
    assert sorted(len(outcome.pieces) for outcome in outcomes) == [0, 0, 1, 1, 1]
    assert apart(whole(outcomes), whole([reference_run(5, small)])) == 0.0


@pytest.mark.parametrize(("ranks", "in_rank_order"), [(2, False), (3, True), (4, True)])
def test_ddp_with_muon_gives_the_same_bits(five: Ranks, ranks: int, in_rank_order: bool) -> None:
    """Its own all-reduce adds two ranks in the one order there is; for more, one that adds in rank order."""
    case = Case(steps=4)
    ours = whole(run(five, sharded_run, ranks, case))
    for outcome in run(five, ddp_run, ranks, case, in_rank_order):
        assert apart(ours, whole([outcome])) == 0.0


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        *((ranks, Case()) for ranks in (1, 2, 3, 4)),
        (4, Case(sharding={"reshard_after_forward": False})),
        (3, Case(sharding={"fan_out": "broadcast"})),
        (3, Case(matrix="soap", settings=SOAP | {"freq": 1})),
        (3, Case(matrix="basis_rotated", settings=SOAP | {"freq": 1})),
    ],
)
def test_the_step_sends_nothing_and_the_passes_what_the_formula_says(five: Ranks, ranks: int, case: Case) -> None:
    answers = run(five, counted_step, ranks, case.sending)
    plan, reshard = answers[0]["plan"], case.sharding.get("reshard_after_forward", True)
    gathers = [1] + [2 if reshard else 1] * (len(plan.units) - 2) + [1]  # the rest and the last block stay open
    for rank, answer in enumerate(answers):
        traffic = answer["traffic"]
        assert answer["step"] == []
        assert len(answer["clipping"]) == 1 and "allreduce" in answer["clipping"][0]
        assert len(answer["passes"]) == traffic.messages - answer["compared"]
        owned = [unit.owned_numel(rank) for unit in plan.units]
        once = [(ranks - 1) * 4 * count for count in owned]
        others = [4 * (unit.numel - count) for unit, count in zip(plan.units, owned, strict=True)]
        assert traffic.gather_sent == sum(n * times for n, times in zip(once, gathers, strict=True))
        assert traffic.gather_received == sum(n * times for n, times in zip(others, gathers, strict=True))
        assert (traffic.reduce_received, traffic.reduce_sent) == (sum(once), sum(others))
        assert answer["after"].messages == traffic.messages and answer["after"].scalars == 1
    for at, unit in enumerate(plan.units):  # C_owner = (W - 1) max_r O = gamma P (W - 1) / W
        sent = max((ranks - 1) * unit.owned_numel(rank) for rank in range(ranks))
        assert sent == pytest.approx(unit.gamma * unit.numel * (ranks - 1) / ranks), plan.units[at].name


@pytest.mark.parametrize("case", [Case(), Case(bf16=True, frozen="q_proj")])
def test_on_a_board_nothing_is_sent_and_the_model_is_there_once(five: Ranks, case: Case) -> None:
    """Counted by pages, each shared out over the ranks that have it; gradients' are given back."""
    answers = run(five, on_board, 4, case)
    layout = answers[0]["layout"]
    assert all(answer["calls"] == [] for answer in answers)
    model = sum(layout.resting)
    assert model <= sum(answer["pages"] for answer in answers) <= model + 4 * PAGE
    assert all(answer["pages"] < 0.4 * model for answer in answers)
    assert layout.resting == tuple(4 * answer["pieces"] for answer in answers)


@pytest.mark.parametrize("where", ["before", "evaluation", "forward", "backward"])
def test_no_rank_writes_what_another_still_reads(five: Ranks, where: str) -> None:
    """One stops in a pass, or before it has stepped: the others wait, also where no gradient is to be sent."""
    assert run(five, held_up, 3, where) == [False] * 3


@pytest.mark.parametrize("deaf", [0, 2])
def test_where_one_rank_cannot_open_the_board_all_send_and_the_first_says_why(five: Ranks, deaf: int) -> None:
    answers = run(five, without, 3, deaf)
    assert [shares for shares, _ in answers] == [False] * 3
    sentence = f"rank {deaf}: [Errno 13] Permission denied: '/proc/1/fd/5'"
    assert [said for _, said in answers] == [
        [f"the ranks share no memory and send over gloo instead: {sentence}"], [], [],
    ]  # fmt: skip


def test_replicas_add_up_what_each_owns_and_send_nothing_in_the_step(five: Ranks) -> None:
    answers = run(five, counted_step, 4, Case(replicas=2).sending)
    plan = answers[0]["plan"]
    for rank, answer in enumerate(answers):
        sums = [call for call in answer["passes"] if "allreduce" in call]
        assert len(sums) == len(plan.units) and answer["step"] == []
        assert answer["traffic"].replicate_reduced == 4 * plan.load(rank % 2)
        assert len(answer["passes"]) == len(sums) + answer["traffic"].messages - answer["compared"]


def test_the_next_unit_is_gathered_while_one_computes(five: Ranks) -> None:
    forward = ["gather 0", "gather 1", "gather 2", "forward 1", "gather 3", "forward 2", "gather 4", "forward 3"]
    backward = ["gather 3", "backward 4", "gather 2", "backward 3", "gather 1", "backward 2", "backward 1"]
    assert run(five, order_of_a_step, 2, 4, True) == [[*forward, "forward 4", *backward]] * 2
    gathers = [f"gather {unit}" for unit in range(5)]
    passes = [f"forward {block}" for block in (1, 2, 3, 4)] + [f"backward {block}" for block in (4, 3, 2, 1)]
    assert run(five, order_of_a_step, 2, 4, False) == [gathers + passes] * 2


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_ranks_hold_one_model_and_one_state_between_them(five: Ranks, ranks: int) -> None:
    answers = run(five, counted_step, ranks, Case().sending)
    plan = answers[0]["plan"]
    shapes = {name: shape for unit in plan.units for name, shape in unit.shapes.items()}
    whole_model = 4 * sum(numel(shape) for shape in shapes.values())
    outer = 4 * sum(numel(s) for name, s in shapes.items() if len(s) != 2 or "embed" in name or "lm_head" in name)
    assert sum(answer["resident"] for answer in answers) == whole_model
    assert sum(answer["moments"] for answer in answers) == whole_model - outer + 2 * outer
    assert all(answer["resident"] == 4 * plan.load(rank) for rank, answer in enumerate(answers))
    assert ranks == 1 or not any(any(answer["full"]) for answer in answers)


def test_stock_fsdp2_holds_and_allocates_hardly_less(five: Ranks) -> None:
    """Held are parameters and moments; the peak of a step adds gradients, buffers and activations."""
    answers = run(five, beside_stock, 4)
    for what, most in (("held_bytes", 1.2), ("peak_bytes", 1.25)):
        ours, stock = (max(getattr(answer[name], what) for answer in answers) for name in ("ours", "fsdp2"))
        assert 0 < ours <= most * stock, what


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("ranks", "mp", "dtype", "frozen", "reshard", "replicas", "sharing"),
    [
        (4, MixedPrecisionPolicy(), FP32, "", True, 1, "never"),
        (3, MixedPrecisionPolicy(), FP32, "", False, 1, "never"),
        (4, MixedPrecisionPolicy(), BF16, "", True, 1, "never"),
        (3, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), FP32, "", True, 1, "never"),
        (4, MixedPrecisionPolicy(), FP32, "gate", True, 2, "never"),
        (1, MixedPrecisionPolicy(), FP32, "", True, 1, "auto"),
        (4, MixedPrecisionPolicy(), FP32, "", True, 1, "auto"),
        (4, MixedPrecisionPolicy(), BF16, "", True, 1, "auto"),
        (3, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), FP32, "gate", True, 1, "auto"),
    ],
)
def test_the_memory_that_is_counted_on_is_what_a_step_takes(
    five: Ranks, ranks: int, mp: MixedPrecisionPolicy, dtype: torch.dtype, frozen: str, reshard: bool, replicas: int,
    sharing: Sharing,
) -> None:  # fmt: skip
    for taken, counted_on in run(five, peak_beside_estimate, ranks, mp, dtype, frozen, reshard, replicas, sharing):
        assert 0.8 * counted_on <= taken <= counted_on


def test_evaluations_and_failed_passes_leave_no_trace(five: Ranks) -> None:
    case = Case(steps=3)
    assert apart(whole(run(five, interrupted, 3, case)), whole([reference_run(3, case)])) == 0.0


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("layers", "rank 1 has another model than rank 0"),
        ("plan", "rank 1 has another plan than rank 0"),
        ("version", "rank 1 has another torch version than rank 0: 2.0.0 instead of"),
        ("memory", "rank 1: the model takes 0.00 GiB where 0.00 GiB are free; use more ranks"),
        ("setting", "rank 1 has another sharding setting than rank 0"),
        ("sharing", "rank 1: sharing 'always' is neither auto nor never"),
        ("view", "rank 1: parameter model.layers.1.mlp.up_proj.weight is a view into a larger tensor"),
        ("strided", "rank 1: parameter model.layers.1.mlp.up_proj.weight is not contiguous"),
        ("sparse", "rank 1: parameter model.layers.1.mlp.up_proj.weight is sparse"),
        ("complex", "rank 1: parameter model.layers.1.mlp.up_proj.weight is complex"),
        ("dtensor", "rank 1: parameter model.layers.1.mlp.up_proj.weight is a DTensor"),
        ("shared", "rank 1: parameter model.layers.1.mlp.up_proj.weight shares its memory with"),
        ("half", "rank 1: unit model.layers.1 mixes torch.float16, torch.float32"),
    ],
)
def test_what_one_rank_cannot_shard_all_refuse_and_no_weight_is_touched(five: Ranks, how: str, sentence: str) -> None:
    answers = run(five, refused, 3, (1,), how)
    assert all(said.startswith(sentence) and untouched for said, untouched in answers), answers


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        ((2, 3), "rank 2 has another model than rank 0"),
        ((3,), "rank 3 has another model than rank 2"),
        ((1,), "rank 1 has another model than rank 0"),
        ((1, 3), "rank 1 has another model than rank 0"),
    ],
)
def test_replicas_that_differ_all_hear_of_the_same_rank(five: Ranks, odd: tuple[int, ...], sentence: str) -> None:
    answers = run(five, refused, 4, odd, "layers", 2)
    assert {said.split(":")[0] for said, _ in answers} == {sentence} and all(untouched for _, untouched in answers)


@pytest.fixture(scope="module")
def bereaved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """All groups of LOSSES in one, at work."""
    groups = groups_of_losses()
    with Ranks(sum(map(len, groups.values())), tmp_path_factory.mktemp("bereaved")) as ranks:
        ranks.start([rank for group in groups.values() for rank in group], meets_a_loss)
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_who_is_lost_is_named_by_all_others_and_nobody_else(bereaved: Ranks, name: str) -> None:
    group, dies = groups_of_losses()[name], LOSSES[name].dies
    others = [rank for rank in group if rank != group[dies]]
    assert [bereaved.answer(rank) for rank in others] == [(group[dies],)] * len(others)
