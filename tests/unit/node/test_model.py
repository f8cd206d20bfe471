"""The model: equal on every node, whatever the state of the process; faults of the spec in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from peerloom.node.worker.model import build_model, init_digest, layout_digest
from peerloom.node.worker.schedule import learning_rate
from peerloom.optim.flat import FlatParameters
from peerloom.protocol.errors import SpecError
from peerloom.protocol.runspec import ModelSpec, RunSpec, TrainSpec
from tests.unit.node.tiny import MODEL

SPEC = RunSpec(model=MODEL)


def digests(spec: RunSpec) -> tuple[str, str]:
    flat = FlatParameters(build_model(spec).named_parameters())
    return init_digest(flat.flat), layout_digest(flat.layout())


def test_equal_on_every_node_and_the_global_generator_untouched() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = digests(SPEC)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert digests(SPEC) == first
    other_seed, other_size = digests(replace(SPEC, seed=2)), digests(replace(SPEC, model=replace(MODEL, layers=2)))
    assert other_seed[0] != first[0] and other_seed[1] == first[1]
    assert other_size[1] != first[1]


def test_layout_digest_tells_names_from_shapes() -> None:
    layouts = [(("a", (1, 2)),), (("a", (12,)),), (("a", (1,)), ("b", (2,))), (("b", (1,)), ("a", (2,)))]
    assert len({layout_digest(layout) for layout in layouts}) == len(layouts)
    assert layout_digest(layouts[0]) == blake3(b'[["a",[1,2]]]').hexdigest()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2"])
def test_architectures_by_name_take_the_sizes(architecture: str) -> None:
    model: Any = build_model(replace(SPEC, model=replace(MODEL, architecture=architecture)))
    logits = model(input_ids=torch.zeros(1, 5, dtype=torch.long)).logits
    assert logits.shape == (1, 5, 256)
    assert model.config.hidden_size == MODEL.hidden_size and model.config.num_hidden_layers == MODEL.layers
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_default_attention_is_sdpa_and_sizes_are_as_the_spec_counts() -> None:
    model: Any = build_model(RunSpec())
    assert model.config._attn_implementation == "sdpa"
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    assert sum(parameter.numel() for parameter in model.parameters()) - norms == ModelSpec().parameters()


def test_a_local_folder_is_loaded_in_fp32(tmp_path: Path) -> None:
    built: Any = build_model(SPEC)
    built.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    loaded = build_model(replace(SPEC, model=ModelSpec(path=str(tmp_path / "model"))))
    for mine, theirs in zip(loaded.parameters(), built.parameters(), strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, theirs.float())


@pytest.mark.parametrize("architecture", ["nothing_like_it", "vit"])
def test_an_architecture_that_is_none_is_a_spec_error(architecture: str) -> None:
    with pytest.raises(SpecError, match=rf"model\.architecture: .*{architecture}") as caught:
        build_model(replace(SPEC, model=replace(MODEL, architecture=architecture)))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_a_spec_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"model\.path: .* cannot be loaded") as caught:
        build_model(replace(SPEC, model=ModelSpec(path=str(tmp_path))))
    assert "\n" not in str(caught.value)


TRAIN = TrainSpec(learning_rate=1.0, warmup_steps=10, total_steps=110, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (60, 0.55), (110, 0.1), (5000, 0.1)]
)
def test_warm_up_cosine_floor(step: int, rate: float) -> None:
    assert learning_rate(step, TRAIN) == pytest.approx(rate)


@pytest.mark.parametrize(("after", "share"), [(0, 0.1), (4, 0.5), (9, 1.0), (50, 1.0)])
def test_an_adoption_warms_up_again(after: int, share: float) -> None:
    step = 300 + after
    assert learning_rate(step, TRAIN, adopted_at=300) == pytest.approx(share * learning_rate(step, TRAIN))


def test_no_warm_up_at_all() -> None:
    flat = replace(TRAIN, warmup_steps=0)
    assert learning_rate(0, flat) == learning_rate(0, flat, adopted_at=0) == 1.0
