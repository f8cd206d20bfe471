"""BasisRotatedAdam against the plain form of its equations, against AdamW, and as a torch optimizer."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peerloom.optim.basis_rotation import BasisRotatedAdam, stage_frequencies
from peerloom.optim.eigenbasis import (
    Geometry,
    Rotation,
    Source,
    next_from_moment,
)
from peerloom.optim.rotated_stack import rotated_direction

from .conftest import Draw

LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1
SOURCES: tuple[Source, ...] = ("1st", "2nd")
GEOMETRIES: tuple[Geometry, ...] = ("unilateral", "bilateral")
SHAPES = [(6, 4), (4, 6), (5, 5), (7, 1), (1, 7)]


def gram_schmidt(columns: Tensor) -> Tensor:
    """As many of the columns as there are rows, each made orthogonal to those before it."""
    found = torch.zeros(len(columns), 0, dtype=columns.dtype)
    for column in columns.T[: len(columns)]:
        for _ in range(2):  # once leaves what rounding is
            column = column - found @ (found.T @ column)
        found = torch.cat([found, (column / column.norm())[:, None]], 1)
    return found


class Plain:
    """One weight, step by step as the paper writes it; `first` are the bases of step 1, where null spaces are free."""

    def __init__(self, weight: Tensor, source: Source, geometry: Geometry, freq: int) -> None:
        self.w, self.source, self.freq, self.t = weight.clone(), source, freq, 0
        m, n = weight.shape
        self.left = min(m, n) > 1 and (geometry == "bilateral" or m < n)
        self.right = min(m, n) > 1 and (geometry == "bilateral" or m >= n)
        self.u, self.v = torch.eye(m).double(), torch.eye(n).double()
        self.rows, self.columns = torch.zeros(m, m).double(), torch.zeros(n, n).double()
        self.m, self.second = torch.zeros(m, n).double(), torch.zeros(m, n).double()

    def step(self, g: Tensor, first: tuple[Tensor | None, Tensor | None]) -> None:
        self.t += 1
        self.rows = BETA2 * self.rows + (1 - BETA2) * g @ g.T
        self.columns = BETA2 * self.columns + (1 - BETA2) * g.T @ g
        self.m = BETA1 * self.m + (1 - BETA1) * g
        if self.t == 1:
            self.u = self.u if first[0] is None else first[0].clone()
            self.v = self.v if first[1] is None else first[1].clone()
        elif self.t % self.freq == 0:
            self.refresh()
        rotated = self.u.T @ g @ self.v
        self.second = BETA2 * self.second + (1 - BETA2) * rotated * rotated
        direction = (self.u.T @ self.m @ self.v) / (self.second.sqrt() + EPS)
        correction = (1 - BETA2**self.t) ** 0.5 / (1 - BETA1**self.t)
        self.w = self.w * (1 - LR * DECAY) - LR * correction * self.u @ direction @ self.v.T

    def refresh(self) -> None:
        left, right = (self.rows, self.columns) if self.source == "2nd" else (self.m @ self.m.T, self.m.T @ self.m)
        if self.left:
            order = torch.argsort(-torch.diag(self.u.T @ left @ self.u))
            self.u, self.second = self.u[:, order], self.second[order]
        if self.right:
            order = torch.argsort(-torch.diag(self.v.T @ right @ self.v))
            self.v, self.second = self.v[:, order], self.second[:, order]
        if self.source == "1st" and self.left and self.right:
            m, n = self.m.shape  # past the range of M or M^T the basis stays what it was
            self.u = gram_schmidt(torch.cat([self.m @ self.v, self.u[:, n:]], 1))
            self.v = gram_schmidt(torch.cat([self.m.T @ self.u, self.v[:, m:]], 1))
            return
        if self.left:
            self.u = torch.linalg.qr(left @ self.u).Q
        if self.right:
            self.v = torch.linalg.qr(right @ self.v).Q


def optimizer(parameters: Any, **options: Any) -> BasisRotatedAdam:
    return BasisRotatedAdam(parameters, LR, (BETA1, BETA2), EPS, DECAY, **options)


def feed(tool: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    tool.step()


@pytest.mark.parametrize("freq", [1, 10, 100])
@pytest.mark.parametrize(("source", "geometry"), list(itertools.product(SOURCES, GEOMETRIES)))
def test_equals_the_plain_form_for_every_shape(draw: Draw, source: Source, geometry: Geometry, freq: int) -> None:
    weights = [draw(*shape) for shape in SHAPES for _ in range(2)]  # two of a shape share a stack
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    tool = optimizer(parameters, source=source, geometry=geometry, freq=freq)
    plain = [Plain(weight, source, geometry, freq) for weight in weights]
    tilt = [draw(*weight.shape) for weight in weights]  # a mean gradient, so that M has a lasting direction
    for _ in range(24):
        gradients = [draw(*weight.shape) + lean for weight, lean in zip(weights, tilt, strict=True)]
        feed(tool, parameters, gradients)
        for parameter, one, gradient in zip(parameters, plain, gradients, strict=True):
            state = tool.state[parameter]
            one.step(gradient, (state.get("left"), state.get("right")))
    for parameter, one in zip(parameters, plain, strict=True):
        torch.testing.assert_close(parameter.detach(), one.w, rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_beyond_the_range_of_the_moment_a_basis_stays_under_its_second_moment(
    draw: Draw, shape: tuple[int, int]
) -> None:
    m, n = shape
    last = Rotation(torch.linalg.qr(draw(2, m, m)).Q, torch.linalg.qr(draw(2, n, n)).Q)
    moment, second = draw(2, m, n), draw(2, m, n).square()
    found, permuted = next_from_moment(last, moment, second)
    again, kept = next_from_moment(found, moment, permuted)
    short = min(m, n)
    for k in range(2):
        assert last.left is not None and last.right is not None
        rows = (moment[k].T @ last.left[k]).norm(dim=0).argsort(descending=True)
        columns = (moment[k] @ last.right[k]).norm(dim=0).argsort(descending=True)
        torch.testing.assert_close(permuted[k], second[k][rows][:, columns])
        plain = torch.linalg.qr(moment[k] @ last.right[k][:, columns], mode="complete").Q
        sides = [plain, torch.linalg.qr(moment[k].T @ plain, mode="complete").Q]
        for side, theirs, size in zip(found, sides, shape, strict=True):
            assert side is not None
            torch.testing.assert_close(side[k].T @ side[k], torch.eye(size).double())
            torch.testing.assert_close(side[k][:, :short], theirs[:, :short])
        ours, then, before = (
            (each.left if m > n else each.right)[k]
            for each in (found, again, last)  # type: ignore[index]
        )
        order = rows if m > n else columns
        overlap = (ours[:, short:].T @ before[:, order][:, short:]).abs()
        assert float(overlap.diag().min()) > 0.3
        same = (ours[:, short:].T @ then[:, short:]).abs()  # a permutation, since none of them is weaker than another
        torch.testing.assert_close(same.round(), same)
        moved = short + same.argmax(0)
        ends = (permuted[k], kept[k]) if m > n else (permuted[k].T, kept[k].T)
        short_side = moment[k] @ found.right[k] if m > n else moment[k].T @ found.left[k]  # type: ignore[index]
        torch.testing.assert_close(ends[1][short:], ends[0][moved][:, short_side.norm(dim=0).argsort(descending=True)])


@pytest.mark.parametrize(("source", "geometry"), list(itertools.product(SOURCES, GEOMETRIES)))
def test_the_first_basis_diagonalizes_and_is_orthogonal(draw: Draw, source: Source, geometry: Geometry) -> None:
    weight = nn.Parameter(draw(6, 4))
    gradient = draw(6, 4)
    tool = optimizer([weight], source=source, geometry=geometry)
    feed(tool, [weight], [gradient])
    state = tool.state[weight]
    assert ("left" in state, "right" in state) == (geometry == "bilateral", True)
    left = state.get("left", torch.eye(6).double())
    torch.testing.assert_close(left.T @ left, torch.eye(6).double())
    turned = state["right"].T @ gradient.T @ gradient @ state["right"]
    torch.testing.assert_close(turned, torch.diag(turned.diag()), atol=1e-10, rtol=0)
    assert bool((turned.diag().diff() <= 0).all())


def test_what_is_not_rotated_is_adamw(draw: Draw) -> None:
    shapes = [(3, 4), (5,), (1,), (2, 3, 2, 2)]
    ours, theirs = ([nn.Parameter(draw(*shape)) for shape in shapes] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.data.copy_(one.data)
    tool = optimizer([{"params": ours[:1] + ours[3:], "rotate": False}, {"params": ours[1:3]}])
    reference = torch.optim.AdamW(theirs, LR, (BETA1, BETA2), EPS, DECAY)
    for _ in range(20):
        gradients = [draw(*shape) for shape in shapes]
        feed(tool, ours, gradients)
        feed(reference, theirs, gradients)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_the_identity_for_a_basis_it_is_adamw(draw: Draw, dtype: torch.dtype) -> None:
    """freq beyond the run, and both bases set to the identity after a first step of no gradient."""
    start = draw(6, 4, dtype=dtype)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    tool = optimizer([ours], freq=1000)
    reference = torch.optim.AdamW([theirs], LR, (BETA1, BETA2), EPS, DECAY)
    for step in range(40):
        gradient = draw(6, 4, dtype=dtype) if step else torch.zeros(6, 4, dtype=dtype)
        feed(tool, [ours], [gradient])
        feed(reference, [theirs], [gradient])
        for side in ("left", "right"):
            basis = tool.state[ours][side]
            basis.copy_(torch.eye(len(basis)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)  # eps is scaled by sqrt(1 - b2^t) there


def test_a_state_dict_goes_on_bit_for_bit_and_keeps_its_dtypes(draw: Draw) -> None:
    shapes = [(6, 4), (6, 4), (3, 3), (4,)]
    start = [draw(*shape, dtype=torch.bfloat16) for shape in shapes]
    gradients = [[draw(*shape, dtype=torch.bfloat16) for shape in shapes] for _ in range(10)]
    straight, broken = ([nn.Parameter(weight.clone()) for weight in start] for _ in range(2))
    first, second = optimizer(straight, freq=3), optimizer(broken, freq=3)
    for step in range(5):
        feed(first, straight, gradients[step])
        feed(second, broken, gradients[step])
    again = optimizer(broken, freq=7)
    again.load_state_dict(pickle.loads(pickle.dumps(second.state_dict())))
    assert again.param_groups[0]["freq"] == 3
    assert again.state[broken[0]]["left"].dtype == torch.float32
    twins = copy.deepcopy((broken, again))
    for step in range(5, 10):
        feed(first, straight, gradients[step])
        feed(again, broken, gradients[step])
        feed(twins[1], twins[0], gradients[step])
    for one, other, twin in zip(straight, broken, twins[0], strict=True):
        assert torch.equal(one, other) and torch.equal(one, twin)


def test_a_weight_without_gradient_stands_and_the_others_do_not_notice(draw: Draw) -> None:
    """The stack changes its members: each keeps its own count of steps."""
    one, other, alone = (nn.Parameter(torch.ones(4, 3).double()) for _ in range(3))
    together, single = optimizer([one, other], freq=2), optimizer([alone], freq=2)
    for step in range(7):
        gradient = draw(4, 3)
        one.grad, alone.grad = gradient.clone(), gradient.clone()
        other.grad = draw(4, 3) if step in (2, 5) else None
        together.step()
        single.step()
    assert torch.equal(one, alone)
    assert (int(together.state[one]["step"]), int(together.state[other]["step"])) == (7, 2)


def test_groups_may_differ_in_rate_and_still_share_a_stack(draw: Draw) -> None:
    weights = [nn.Parameter(torch.ones(4, 3).double()) for _ in range(3)]
    tool = optimizer([{"params": weights[:1]}, {"params": weights[1:2], "lr": 2 * LR}])
    alone = optimizer([weights[2]])
    alone.param_groups[0]["lr"] = 2 * LR
    for _ in range(3):
        gradient = draw(4, 3)
        feed(tool, weights[:2], [gradient, gradient])
        feed(alone, weights[2:], [gradient])
    assert len(tool._stacks) == 1
    torch.testing.assert_close(weights[1], weights[2], rtol=0, atol=1e-14)
    assert not torch.equal(weights[0], weights[1])


def test_convolutions_are_matrices_and_long_sides_are_left_alone(draw: Draw) -> None:
    kernel = draw(4, 2, 3, 3)
    four = nn.Parameter(kernel.clone(memory_format=torch.channels_last))
    two = nn.Parameter(kernel.reshape(4, 18).clone())
    wide = nn.Parameter(draw(3, 12))
    tool = optimizer([four, two, wide], max_side=18)
    sided = optimizer([wide], max_side=8)
    for _ in range(4):
        gradient = draw(4, 2, 3, 3)
        feed(tool, [four, two, wide], [gradient, gradient.reshape(4, 18), draw(3, 12)])
        feed(sided, [wide], [draw(3, 12)])
    torch.testing.assert_close(four.detach().reshape(4, 18), two.detach(), rtol=0, atol=1e-13)
    assert tool.state[four]["exp_avg"].shape == four.shape
    assert "left" in sided.state[wide] and "right" not in sided.state[wide]


def test_the_step_of_a_stack_compiles_whole(draw: Draw) -> None:
    gradient, first, second = draw(2, 4, 3), draw(2, 4, 3), draw(2, 4, 3).square()
    rotation = Rotation(torch.linalg.qr(draw(2, 4, 4)).Q, torch.linalg.qr(draw(2, 3, 3)).Q)
    compiled = torch.compile(rotated_direction, backend="eager", fullgraph=True)
    arguments = [(first.clone(), second.clone()) for _ in range(2)]
    found = [
        call(gradient, rotation, *moments, BETA1, BETA2, EPS)
        for call, moments in zip((rotated_direction, compiled), arguments, strict=True)
    ]
    assert torch.equal(*found) and torch.equal(arguments[0][0], arguments[1][0])


def test_the_whole_step_compiles_and_trains_the_same(draw: Draw) -> None:
    """Over two refreshes; graphs break where values decide, and none is made anew once each kind of step was seen."""
    start = [draw(5, 4) for _ in range(2)]
    plain, compiled = ([nn.Parameter(weight.clone()) for weight in start] for _ in range(2))
    first, second = optimizer(plain, freq=3), optimizer(compiled, freq=3)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    second.step = torch.compile(second.step, backend=count)  # type: ignore[method-assign]
    by_step = []
    for _ in range(7):
        gradients = [draw(5, 4) for _ in range(2)]
        feed(first, plain, gradients)
        feed(second, compiled, gradients)
        by_step.append(len(graphs))
    assert by_step[0] and by_step[2] == by_step[-1], by_step
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("stages", "freq"), list(itertools.product([1, 2, 4, 8, 32], [1, 4, 10, 100])))
def test_stage_frequencies_give_early_stages_more_of_the_same_budget(stages: int, freq: int) -> None:
    found = stage_frequencies(stages, freq)
    assert len(found) == stages and min(found) >= 1 and found == sorted(found)
    assert sum(1 / one for one in found) == pytest.approx(stages / freq, rel=0.02)
    assert stages == 1 or freq == 1 or found[0] < freq < found[-1]


def test_stage_frequencies_of_the_paper_s_depth() -> None:
    found = stage_frequencies(32, 10)
    assert (found[0], found[-1]) == (5, 164)  # exact rates: 10 * 33 / 2 / 32 = 5.2 and 165
    with pytest.raises(ValueError, match="at least 1"):
        stage_frequencies(0, 10)
