"""What is stepped by whom and how gradients are clipped in MatrixFSDP, without ranks."""

from __future__ import annotations

import pytest
import torch

from peerloom.optim.matrix_fsdp import build_optimizer, clip_grad_norm_, shard
from tests.unit.optim.matrix_cases import Case, make_model


@pytest.mark.parametrize("most", [0.1, 1e6])
def test_the_clip_scales_as_torch_s_does(most: float) -> None:
    """The other tests clip both sides with it."""
    ours, theirs = make_model(Case()), make_model(Case())
    for model in (ours, theirs):
        for at, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.01 * (at + 1))
    norms = clip_grad_norm_(ours, most), torch.nn.utils.clip_grad_norm_(theirs.parameters(), most)
    torch.testing.assert_close(*norms)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_clip_rounds_bf16_gradients_once() -> None:
    model = make_model(Case(dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
    before = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    scale = 0.77 / clip_grad_norm_(model, 0.77)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, (gradient * scale).bfloat16(), rtol=2**-8, atol=0.0)
        assert float((parameter.grad == (gradient * scale).bfloat16()).float().mean()) > 0.99


def test_who_trains_what_and_with_which_settings() -> None:
    model = make_model(Case())
    built = build_optimizer(
        model, weight_decay=0.2, momentum=0.7, adamw_betas=(0.8, 0.85), adamw_eps=1e-6, adamw_weight_decay=0.3
    )
    (hidden,), (outer, vectors) = built.matrix.param_groups, built.adamw.param_groups
    named = [{built.names[parameter] for parameter in group["params"]} for group in (hidden, outer, vectors)]
    shapes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    assert named[0] == {name for name, dim in shapes.items() if ".layers." in name and dim == 2}
    assert named[1] == {"model.embed_tokens.weight", "lm_head.weight"}
    assert named[2] == {name for name, dim in shapes.items() if dim == 1}
    assert isinstance(built.matrix, torch.optim.Muon) and isinstance(built.adamw, torch.optim.AdamW)
    assert (hidden["weight_decay"], hidden["momentum"], hidden["ns_steps"]) == (0.2, 0.7, 5)
    assert [group["weight_decay"] for group in (outer, vectors)] == [0.3, 0.0]
    assert {(group["lr"], group["betas"], group["eps"]) for group in (outer, vectors)} == {(3e-4, (0.8, 0.85), 1e-6)}


def test_the_plan_knows_what_adamw_steps_and_what_nobody() -> None:
    """With owners for embeddings and head, too."""
    model = make_model(Case(frozen="q_proj"))
    plan = shard._planned(model, 3, "role_greedy", "newton_schulz", False, None)[1]
    assert plan is not None
    costs = {name: role.cost for unit in plan.units for role in unit.roles for name in role.names}
    outer = 12 * model.get_parameter("lm_head.weight").numel()
    assert costs["lm_head.weight"] == costs["model.embed_tokens.weight"] == outer
    assert costs["model.layers.0.self_attn.q_proj.weight"] == 0 < costs["model.layers.0.self_attn.k_proj.weight"]


def test_newton_schulz_on_row_shards_is_another_optimizer() -> None:
    torch.manual_seed(0)
    gradient, weight = torch.randn(32, 64), torch.zeros(32, 64)
    stepped = [torch.nn.Parameter(part.clone()) for part in (weight, *weight.chunk(2))]
    for parameter, part in zip(stepped, (gradient, *gradient.chunk(2)), strict=True):
        parameter.grad = part.clone()
        torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0).step()
    together = torch.cat([part.detach() for part in stepped[1:]])
    assert (together - stepped[0].detach()).norm() > 0.2 * stepped[0].detach().norm()
