"""The delayed-gradient reference against models whose every weight version can be written down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peerloom.optim.delayed import DelayedWeights, pipeline_delays

from .conftest import Draw


def test_the_first_stage_waits_longest_and_the_last_not_at_all() -> None:
    assert pipeline_delays(4) == [3, 2, 1, 0]
    with pytest.raises(ValueError, match="at least one stage"):
        pipeline_delays(0)


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_a_scalar_sees_the_weight_of_exactly_so_many_updates_ago(delay: int) -> None:
    """loss = w^2 / 2 with plain descent: w_{t+1} = w_t - lr w_{t - delay}, and w_0 before the start."""
    weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    delayed = DelayedWeights([[weight]], [delay])
    expected = [1.0]
    for step in range(12):
        weight.grad = None
        loss = delayed.backward(lambda: weight.square() / 2)
        old = expected[max(0, step - delay)]
        assert float(loss) == pytest.approx(old**2 / 2, abs=1e-15)
        assert weight.item() == expected[-1]  # between calls it holds the newest
        weight.data -= 0.1 * weight.grad
        delayed.commit()
        expected.append(expected[-1] - 0.1 * old)
        assert weight.item() == pytest.approx(expected[-1], abs=1e-15)


def two_stages() -> tuple[nn.Parameter, nn.Parameter]:
    return tuple(nn.Parameter(torch.tensor([[value]], dtype=torch.float64)) for value in (2.0, 3.0))  # type: ignore


@pytest.mark.parametrize("stash", [True, False])
def test_with_and_without_stash(stash: bool) -> None:
    """loss = b a x: without stash the backward pass of a's stage goes through the newest b, which is never old here;
    so the delay is put on b, whose old value gave the loss and whose newest gives a's gradient."""
    a, b = two_stages()
    delayed = DelayedWeights([[a], [b]], [0, 1], stash=stash)
    x = torch.ones(1, 1, dtype=torch.float64)

    def loss() -> Tensor:
        return (x @ a @ b).sum()

    delayed.backward(loss)
    b.data += 1.0  # version 1: 4.0
    delayed.commit()
    a.grad = b.grad = None
    value = delayed.backward(loss)
    assert float(value) == 6.0  # 2 * 3: both modes go forward through the old b
    assert a.grad is not None and float(a.grad) == (3.0 if stash else 4.0)
    assert b.item() == 4.0


def test_memory_and_identity_are_kept(draw: Draw) -> None:
    weights = [nn.Parameter(draw(3, 2)) for _ in range(2)]
    places = [weight.data_ptr() for weight in weights]
    delayed = DelayedWeights([[weights[0]], [weights[1]]], [1, 0])
    for _ in range(3):
        delayed.backward(lambda: (weights[0] * weights[1]).sum())
        with torch.no_grad():
            for weight in weights:
                weight -= 0.1
        delayed.commit()
    assert [weight.data_ptr() for weight in weights] == places


def test_a_loss_that_fails_leaves_the_newest_weights() -> None:
    weight = nn.Parameter(torch.zeros(2))
    delayed = DelayedWeights([[weight]], [1])
    weight.data += 1
    delayed.commit()
    with pytest.raises(ZeroDivisionError):
        delayed.backward(lambda: torch.tensor(1 / 0))
    assert bool((weight == 1).all())
    with pytest.raises(ValueError, match="as many delays"):
        DelayedWeights([[weight]], [1, 0])
