"""What a whole training step costs with BasisRotatedAdam over AdamW, forward and backward included.

A step is forward and backward of its microbatches and one optimizer step. Its parts are timed in turn, on one thread
and in CPU seconds, and put together from medians: microbatches * pass + optimizer, where BasisRotatedAdam's optimizer
step is (freq - 1) ordinary steps and one refresh, over freq. The first step's eigenbases are left out: it is one of a
run.

`step_cost_*_whole` are put together from nothing: ten steps of each optimizer in turn, clipping included, of which one
refreshes; at the demo's own small batch the optimizer weighs the most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerloom.optim.basis_rotation import BasisRotatedAdam
from tests.benchmarks.rows import Row, median

BYTES = 256
FREQUENCIES = (10, 100)  # steps between refreshes
WHOLE_FREQ = 10  # of whole steps, and how many are taken: one of them refreshes
CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Scale:
    """A Llama's blocks at one width, the tokens of a step and of a pass, and how often each part is timed."""

    width: int
    hidden: int
    layers: int
    length: int
    tokens: int
    tokens_a_pass: int
    rounds: int


SMALL = Scale(
    width=256, hidden=704, layers=2, length=256, tokens=8192, tokens_a_pass=2048, rounds=5
)  # fmt: skip
DEMO = Scale(
    width=128, hidden=352, layers=4, length=128, tokens=1024, tokens_a_pass=1024, rounds=5
)  # fmt: skip
LARGE = Scale(
    width=1024, hidden=2816, layers=1, length=1024, tokens=65536, tokens_a_pass=2048, rounds=3
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parts:
    """Median CPU seconds."""

    forward_backward: float
    adamw: float
    ordinary: float
    refresh: float

    def whole(self, scale: Scale, freq: int | None) -> float:
        """A training step; without `freq` AdamW's."""
        step = self.adamw if freq is None else ((freq - 1) * self.ordinary + self.refresh) / freq
        return self.forward_backward * (scale.tokens / scale.tokens_a_pass) + step


class Block(nn.Module):
    """Attention and SwiGLU with RMSNorm, no rotary positions: they cost nothing here."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        w = scale.width
        self.heads = max(1, w // 64)
        self.norms = nn.ModuleList([nn.RMSNorm(w), nn.RMSNorm(w)])
        self.q, self.k, self.v, self.out = (nn.Linear(w, w, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(w, scale.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(scale.hidden, w, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )  # fmt: skip
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        normed = self.norms[1](x)
        wider: Tensor = F.silu(self.gate(normed)) * self.up(normed)
        return x + self.down(wider)


class Net(nn.Module):
    """Bytes in, logits out."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, scale.width)
        self.blocks = nn.Sequential(*(Block(scale) for _ in range(scale.layers)))
        self.norm = nn.RMSNorm(scale.width)
        self.head = nn.Linear(scale.width, BYTES, bias=False)

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def cost_rows(*, quick: bool) -> list[Row]:
    """`step_cost_256_freq10` and `_freq100` and the demo's whole steps; where there is time those of 256, and 1024."""
    measured = [(scale, measure(scale)) for scale in ((SMALL,) if quick else (SMALL, LARGE))]
    rows = [cost_row(scale, freq, parts) for scale, parts in measured for freq in FREQUENCIES]
    return [*rows, *(whole_row(scale) for scale in ((DEMO,) if quick else (DEMO, SMALL)))]


def whole_row(scale: Scale) -> Row:
    """Whole steps, timed as they are; the mean of ten, since one of these refreshes and weighs a tenth."""
    ours, theirs = whole_steps(scale)
    return Row(
        name=f"step_cost_{'demo' if scale is DEMO else scale.width}_whole_freq{WHOLE_FREQ}",
        value=sum(ours) / len(ours),
        unit="CPU s a step",
        baseline="AdamW, fused",
        baseline_value=sum(theirs) / len(theirs),
        setting=f"{scale.layers} blocks of width {scale.width}, {scale.tokens} tokens a step in passes of "
        f"{scale.tokens_a_pass}, {len(ours)} steps each in turn with clipping; median step {median(ours):.4f} s, "
        f"the longest, a refresh, {max(ours):.4f} s, AdamW's median {median(theirs):.4f} s, 1 thread",
    )


def whole_steps(scale: Scale) -> tuple[list[float], list[float]]:
    """CPU seconds of each step with BasisRotatedAdam, after the first, and with AdamW, in turn."""
    net, tokens, adamw, rotated = tools(scale, WHOLE_FREQ)
    groups = [group["params"] for group in rotated.param_groups]

    def step(optimizer: torch.optim.Optimizer, clipped: list[list[Tensor]]) -> None:
        for _ in range(scale.tokens // scale.tokens_a_pass):
            torch.autograd.backward(net.loss(tokens))
        for together in clipped:
            nn.utils.clip_grad_norm_(together, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    torch.autograd.backward(net.loss(tokens))
    for optimizer in (adamw, rotated):  # what a first step alone does: moments, and the bases from scratch
        optimizer.step()
    net.zero_grad()
    every = [list(net.parameters())]
    taken = [(seconds(lambda: step(rotated, groups)), seconds(lambda: step(adamw, every))) for _ in range(WHOLE_FREQ)]
    ours, theirs = zip(*taken, strict=True)
    return list(ours), list(theirs)


def tools(scale: Scale, freq: int) -> tuple[Net, Tensor, torch.optim.AdamW, BasisRotatedAdam]:
    """A net, the tokens of a pass, and both optimizers over the same parameters."""
    torch.manual_seed(0)
    net = Net(scale)
    tokens = torch.randint(0, BYTES, (scale.tokens_a_pass // scale.length, scale.length + 1))
    adamw = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    matrices = [parameter for parameter in net.blocks.parameters() if parameter.dim() == 2]
    known = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in net.parameters() if id(parameter) not in known]
    groups = [{"params": matrices}, {"params": rest, "rotate": False}]
    return net, tokens, adamw, BasisRotatedAdam(groups, 1e-4, freq=freq)


def cost_row(scale: Scale, freq: int, parts: Parts) -> Row:
    """One row; the setting says what the step was and what its parts took."""
    return Row(
        name=f"step_cost_{scale.width}_freq{freq}",
        value=parts.whole(scale, freq),
        unit="CPU s a step",
        baseline="AdamW, fused",
        baseline_value=parts.whole(scale, None),
        setting=f"{scale.layers} blocks, {scale.tokens} tokens a step in passes of {scale.tokens_a_pass} "
        f"({parts.forward_backward:.3f} s each), AdamW {parts.adamw:.4f} s, ordinary step {parts.ordinary:.4f} s, "
        f"refresh {parts.refresh:.4f} s, 1 thread",
    )


def measure(scale: Scale) -> Parts:
    """Times the parts in turn."""
    net, tokens, adamw, rotated = tools(scale, 2)

    def both() -> None:
        net.zero_grad()
        torch.autograd.backward(net.loss(tokens))

    both()
    for first in (adamw.step, rotated.step):
        first()
    turn = [both, adamw.step, rotated.step, rotated.step]  # every second step refreshes, first the one at t = 2
    taken = [[seconds(part) for part in turn] for _ in range(scale.rounds)]
    passes, adamws, refreshes, ordinary = (median(column) for column in zip(*taken, strict=True))
    return Parts(passes, adamws, ordinary, refreshes)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process, which on one thread are those of an idle machine's clock."""
    started = time.process_time()
    work()
    return time.process_time() - started
