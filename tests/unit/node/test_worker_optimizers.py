"""The inner optimizers in the training task: what each takes, and that all resume and learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from peerloom.node import checkpoint
from peerloom.node.worker.inner import InnerLoop
from peerloom.node.worker.model import build_model
from peerloom.optim.soap import SOAP
from tests.unit.node.test_worker import assert_equal, state
from tests.unit.node.tiny import Optimizer, never, task, tiny_spec

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap", "basis_rotated"])
def test_every_optimizer_resumes_bit_for_bit(source: Path, tmp_path: Path, optimizer: Optimizer) -> None:
    spec = tiny_spec(source)
    spec = replace(spec, train=replace(spec.train, optimizer=optimizer, rotation_freq=3))
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


def test_a_checkpoint_whose_moments_do_not_fit_is_passed_over_for_the_one_before(source: Path, tmp_path: Path) -> None:
    spec = tiny_spec(source)
    first = task(spec, tmp_path)
    first.train(0, never)
    first.finish(mix=False)
    first.save()
    found, _ = checkpoint.newest_intact(first._folder)
    assert found is not None
    wrong = {name: torch.zeros(()) for name in found.optimizer}
    checkpoint.save(first._folder, replace(found, meta=replace(found.meta, round=9), optimizer=wrong))
    again = task(spec, tmp_path)
    assert again._position.round == 1 and "passed over" in again.ready().note
    assert_equal(again._inner.state(), first._inner.state())


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
    assert inner._matrix is not None and inner._adam is not None
    assert inner._matrix.param_groups[0]["lr"] == pytest.approx(0.02)  # half of its own peak, as AdamW of its
    assert inner._adam.param_groups[0]["lr"] == pytest.approx(spec.train.learning_rate / 2)


def test_soap_takes_the_hidden_matrices_with_the_run_s_settings(source: Path) -> None:
    """The optimizer of `optim` itself, on the hidden matrices alone: one that is fed the same gradients agrees."""
    spec = tiny_spec(source)
    train = replace(
        spec.train, optimizer="soap", beta1=0.8, beta2=0.9, eps=1e-7, weight_decay=0.3, rotation_freq=2, clip_norm=0.0
    )
    inner, twin = InnerLoop(build_model(spec), train), build_model(spec)
    hidden = {name: each for name, each in twin.named_parameters() if ".layers." in name and each.dim() == 2}
    oracle = SOAP(hidden.values(), train.learning_rate / 2, (0.8, 0.9), 0.9, 1e-7, 0.3, 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter, other in zip(inner._model.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other.grad = parameter.grad.clone()
        inner.update(train.learning_rate / 2)
        oracle.step()
    ours = dict(inner._model.named_parameters())
    assert all(torch.equal(ours[name], each) for name, each in hidden.items())
    kept = inner.state()
    assert {key.split("/", 1)[1] for key in kept if key.startswith("left/")} == set(hidden)
    assert {key.split("/", 1)[1] for key in kept if key.startswith("exp_avg/")} == set(ours)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap", "basis_rotated"])
def test_matrices_decay_and_vectors_do_not(source: Path, optimizer: Optimizer) -> None:
    """With gradients of zero the decay is all that a step does; SOAP's first step moves no hidden matrix at all."""
    spec = tiny_spec(source)
    train = replace(spec.train, optimizer=optimizer, weight_decay=0.5, muon_learning_rate=0.04)
    inner = InnerLoop(build_model(spec), train)
    before = {name: parameter.detach().clone() for name, parameter in inner._model.named_parameters()}
    for parameter in inner._model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inner.update(train.learning_rate)
    for name, parameter in inner._model.named_parameters():
        hidden = ".layers." in name and parameter.dim() == 2
        rate = {"muon": 0.04, "soap": 0.0}.get(optimizer, train.learning_rate) if hidden else train.learning_rate
        kept = 1 - 0.5 * rate if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), kept * before[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw", "basis_rotated"])
def test_rotated_matrices_and_the_rest_are_clipped_apart(
    source: Path, optimizer: Literal["adamw", "basis_rotated"]
) -> None:
    """Seen in the first moments after one step, whose norm no rotation changes."""
    spec = tiny_spec(source)
    train = replace(spec.train, optimizer=optimizer, clip_norm=0.5)
    inner = InnerLoop(build_model(spec), train)
    for parameter in inner._model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    inner.update(1e-3)
    squares = {True: 0.0, False: 0.0}
    for key, value in inner.state().items():
        if key.startswith("exp_avg/"):
            squares[".layers." in key and value.dim() == 2] += float(value.square().sum())
    parts = list(squares.values()) if optimizer == "basis_rotated" else [sum(squares.values())]
    assert [part**0.5 for part in parts] == pytest.approx([0.5 * (1 - train.beta1)] * len(parts), rel=1e-4)


def test_the_hidden_matrices_are_rotated_and_the_rest_not(source: Path) -> None:
    spec = tiny_spec(source)
    spec = replace(
        spec,
        train=replace(spec.train, optimizer="basis_rotated", rotation_source="1st", rotation_freq=2),
        model=replace(spec.model, tie_embeddings=False),
    )
    inner = InnerLoop(build_model(spec), spec.train)
    inner.step(torch.randint(0, 256, (2, 17)), spec.train.learning_rate / 2)
    kept = inner.state()
    shapes = {name: parameter.shape for name, parameter in inner._model.named_parameters()}
    rotated = {key.split("/", 1)[1] for key in kept if key.startswith("left/")}
    assert rotated == {name for name, shape in shapes.items() if ".layers." in name and len(shape) == 2}
    assert not any(key.startswith("left_cov/") for key in kept)
    assert {key.split("/", 1)[1] for key in kept if key.startswith("exp_avg/")} == set(shapes)
    assert inner._adam is not None and {group["lr"] for group in inner._adam.param_groups} == {
        spec.train.learning_rate / 2
    }
    name = min(rotated)
    with pytest.raises(ValueError, match=f"right of {name} has shape"):
        inner.load_state({**kept, f"right/{name}": torch.eye(3)})


@pytest.mark.parametrize("optimizer", ["muon", "soap", "basis_rotated"])
def test_each_lowers_the_held_out_loss(source: Path, tmp_path: Path, optimizer: Optimizer) -> None:
    spec = tiny_spec(source, local_steps=10)
    worker = task(replace(spec, train=replace(spec.train, optimizer=optimizer)), tmp_path)
    before = worker.ready().held_out_loss
    for number in range(4):
        worker.train(number, never)
        worker.finish(mix=False)
    after = worker._position.held_out_loss
    assert before is not None and after is not None and after < before - 1.5
