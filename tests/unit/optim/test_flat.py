"""Flat parameters: views, order, ties, 16-bit weights, gradients, copies, and every refusal."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from peerloom.optim.flat import FlatParameters
from tests.unit.optim.memory import shared


class Tied(nn.Module):
    """An embedding tied to the output layer, a bias, and buffers that must stay out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("rotary", torch.ones(7))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


def test_parameters_become_views_in_order_and_keep_their_values() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])

    flat = FlatParameters(model.named_parameters())

    assert flat.layout() == (("0.weight", (4, 3)), ("0.bias", (4,)), ("1.weight", (4,)), ("1.bias", (4,)))
    assert flat.numel == 24 and torch.equal(flat.flat, before)
    flat.flat.fill_(2.0)
    assert all(bool((p == 2).all()) for p in model.parameters())
    with torch.no_grad():
        model[0].bias.fill_(-1.0)
    assert torch.equal(flat.flat[12:16], torch.full((4,), -1.0))


def test_a_training_step_on_the_module_changes_the_flat_tensor() -> None:
    model = Tied()
    flat = FlatParameters(model.named_parameters())
    before = flat.flat.clone()
    model(torch.tensor([1, 2])).square().sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert int((flat.flat != before).sum()) == flat.numel
    flat.check()


def test_tied_parameters_take_one_place_and_stay_tied() -> None:
    model = Tied()
    flat = FlatParameters(model.named_parameters(remove_duplicate=False))
    assert flat.layout() == (("embed.weight", (5, 3)), ("head.bias", (5,)))
    assert flat.aliases == {"head.weight": "embed.weight"}
    flat.flat.fill_(3.0)
    assert model.head.weight is model.embed.weight and bool((model.head.weight == 3).all())


def test_two_parameters_on_the_same_memory_count_as_tied() -> None:
    first = nn.Parameter(torch.arange(6.0).view(2, 3))
    second = nn.Parameter(first.detach())
    flat = FlatParameters([("first", first), ("second", second)])
    assert flat.numel == 6 and flat.aliases == {"second": "first"}
    flat.flat.zero_()
    assert bool((second == 0).all())


def test_a_given_buffer_is_used() -> None:
    memory = shared(40)
    model = nn.Linear(3, 2)
    flat = FlatParameters(model.named_parameters(), buffer=memory[16:24])
    assert torch.equal(memory[16:22].view(2, 3), model.weight)
    memory[22:24] = 9.0
    assert bool((model.bias == 9).all()) and flat.flat.data_ptr() == memory[16:].data_ptr()


def test_sixteen_bit_and_strided_parameters_become_plain_fp32() -> None:
    half = nn.Parameter(torch.tensor([1.5, -2.25], dtype=torch.bfloat16))
    strided = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    flat = FlatParameters([("half", half), ("strided", strided)])
    assert half.dtype == torch.float32 and strided.is_contiguous()
    assert flat.flat.tolist() == [1.5, -2.25, 0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_gradients_are_views_of_one_flat_tensor() -> None:
    model = Tied()
    model.head.bias.requires_grad_(False)
    flat = FlatParameters(model.named_parameters(), grads=True)
    assert flat.gradients is not None and model.head.bias.grad is None
    model(torch.tensor([0, 4])).sum().backward()
    assert model.embed.weight.grad is not None
    assert torch.equal(flat.gradients[:15].view(5, 3), model.embed.weight.grad) and bool(flat.gradients.any())
    flat.zero_grad()
    assert not flat.gradients.any() and not model.embed.weight.grad.any()


def test_zero_grad_without_a_flat_gradient_drops_the_gradients() -> None:
    model = nn.Linear(2, 1)
    flat = FlatParameters(model.named_parameters())
    model(torch.ones(2)).backward()
    flat.zero_grad()
    assert flat.gradients is None and model.weight.grad is None


def test_copies_in_and_out() -> None:
    model = nn.Linear(2, 2)
    flat = FlatParameters(model.named_parameters())
    flat.copy_in(torch.arange(6.0))
    out = torch.empty(6, dtype=torch.float64)
    flat.copy_out(out)
    assert out.tolist() == [0, 1, 2, 3, 4, 5] and model.bias.tolist() == [4, 5]
    for copy in (flat.copy_in, flat.copy_out):
        with pytest.raises(ValueError, match="flat with 6 elements"):
            copy(torch.empty(5))


def test_check_names_the_parameter_that_was_moved() -> None:
    model = nn.Linear(2, 2)
    flat = FlatParameters(model.named_parameters())
    model.bias.data = model.bias.data.clone()
    with pytest.raises(ValueError, match="parameter bias was moved away"):
        flat.check()


whole = torch.arange(6.0)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([], "no parameters"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "name a appears twice"),
        ([("count", torch.zeros(2, dtype=torch.int64))], "parameter count is torch.int64"),
        ([("wide", torch.zeros(2, dtype=torch.float64))], "parameter wide is torch.float64"),
        ([("ghost", torch.zeros(2, device="meta"))], "parameter ghost is on the meta device"),
        ([("here", torch.zeros(2)), ("there", torch.zeros(2, device="meta"))], "parameter there is on"),
        ([("left", whole[:4]), ("right", whole[3:])], "left and right share part of their memory"),
    ],
)
def test_parameters_that_cannot_be_flat_are_refused(named: list[tuple[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlatParameters(named)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.empty(5), "the buffer has 5 elements; the parameters take 6"),
        (torch.empty(6, dtype=torch.float64), "must be flat, contiguous and float32"),
        (torch.empty(2, 3), "not torch.float32 of shape (2, 3)"),
        (torch.empty(12)[::2], "must be flat, contiguous"),
        (torch.empty(6, device="meta"), "leave the buffer out and use copy_out"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused_and_the_module_left_alone(buffer: torch.Tensor, message: str) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.data_ptr()
    with pytest.raises(ValueError, match=re.escape(message)):
        FlatParameters(model.named_parameters(), buffer=buffer)
    assert model.weight.data_ptr() == before
