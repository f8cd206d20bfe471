"""Where a model is cut, against all the ways to cut it; and that a stage is built from its own weights alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peerloom.node.worker.cuts import cut
from peerloom.node.worker.stage_costs import Sizes, layer_costs, optimizer_products, stage_layers
from peerloom.node.worker.stage_model import build_stage, stage_outline
from peerloom.protocol.runspec import ModelSpec, RunSpec, TrainSpec
from peerloom.protocol.spec_pipeline import PipelineSpec


def ways(layers: int, stages: int) -> Iterator[list[range]]:
    """All of them, every stage with a layer at least."""
    for inner in itertools.combinations(range(1, layers), stages - 1):
        ends = [0, *inner, layers]
        yield [range(*pair) for pair in itertools.pairwise(ends)]


def costliest(costs: list[list[float]], spans: list[range]) -> float:
    return max(sum(row[layer] for layer in span) for row, span in zip(costs, spans, strict=True))


@pytest.mark.parametrize("stages", range(1, 6))
def test_no_other_cut_has_a_cheaper_costliest_stage(stages: int) -> None:
    rng = random.Random(stages)
    for layers in range(stages, 11):
        for _ in range(10):
            costs = [[rng.choice((0.0, 1.0, 1.0, rng.uniform(0, 5))) for _ in range(layers)] for _ in range(stages)]
            found = cut(costs)
            assert found in list(ways(layers, stages))
            assert costliest(costs, found) == pytest.approx(min(costliest(costs, way) for way in ways(layers, stages)))
    with pytest.raises(ValueError, match="cannot be cut"):
        cut([[1.0] * (stages - 1)] * stages)


def llama(vocabulary: int, optimizer: str, layers: int = 8) -> tuple[RunSpec, Sizes]:
    """Of width 512, two stages of 1,024 tokens an update."""
    model = ModelSpec(hidden_size=512, intermediate_size=1408, layers=layers, vocab_size=vocabulary)
    train = TrainSpec(optimizer=optimizer)  # type: ignore[arg-type]
    spec = RunSpec(method="pipeline", model=model, train=train, pipeline=PipelineSpec(stages=2))
    return spec, Sizes.of(stage_outline(spec, 0))


@pytest.mark.parametrize(
    ("vocabulary", "optimizer", "lengths"),
    [
        (256, "adamw", [4, 4]),
        (256, "basis_rotated", [4, 4]),
        (32_000, "adamw", [7, 1]),  # the head weighs as much as five layers
        (32_000, "basis_rotated", [5, 3]),  # of which each has as much again for its bases, and the head has none
    ],
)
def test_stages_are_cut_by_their_time_and_the_optimizer_s_part_of_it(
    vocabulary: int, optimizer: str, lengths: list[int]
) -> None:
    spec, sizes = llama(vocabulary, optimizer)
    sizes = replace(sizes, layers=8)
    assert [len(span) for span in stage_layers(spec, sizes)] == lengths
    assert [len(stage_outline(spec, stage).span) for stage in (0, 1)] == lengths


def test_what_a_layer_costs_follows_the_spec() -> None:
    spec, sizes = llama(256, "basis_rotated")
    assert sizes.matrices.count((512, 512)) == 4 and sizes.layer == 4 * 512**2 + 3 * 512 * 1408 + 2 * 512
    early, late = (layer_costs(spec, sizes, stage)[1] for stage in (0, 1))
    assert early > late  # its bases are refreshed more often
    by_optimizer = [optimizer_products(512, 1408, TrainSpec(optimizer=each)) for each in ("adamw", "muon", "soap")]  # type: ignore[arg-type]
    assert by_optimizer[0] == 0 < by_optimizer[1] < by_optimizer[2]
    rotated = TrainSpec(optimizer="basis_rotated", rotation_freq=10**6)
    products = 512**2 * 1408 + 512 * 1408**2
    assert optimizer_products(512, 1408, rotated) == pytest.approx(3 * products, rel=1e-3)
    alone = replace(rotated, rotation_source="1st", rotation_geometry="unilateral")
    assert optimizer_products(512, 1408, alone) == pytest.approx(2 * 512**2 * 1408, rel=1e-3)


class Allocations(TorchDispatchMode):
    """Sums the bytes of every storage that an operation makes, but on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._seen: dict[int, Tensor] = {}  # kept, so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs or {}))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            where = tensor.untyped_storage().data_ptr()
            if where not in given and where not in self._seen:
                self._seen[where] = tensor
                self.total += tensor.untyped_storage().nbytes()
        return made


def _tensors(tree: Any) -> list[Tensor]:
    flat = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in flat if isinstance(leaf, Tensor) and leaf.device.type != "meta"]


@pytest.mark.parametrize(("stages", "tied", "stored"), [(4, True, False), (4, False, True), (1, True, False)])
def test_a_stage_is_built_without_the_rest_of_the_model(tmp_path: Path, stages: int, tied: bool, stored: bool) -> None:
    model = ModelSpec(hidden_size=64, intermediate_size=176, layers=8, tie_embeddings=tied)
    spec = RunSpec(method="pipeline", model=model, pipeline=PipelineSpec(stages=stages))
    if stored:
        from peerloom.node.worker.model import build_model

        build_model(spec).save_pretrained(tmp_path / "whole")
        spec = RunSpec(
            method="pipeline", model=ModelSpec(path=str(tmp_path / "whole")), pipeline=PipelineSpec(stages=stages)
        )
    for stage in range(stages):
        with Allocations() as allocations:
            built = build_stage(spec, stage)
        own = sum(parameter.nbytes for _, parameter in built.named_in_whole())
        read = own if stored else 0  # each is read beside its place, and let go
        assert own <= allocations.total <= 1.2 * own + read, stage
