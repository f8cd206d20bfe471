"""Checkpoints of a sharded model, in parts: other world sizes, plain models, transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.unit.optim.matrix_cases import Case, continued, loss_of, make_model, make_optimizer, take_up
from tests.unit.optim.ranks import Ranks

ROTATED = {"lr": 3e-3, "freq": 2, "eps": 1e-5}  # a smaller eps lets what is near 0 in the basis count, noise and all


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(4, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


def losses(four: Ranks, ranks: int, *arguments: Any) -> list[float]:
    answers = four.run(continued, ranks, *arguments)[:ranks]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return [float(loss) for loss in np.mean(answers, axis=0)]


# the eigenbasis of a gradient that is not of full rank turns with the last bit of a sum, whatever the checkpoint
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        (Case(dtype=torch.float64), 1e-6),
        (Case(dtype=torch.float64, tied=True), 1e-6),
        (Case(dtype=torch.float64, matrix="soap", settings={"lr": 3e-3, "freq": 2}), 1e-3),
        (Case(dtype=torch.float64, matrix="basis_rotated", settings=ROTATED), 1e-3),
    ],
    ids=["muon", "tied", "soap", "basis rotated"],
)
def test_four_ranks_then_two_then_three_then_one_go_on_as_one(
    four: Ranks, tmp_path: Path, case: Case, tolerance: float
) -> None:
    lives = [(4, 1), (2, 1), (3, 1), (1, 1)]
    assert_go_on_as_one(four, tmp_path, case, lives, tolerance)


def test_replicas_write_once_and_go_on_as_one(four: Ranks, tmp_path: Path) -> None:
    """Two by two, then three that only shard, then two replicas of one, then two by two again."""
    case = Case(dtype=torch.float64)
    assert_go_on_as_one(four, tmp_path, case, [(4, 2), (3, 1), (2, 2), (4, 2)], 1e-6)
    for turn, shards in ((0, 2), (1, 3), (2, 1), (3, 2)):
        files = sorted(path.name for path in (tmp_path / str(turn)).glob("m*-*-of-*"))
        parts = [f"{rank + 1:05d}-of-{shards:05d}.safetensors" for rank in range(shards)]
        assert files == [f"{kind}-{part}" for kind in ("model", "moments") for part in parts]


@pytest.mark.parametrize(
    "case",
    [
        Case(tied=True),
        Case(matrix="soap", settings={"freq": 1}),
        Case(matrix="basis_rotated", settings=ROTATED),
        Case(matrix="basis_rotated", settings=ROTATED | {"source": "1st", "geometry": "unilateral"}),
    ],
    ids=["muon, tied", "soap", "basis rotated", "basis rotated, one side by the first moment"],
)
def test_no_bit_changes_on_the_way_through_other_world_sizes(four: Ranks, tmp_path: Path, case: Case) -> None:
    losses(four, 4, case, range(2), None, tmp_path / "0")
    first = tensors_of(tmp_path / "0")
    assert len(first) > 2 * 18, "parameters and moments"
    for turn, (ranks, replicas) in enumerate([(2, 1), (3, 1), (4, 2), (1, 1)], 1):
        source, target = tmp_path / str(turn - 1), tmp_path / str(turn)
        losses(four, ranks, replace(case, replicas=replicas), range(2, 2), source, target)
        found = tensors_of(target)
        assert found.keys() == first.keys()
        assert all(torch.equal(found[key], value) for key, value in first.items()), (ranks, replicas)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of all files; AssertionError for one that is there twice."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        part = safetensors.torch.load_file(path)
        assert not part.keys() & found.keys()
        found |= part
    return found


def assert_go_on_as_one(four: Ranks, folder: Path, case: Case, lives: list[tuple[int, int]], tolerance: float) -> None:
    """Lives of (ranks, replicas), two steps each, every one from the checkpoint of the one before."""
    straight = losses(four, 1, case, range(2 * len(lives)), None, None)
    found: list[float] = []
    for turn, (ranks, replicas) in enumerate(lives):
        source, steps = folder / str(turn - 1) if turn else None, range(2 * turn, 2 * turn + 2)
        found += losses(four, ranks, replace(case, replicas=replicas), steps, source, folder / str(turn))
    np.testing.assert_allclose(found, straight, atol=tolerance)


def test_transformers_loads_the_folder_and_a_plain_model_too(four: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "saved"
    losses(four, 3, Case(), range(2), None, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).train()
    ours = make_model(Case())
    take_up(folder, ours, make_optimizer(ours, Case()))
    assert float(loss_of(theirs, 9, slice(None), 4).detach()) == float(loss_of(ours, 9, slice(None), 4).detach())
    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
