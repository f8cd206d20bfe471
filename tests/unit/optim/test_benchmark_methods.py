"""The benchmark's stacked methods are the product's: `Outer` against `GASLoC` objects, a fragment each."""

from __future__ import annotations

import pytest
import torch

from peerloom.optim.fragments import due_after, fragments, own_round
from peerloom.optim.gasloc import GASLoC, Momentum
from peerloom.optim.groups import group_mean, hypercube_groups
from tests.benchmarks.gasloc_methods import Outer, Setting, copies, mixing
from tests.benchmarks.gasloc_model import Shape, Stacked
from tests.benchmarks.gasloc_train import AdamW

from .conftest import Draw


@pytest.mark.parametrize("momentum", ["pre", "post"])
@pytest.mark.parametrize("count", [1, 2])
def test_groups_in_fragments_are_those_of_the_product(count: int, momentum: Momentum, draw: Draw) -> None:
    n, d, h = 8, 1024, 4
    setting = Setting(
        label="", partners="cube-groups", group=4, fragments=count, h=h, steps=16, workers=n, gamma=0.4, eta=0.9,
        momentum=momentum,
    )  # fmt: skip
    stacked = draw(1, d, dtype=torch.float32).repeat(n, 1)
    apart = stacked.clone()
    outer = Outer(setting, 0, stacked)
    parts = fragments(d, count)
    workers = [[GASLoC(row[part], eta=0.9, alpha=1.0, gamma=0.4, momentum=momentum) for row in apart] for part in parts]
    for worker in [worker for group in workers for worker in group]:
        worker.start_round()
    for step in range(1, setting.steps + 1):
        drift = draw(n, d, dtype=torch.float32)
        stacked += drift
        apart += drift
        outer.after(step)
        for f in due_after(step, h, count):
            ys = torch.stack([worker.proposal() for worker in workers[f]])
            for group in hypercube_groups(n, 4, own_round(step, h, count, f) + f):
                means = group_mean(ys[list(group)])
                for place, i in enumerate(group):
                    workers[f][i].mix_mean(means[place])
                    workers[f][i].start_round()
        torch.testing.assert_close(stacked, apart, atol=1e-4, rtol=1e-5)


def test_mixing_late_keeps_what_was_trained_meanwhile(draw: Draw) -> None:
    """Without later drift it is the blocking form; with it, the drift lies on top."""
    setting = Setting(label="", partners="1peer", h=4, steps=100, workers=4, delay=2)
    late, blocking = draw(4, 300, dtype=torch.float32), draw(4, 300, dtype=torch.float32)
    blocking.copy_(late)
    outers = [Outer(setting, 0, late), Outer(Setting(label="", partners="1peer", h=4, workers=4), 0, blocking)]
    for step in range(1, 5):
        for outer in outers:
            outer.after(step)
    drift = draw(4, 300, dtype=torch.float32)
    late += drift
    for step in (5, 6):
        outers[0].after(step)
    torch.testing.assert_close(late - drift, blocking, atol=1e-5, rtol=0)


def test_what_is_sent_and_how_it_mixes() -> None:
    sent = {p: copies(Setting(label="", partners=p)) for p in ("alone", "ring", "1peer", "2peer", "all", "cube-groups")}  # type: ignore[arg-type]
    assert sent == {"alone": 0.0, "ring": 2.0, "1peer": 1.0, "2peer": 2.0, "all": 1.875, "cube-groups": 1.5}
    assert copies(Setting(label="", method="noloco", partners="1peer")) == 2.0
    for partners in ("alone", "ring", "1peer", "2peer", "hypercube", "base", "cube-groups", "random-groups", "all"):
        matrix = mixing(Setting(label="", partners=partners), 0, 3)  # type: ignore[arg-type]
        assert torch.allclose(matrix.sum(0), torch.ones(16), atol=1e-6) and torch.equal(matrix, matrix.T)


def test_stacked_gradients_are_each_worker_s_own() -> None:
    shape = Shape(width=16, layers=1, heads=2, hidden=24, length=8)
    stacked = Stacked(shape, 3, seed=1)
    tokens = torch.randint(256, (3, 2, 9), generator=torch.Generator().manual_seed(2))
    losses = stacked.backward(tokens)
    for i in range(3):
        alone = Stacked(shape, 1, seed=1)
        loss = alone.backward(tokens[i : i + 1])
        torch.testing.assert_close(loss[0], losses[i])
        torch.testing.assert_close(alone.gradients[0], stacked.gradients[i], atol=1e-6, rtol=1e-4)
    assert abs(losses.mean().item() - 5.545) < 0.1  # the logarithm of 256


def test_adamw_is_torch_s_and_rows_may_skip(draw: Draw) -> None:
    params, gradients = draw(3, 20, dtype=torch.float32), draw(4, 3, 20, dtype=torch.float32)
    expected = params[:2].clone().requires_grad_()
    oracle = torch.optim.AdamW([expected], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    kept, inner = params[2].clone(), AdamW(params)
    for gradient in gradients:
        inner.step(gradient, 1e-2, [0, 1])
        expected.grad = gradient[:2].clone()
        oracle.step()
    torch.testing.assert_close(params[:2], expected.detach())
    assert torch.equal(params[2], kept)
