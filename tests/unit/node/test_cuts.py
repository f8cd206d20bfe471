"""Where a model is cut, against all the ways to cut it; and that a stage is built from its own weights alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peerloom.node.worker.cuts import EMBEDDING_SHARE, cut, stage_layers
from peerloom.node.worker.stage_model import build_stage
from peerloom.protocol.runspec import ModelSpec, RunSpec
from peerloom.protocol.spec_pipeline import PipelineSpec


def ways(layers: int, stages: int) -> Iterator[list[range]]:
    """All of them, every stage with a layer at least."""
    for inner in itertools.combinations(range(1, layers), stages - 1):
        ends = [0, *inner, layers]
        yield [range(*pair) for pair in itertools.pairwise(ends)]


def costliest(costs: list[float], spans: list[range]) -> float:
    return max(sum(costs[layer] for layer in span) for span in spans)


@pytest.mark.parametrize("stages", range(1, 6))
def test_no_other_cut_has_a_cheaper_costliest_stage(stages: int) -> None:
    rng = random.Random(stages)
    for layers in range(stages, 11):
        for _ in range(10):
            costs = [rng.choice((0.0, 1.0, 1.0, rng.uniform(0, 5))) for _ in range(layers)]
            found = cut(costs, stages)
            assert found in list(ways(layers, stages))
            assert costliest(costs, found) == pytest.approx(min(costliest(costs, way) for way in ways(layers, stages)))
    with pytest.raises(ValueError, match="cannot be cut"):
        cut([1.0] * (stages - 1), stages)


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("vocabulary", [256, 4096, 50_000])
def test_a_llama_is_cut_as_evenly_as_its_layers_allow(stages: int, vocabulary: int) -> None:
    hidden, layer_parameters, length = 64, 4 * 64 * 64 + 3 * 64 * 176, 128
    for layers in range(stages, 11):
        spans = stage_layers(
            PipelineSpec(stages=stages),
            layers=layers,
            hidden=hidden,
            layer_parameters=layer_parameters,
            vocabulary=vocabulary,
            length=length,
        )
        costs = [float(layer_parameters + length * hidden)] * layers  # of a token: multiplications, and attention
        costs[0] += EMBEDDING_SHARE * vocabulary * hidden
        costs[-1] += vocabulary * hidden
        assert costliest(costs, spans) == pytest.approx(min(costliest(costs, way) for way in ways(layers, stages)))


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
