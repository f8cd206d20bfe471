"""Estimates: the form in the activations against the explicit one, what is perturbed and what is not, MeZO."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peerloom.optim.subcge import MeZO, NotFinite, SubCGE
from peerloom.optim.subcge_random import NORMAL_BITS, coordinates
from tests.unit.optim.subcge.models import IDS, bits, equal, loss_of, tied

SETTINGS = {"rank": 3, "period": 10, "eps": 1e-2, "lr": 1e-3, "run_seed": 5}


def direction(flow: SubCGE, seed: int, period: int = 0) -> dict[str, Tensor]:
    """Z of a seed, by tensor, made here from the places and the normals."""
    places = coordinates(torch.tensor([seed]), flow._keys, 3)[0].tolist()
    found = {
        target.name: flow._weights.subspace(target, period).direction(place)
        for target, place in zip(flow._matrices, places, strict=True)
    }
    parts = flow._layout.split(flow._layout.normals(seed))
    return found | {target.name: part for target, part in zip(flow._small, parts, strict=True)}


def make(model: nn.Module, **changes: object) -> SubCGE:
    return SubCGE(model, **(SETTINGS | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, -(2**63)])
def test_activations_give_what_changed_weights_give(seed: int) -> None:
    """The tied matrix moves once, in both its modules; weights in reach of a hook are never written."""
    hooked, explicit = tied(), tied()
    one, other = make(hooked), make(explicit, hooks=False)
    assert one.names == other.names == ("embed.weight", "conv.weight", "hidden.weight", "hidden.bias",
                                        "norm.weight", "norm.bias")  # fmt: skip
    for sign in (1, -1):
        one.perturb(seed, sign)
        other.perturb(seed, sign)
        assert torch.equal(hooked.embed.weight, tied().embed.weight)
        assert torch.equal(hooked.hidden.weight, tied().hidden.weight)
        assert not torch.equal(explicit.embed.weight, tied().embed.weight)
        torch.testing.assert_close(hooked(IDS), explicit(IDS), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(hooked(IDS), tied()(IDS), atol=1e-4)
    one.restore()
    other.restore()
    assert equal(bits(hooked), bits(tied())) and equal(bits(explicit), bits(tied()))
    assert torch.equal(hooked(IDS), tied()(IDS))


def test_transposed_linear_of_gpt2() -> None:
    from transformers.pytorch_utils import Conv1D

    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    outputs = []
    for hooks in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            layer = Conv1D(5, 4)
        flow = make(layer, hooks=hooks)
        flow.perturb(3, 1)
        outputs.append(layer(x).detach())
        flow.restore()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)


def test_the_scalar_is_the_slope_along_the_direction() -> None:
    model = tied()
    flow = make(model, eps=1e-3)
    for seed in range(5):
        model.zero_grad()
        loss_of(model).backward()
        z = direction(flow, seed)
        assert set(z) == set(flow.names)
        slope = sum(float((one.grad * z[name]).sum()) for name, one in model.named_parameters() if one.grad is not None)
        assert flow.estimate(lambda: loss_of(model), seed) / 2**16 == pytest.approx(slope, rel=0.02, abs=0.02)


@pytest.mark.parametrize("step", [0, 12])
def test_a_message_moves_every_tensor_by_lr_times_its_scalar_along_its_own_direction(step: int) -> None:
    """One coordinate a matrix, in the subspace of the message's step, and a Gaussian elsewhere, whoever sent it."""
    model = tied()
    flow = make(model, lr=0.25)
    flow.advance(15)
    flow.apply([(3, 9, step, 3 * 2**16)])
    z = direction(flow, flow.seed_of(3, 9), step // 10)
    before = dict(tied().named_parameters())
    for name, parameter in model.named_parameters():
        expected = before[name].detach() - 0.25 * 3 * z[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-5)
    for name in ("hidden.bias", "norm.weight", "norm.bias"):  # and exactly so where one rounding is all there is
        exact = before[name].detach() - (0.75 * z[name].double()).float()
        assert torch.equal(model.get_parameter(name).detach(), exact)
        assert not (z[name] * 2**NORMAL_BITS % 1).any()


def test_only_what_the_regex_finds_moves() -> None:
    model = tied()
    flow = make(model, trainable=r"^hidden\.")
    assert flow.names == ("hidden.weight", "hidden.bias")
    flow.apply([(0, k, 0, 2**20) for k in range(20)])
    old = dict(tied().named_parameters())
    changed = {name for name, new in model.named_parameters() if not torch.equal(new, old[name])}
    assert changed == {"hidden.weight", "hidden.bias"}
    assert make(tied(), trainable="head").names == ("embed.weight",)  # by its other name
    with pytest.raises(ValueError, match="trainable = 'nothing'"):
        make(tied(), trainable="nothing")


def test_no_dropout_in_either_pass_and_the_mode_comes_back() -> None:
    model = tied(dropout=0.5)
    model.norm.eval()
    flow = make(model)
    found = {flow.estimate(lambda: loss_of(model), 4) for _ in range(5)}
    plain = tied()
    assert found == {make(plain).estimate(lambda: loss_of(plain), 4)}
    assert model.training and model.dropout.training and not model.norm.training


def test_a_loss_that_is_none_is_named_and_leaves_the_model_whole() -> None:
    model = tied()
    with pytest.raises(NotFinite, match="lower eps"):
        make(model).estimate(lambda: torch.tensor(torch.nan), 0)
    with pytest.raises(ZeroDivisionError):
        make(model).estimate(lambda: 1 / 0, 0)
    assert equal(bits(model), bits(tied())) and torch.equal(model(IDS), tied()(IDS))


def test_scalars_are_clipped() -> None:
    values = iter([1e6, -1e6, -1e6, 1e6])
    flow = make(tied(), bound=1000)
    assert flow.estimate(lambda: next(values), 0) == 1000
    assert flow.estimate(lambda: next(values), 0) == -1000


def test_training_lowers_the_loss_like_mezo() -> None:
    losses = {}
    for name in ("subcge", "mezo"):
        model = tied()
        flow: SubCGE | MeZO
        if name == "subcge":
            flow = make(model, lr=5e-3, eps=1e-3, period=100)
        else:
            flow = MeZO(model, eps=1e-3, lr=5e-3, run_seed=5)

        def loss(model: nn.Module = model) -> Tensor:
            return loss_of(model)

        for step in range(300):
            if isinstance(flow, SubCGE):
                flow.advance(step)
            scalar = flow.estimate(loss, flow.seed_of(0, step))
            flow.apply([(0, step, step, scalar)])
        losses[name] = loss_of(model).item()
    assert losses["mezo"] < 0.8 * loss_of(tied()).item()
    assert losses["subcge"] < 0.8 * loss_of(tied()).item()


def test_mezo_replays_what_it_perturbed_along() -> None:
    """apply() adds the z of perturb(): along it a linear loss falls by exactly its slope."""
    layer = nn.Linear(4, 3, bias=False)
    before = layer.weight.detach().clone()
    flow = MeZO(layer, eps=0.5, lr=1.0, run_seed=1)
    flow.perturb(flow.seed_of(2, 9), 1)
    z = (layer.weight.detach() - before) / 0.5
    flow.restore()
    torch.testing.assert_close(layer.weight.detach(), before)
    flow.apply([(2, 9, 0, 3 * 2**16)])
    torch.testing.assert_close(layer.weight.detach(), before - 3 * z)
